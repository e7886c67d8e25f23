"""Running norm in training: the definition against autograd and a formula, its kernels against the definition."""

import pytest
import torch

from compressm.ops.block.norm import RunningStatistics, plain_running_norm, running_norm
from tests.kernels import DEVICE, MARK, few_programs, later, nan_memory, relative
from tests.ops.test_batch_norm import EPS, TOLERANCE, arriving, given, linked

__all__ = ["few_programs", "nan_memory"]

MOMENTUM = 0.3
FORMS = [True, False]  # gradients through the averages, or not


def statistics(width, batches, dtype=torch.float32):
    generator = torch.Generator().manual_seed(8)
    mean, variance = torch.randn(2, width, generator=generator, dtype=torch.float64)
    parts = mean.to(DEVICE, dtype), (1 + variance.square()).to(DEVICE, dtype), torch.tensor(batches, device=DEVICE)
    return RunningStatistics(*parts, MOMENTUM)


def by_definition(inputs, averages, grads, *, through):
    leaves = {name: value.double().requires_grad_(name != "skip") for name, value in inputs.items()}
    u = plain_running_norm(leaves["x"], leaves.get("weight"), leaves.get("bias"), averages, EPS, through=through)
    du, dx, dlink = (torch.zeros_like(u) if grad is None else grad.double() for grad in grads)
    u.backward(du + leaves["skip"] * dlink)
    gradients = {name: leaf.grad for name, leaf in leaves.items() if name != "skip"}
    return u.detach(), gradients | {"x": gradients["x"] + dx}


def by_kernels(inputs, averages, grads, *, through):
    from compressm.ops.block.norm_triton import FusedBatchNorm

    leaves = {name: value.clone().requires_grad_(name != "skip") for name, value in inputs.items()}
    tensors = [leaves.get(name) for name in ("x", "weight", "bias", "skip")]
    outputs = FusedBatchNorm.apply(*tensors, *averages, EPS, None, through)
    chosen = [(output, grad) for output, grad in zip(outputs, grads, strict=False) if grad is not None]
    torch.autograd.backward(*zip(*chosen, strict=True))
    return outputs[0], {name: leaf.grad for name, leaf in leaves.items() if name != "skip"}


def check_by_definition(inputs, batches, *, through, grads=None, tolerance=None):
    width, dtype = inputs["x"].shape[-1], inputs["x"].dtype
    grads, tolerance = grads or arriving(inputs), tolerance or TOLERANCE[dtype]
    wanted, got = statistics(width, batches, torch.float64), statistics(width, batches)
    u, gradients = by_definition(inputs, wanted, grads, through=through)
    found, found_gradients = by_kernels(inputs, got, grads, through=through)
    assert relative(found, u) < tolerance
    for name, value in gradients.items():
        assert relative(found_gradients[name], value) < tolerance, name
    scale = wanted.mean.abs() + wanted.variance.sqrt()
    assert ((got.mean - wanted.mean).abs() / scale).max() < 2e-5
    assert relative(got.variance, wanted.variance) < 5e-6
    assert got.batches == wanted.batches == batches + 1


@pytest.mark.parametrize("batches", [0, 4])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("through", FORMS)
def test_gradients_are_those_of_differences(batches, affine, through):
    """In float64, with averages that are moved by differentiable operations, or held fixed."""
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 3), (3,), (3,))
    )
    leaves = [x, weight, bias] if affine else [x]
    first = x.detach().clone()

    def averages():
        return RunningStatistics(*(part.cpu() for part in statistics(3, batches, torch.float64)[:3]), MOMENTUM)

    def norm(x, weight=None, bias=None):
        held = averages()
        if through:
            return plain_running_norm(x, weight, bias, held, EPS, through=True)
        plain_running_norm(first, None, None, held, EPS, through=False)
        y = (x - held.mean) / (held.variance + EPS).sqrt()
        return y if weight is None else y * weight + bias

    assert torch.autograd.gradcheck(norm, leaves, atol=1e-7)
    vectors = (weight, bias) if affine else (None, None)
    u = plain_running_norm(x, *vectors, averages(), EPS, through=through)
    got = torch.autograd.grad(u.sin().sum(), leaves)
    expected = torch.autograd.grad(norm(*leaves).sin().sum(), leaves)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_first_batch_has_the_gradient_of_batch_norm_and_later_ones_a_share_of_its_correction():
    x = torch.randn(3, 7, 4, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)

    def gradient(batches, *, through):
        averages = RunningStatistics(
            x.detach().mean((0, 1)).clone(), x.detach().var((0, 1), unbiased=False).clone(), torch.tensor(batches), 0.01
        )
        u = plain_running_norm(x, None, None, averages, EPS, through=through)
        return torch.autograd.grad(u, x, grad)[0]

    batch = torch.nn.functional.batch_norm(x.flatten(0, 1), None, None, None, None, True, 0.1, EPS).view_as(x)
    wanted = torch.autograd.grad(batch, x, grad)[0]
    torch.testing.assert_close(gradient(0, through=True), wanted)
    constant, moved = gradient(5, through=False), gradient(5, through=True)
    torch.testing.assert_close(moved, constant + 0.01 * (wanted - constant), rtol=1e-6, atol=1e-9)


def test_on_the_cpu_the_op_is_its_definition():
    inputs, (one, other) = given(3, 9, 5), (statistics(5, 2) for _ in range(2))
    vectors = [inputs[name].cpu() for name in ("x", "weight", "bias")]
    one, other = (RunningStatistics(*(part.cpu() for part in found[:3]), MOMENTUM) for found in (one, other))
    found = running_norm(*vectors, one, through=True)
    assert torch.equal(found.u, plain_running_norm(*vectors, other, EPS, through=True))
    assert found.link is None
    assert torch.equal(one.mean, other.mean)
    assert one.batches == 3


@MARK
@pytest.mark.parametrize("batches", [0, 4])
@pytest.mark.parametrize("through", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "affine"), [(1, True), (8, False), later(8, True), (31, True), (64, False), later(140, True)]
)
@pytest.mark.usefixtures("nan_memory")
def test_the_kernels_are_the_definition_in_values_averages_and_gradients(width, affine, dtype, through, batches):
    check_by_definition(given(3, 47, width, dtype, affine), batches, through=through)


@MARK
@pytest.mark.parametrize(("width", "tokens"), [(8, (5, 1001)), (40, (12, 51))])
@pytest.mark.usefixtures("few_programs")
def test_programs_that_take_several_tiles_are_the_definition_too(width, tokens):
    check_by_definition(given(*tokens, width, affine=False), 1, through=True)


@MARK
@pytest.mark.parametrize("missing", [(0,), (1,), (2,), (0, 1)])
def test_a_gradient_that_does_not_arrive_counts_as_zero(missing):
    inputs = given(3, 9, 8, affine=False)
    grads = [None if i in missing else grad for i, grad in enumerate(arriving(inputs))]
    check_by_definition(inputs, 4, through=True, grads=grads)


@MARK
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("through", FORMS)
@pytest.mark.usefixtures("nan_memory")
def test_sums_that_come_along_are_those_of_the_running_norm(affine, through, monkeypatch):
    from compressm.ops.block import norm_triton as triton

    monkeypatch.setattr(triton, "column_sums", None)
    inputs = given(3, 47, 64, affine=affine)
    u, gradients = by_definition(inputs, statistics(64, 4, torch.float64), arriving(inputs), through=through)
    got = by_kernels(inputs, statistics(64, 4), linked(inputs, arriving(inputs), u), through=through)[1]
    for name, value in gradients.items():
        assert relative(got[name], value) < 1e-5, name
