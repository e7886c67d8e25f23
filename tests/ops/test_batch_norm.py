"""Batch norm in training: torch's own on the CPU, and its kernels against torch in float64."""

import pytest
import torch

from compressm.ops import SequenceError
from compressm.ops.block.norm import RunningStatistics, batch_norm
from tests.kernels import DEVICE, MARK, few_programs, later, nan_memory, normal, relative

__all__ = ["few_programs", "nan_memory"]

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
EPS = 1e-5


def running(width, momentum=0.3, dtype=torch.float32):
    mean, variance = normal(width, seed=8, dtype=dtype), normal(width, seed=9, dtype=dtype).square()
    return RunningStatistics(mean, variance, torch.tensor(4, device=DEVICE), momentum)


def given(batch, length, width, dtype=torch.float32, affine=True):
    inputs = {"x": normal(batch, length, width, dtype=dtype), "skip": normal(width, seed=3)}
    return inputs | ({"weight": normal(width, seed=1), "bias": normal(width, seed=2)} if affine else {})


def arriving(inputs):
    """Gradients of u, of x, and of what D ⊙ u is added to."""
    return [normal(*inputs["x"].shape, seed=seed, dtype=inputs["x"].dtype) for seed in (4, 6, 5)]


def by_kernels(inputs, statistics, grads):
    from compressm.ops.block.norm_triton import FusedBatchNorm

    leaves = {name: value.clone().requires_grad_(name != "skip") for name, value in inputs.items()}
    tensors = [leaves.get(name) for name in ("x", "weight", "bias", "skip")]
    outputs = FusedBatchNorm.apply(*tensors, *statistics, EPS)
    chosen = [(output, grad) for output, grad in zip(outputs, grads, strict=False) if grad is not None]
    torch.autograd.backward(*zip(*chosen, strict=True))
    return outputs, {name: leaf.grad for name, leaf in leaves.items() if name != "skip"}


def by_torch(inputs, statistics, grads):
    norm = torch.nn.BatchNorm1d(
        inputs["x"].shape[-1], EPS, statistics.momentum, affine="weight" in inputs, device=DEVICE, dtype=torch.float64
    )
    state = {"running_mean": statistics.mean, "running_var": statistics.variance}
    affine = {name: inputs[name] for name in ("weight", "bias") if name in inputs}
    norm.load_state_dict(state | affine | {"num_batches_tracked": statistics.batches})
    x, D = inputs["x"].double().requires_grad_(), inputs["skip"].double()
    u = norm(x.flatten(0, 1)).view_as(x)
    du, dx, dlink = (torch.zeros_like(x) if grad is None else grad.double() for grad in grads)
    u.backward(du + D * dlink)
    gradients = {name: value.grad for name, value in norm.named_parameters()}
    return u, gradients | {"x": x.grad + dx}, norm


def check_against_torch(inputs, statistics=None, grads=None, tolerance=None):
    width, dtype = inputs["x"].shape[-1], inputs["x"].dtype
    statistics = statistics or running(width)
    grads, tolerance = grads or arriving(inputs), tolerance or TOLERANCE[dtype]
    u, gradients, norm = by_torch(inputs, statistics, grads)
    (got, same, link, *_), got_gradients = by_kernels(inputs, statistics, grads)
    assert got.dtype == dtype
    assert torch.equal(same, inputs["x"])
    assert relative(got, u) < tolerance
    assert not link.any()
    for name, value in gradients.items():
        assert got_gradients[name].dtype == inputs[name].dtype
        assert relative(got_gradients[name], value) < tolerance, name
    scale = norm.running_mean.abs() + norm.running_var.sqrt()
    assert ((statistics.mean - norm.running_mean).abs() / scale).max() < 2e-5
    assert relative(statistics.variance, norm.running_var) < 5e-6
    assert statistics.batches == norm.num_batches_tracked == 5


@pytest.mark.parametrize("momentum", [0.3, None])
def test_on_the_cpu_it_is_that_of_torch(momentum):
    x, statistics = normal(3, 7, 5).cpu(), RunningStatistics(*(part.cpu() for part in running(5)[:3]), momentum)
    norm = torch.nn.BatchNorm1d(5, momentum=momentum)
    norm.load_state_dict(
        dict(zip(("running_mean", "running_var", "num_batches_tracked"), statistics[:3], strict=True)), strict=False
    )
    normalised = batch_norm(x, norm.weight, norm.bias, statistics)
    assert torch.equal(normalised.u, norm(x.flatten(0, 1)).view_as(x))
    assert normalised.link is None
    assert torch.equal(statistics.variance, norm.running_var)
    assert statistics.batches == norm.num_batches_tracked


def test_one_step_in_all_is_refused():
    with pytest.raises(SequenceError, match="at least 2 steps"):
        batch_norm(normal(1, 1, 5), None, None, running(5))


@MARK
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "affine"),
    [(1, True), (5, True), (8, True), (8, False), (31, True), (64, True), later(140, False), later(200, False)],
)
@pytest.mark.usefixtures("nan_memory")
def test_the_kernels_are_torch_in_values_statistics_and_gradients(dtype, affine, width):
    check_against_torch(given(3, 47, width, dtype, affine))


@MARK
@pytest.mark.parametrize(("width", "tokens"), [(8, (5, 1001)), (40, (12, 51)), later(150, (13, 31))])
@pytest.mark.usefixtures("few_programs")
def test_programs_that_take_several_tiles_are_torch_too(width, tokens):
    check_against_torch(given(*tokens, width))


@MARK
@pytest.mark.parametrize("width", [8, 40])
def test_two_steps_are_enough(width):
    # Of two values one is the other's mirror image: x̂ = ±1, and dx is all cancellation.
    check_against_torch(given(1, 2, width), tolerance=1e-2)


@MARK
@pytest.mark.parametrize("width", [8, 64])
def test_without_momentum_every_batch_counts_the_same(width):
    check_against_torch(given(3, 9, width), running(width, momentum=None))


@MARK
@pytest.mark.parametrize("width", [8, 64])
def test_a_mean_a_thousand_deviations_away_costs_no_digits(width):
    inputs = given(3, 300, width)
    check_against_torch(inputs | {"x": inputs["x"] + 1e3}, tolerance=1e-4)


@MARK
@pytest.mark.parametrize("width", [8, 64])
def test_an_outlier_in_the_first_step_costs_no_digits(width):
    inputs = given(3, 300, width)
    inputs["x"][0, 0] = 1e3
    check_against_torch(inputs, tolerance=1e-4)


@MARK
@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("missing", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_a_gradient_that_does_not_arrive_counts_as_zero(width, missing):
    inputs = given(3, 9, width)
    check_against_torch(inputs, grads=[None if i in missing else grad for i, grad in enumerate(arriving(inputs))])


@MARK
@pytest.mark.parametrize("width", [8, 64])
def test_the_gradient_of_x_alone_passes_through(width):
    inputs = given(3, 9, width)
    gradient = arriving(inputs)[1]
    _, gradients = by_kernels(inputs, running(width), [None, gradient, None])
    assert torch.equal(gradients["x"], gradient)
    assert gradients["weight"] is None


@MARK
@pytest.mark.parametrize("width", [8, 64])
def test_memory_may_be_laid_out_in_any_way(width):
    inputs = given(3, 9, width)
    grads = [grad.mT.contiguous().mT for grad in arriving(inputs)]
    check_against_torch(inputs | {"x": inputs["x"].mT.contiguous().mT}, grads=grads)


@MARK
@pytest.mark.parametrize("width", [8, 64])
def test_parameters_may_be_trained_without_the_input(width):
    from compressm.ops.block.norm_triton import FusedBatchNorm

    inputs = given(3, 9, width)
    expected = by_torch(inputs, running(width), arriving(inputs))[1]
    weight, bias = (inputs[name].clone().requires_grad_() for name in ("weight", "bias"))
    outputs = FusedBatchNorm.apply(inputs["x"], weight, bias, inputs["skip"], *running(width), EPS)
    torch.autograd.backward(outputs[:3], arriving(inputs))
    assert relative(weight.grad, expected["weight"]) < 5e-6
    assert relative(bias.grad, expected["bias"]) < 5e-6


def linked(inputs, grads, u):
    """Gradients of x, of D ⊙ u and of u as two links bring them, each with Σ g and Σ g ⊙ u."""
    totals = [
        torch.stack([grad.double().sum((0, 1)), (grad.double() * u).sum((0, 1))]).float()
        for grad in (grads[2], grads[0])
    ]
    return [None, grads[1], grads[2], totals[0], grads[0], totals[1]]


@MARK
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.usefixtures("nan_memory")
def test_sums_that_come_along_are_not_made_again(dtype, affine, monkeypatch):
    from compressm.ops.block import norm_triton as triton

    monkeypatch.setattr(triton, "column_sums", None)
    inputs = given(3, 47, 64, dtype, affine)
    u, gradients, _ = by_torch(inputs, running(64), arriving(inputs))
    got = by_kernels(inputs, running(64), linked(inputs, arriving(inputs), u.detach()))[1]
    for name, value in gradients.items():
        assert relative(got[name], value) < 2 * TOLERANCE[dtype], name


@MARK
@pytest.mark.parametrize("size", [0.0, later(1e-7), 1e-3])
def test_where_u_hides_what_was_normalised_the_sums_are_made(size):
    inputs = given(3, 47, 160)
    inputs["weight"][3:150:7] = size
    u, gradients, _ = by_torch(inputs, running(160), arriving(inputs))
    got = by_kernels(inputs, running(160), linked(inputs, arriving(inputs), u.detach()))[1]
    for name, value in gradients.items():
        assert relative(got[name], value) < 2e-5, name


@MARK
def test_what_comes_to_u_itself_is_added_to_what_links_bring():
    inputs = given(3, 47, 64)
    u, gradients, _ = by_torch(inputs, running(64), arriving(inputs))
    grads = linked(inputs, arriving(inputs), u.detach())
    grads[0], grads[4] = 0.25 * grads[4], 0.75 * grads[4]
    got = by_kernels(inputs, running(64), grads)[1]
    for name, value in gradients.items():
        assert relative(got[name], value) < 5e-6, name


@MARK
@pytest.mark.parametrize("shape", [(1, 1), (300, 5), (1000, 17)])
def test_column_sums_are_those_of_torch(shape):
    from compressm.ops.sums_triton import column_sums

    x = normal(*shape)
    assert relative(column_sums(x), x.double().sum(0)) < 1e-6
