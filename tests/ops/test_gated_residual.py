"""The gated residual: its equation, what it refuses, and its kernels against the definition."""

import pytest
import torch

from compressm.ops import SequenceError
from compressm.ops.block.gated_residual import dropped, gated_residual, plain_gated_residual
from compressm.ops.block.norm import Link
from tests.kernels import DEVICE, GPU, MARK, few_programs, later, nan_memory, normal, relative

__all__ = ["few_programs", "nan_memory"]

NAMES = ("y", "x", "weight", "bias", "u", "D")
# Of bfloat16: a rounding of 2⁻⁸ (the interpreter cuts off) in each of what is read, z, the product and what is written.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
RATE = 0.3


def given(batch, length, width, dtype=torch.float32):
    """What a block gives: activations in its dtype, parameters in float32."""
    sequences = [normal(batch, length, width, seed=seed, dtype=dtype) for seed in range(3)]
    y, x, u = sequences
    weight, bias, D = normal(2 * width, width, seed=3) / width**0.5, normal(2 * width, seed=4), normal(width, seed=5)
    return {"y": y, "x": x, "weight": weight, "bias": bias, "u": u, "D": D}


def flags(rows, length, width):
    return torch.rand(2, rows, length, width, generator=torch.Generator().manual_seed(6)).to(DEVICE) > RATE


def by_kernels(inputs, keep=None, link=None, dtype=None, tanh=False):
    from compressm.ops.block.gated_residual_triton import NarrowGatedResidual, WideGatedResidual

    function = NarrowGatedResidual if inputs["y"].shape[-1] <= 32 else WideGatedResidual
    tensors = [inputs.get(name) for name in NAMES]
    carrier, totals = (None, None) if link is None else link[1:]
    return function.apply(*tensors, carrier, totals, keep, RATE, dtype or inputs["y"].dtype, tanh)


def with_gradients(call, inputs, dout, wanted=NAMES):
    leaves = {name: value.clone().requires_grad_(name in wanted) for name, value in inputs.items()}
    out = call(leaves)
    out.backward(dout.to(out.dtype))
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items() if name in wanted}}


def exact(inputs, keep, dout, wanted=NAMES, *, tanh=False):
    def call(leaves):
        return plain_gated_residual(*(leaves.get(name) for name in NAMES), None, keep, RATE, tanh=tanh)

    return with_gradients(call, {name: value.double() for name, value in inputs.items()}, dout.double(), wanted)


def check_against_the_definition(inputs, keep, wanted=NAMES, *, tanh=False):
    dout = normal(*inputs["y"].shape, seed=7, dtype=inputs["y"].dtype)
    got = with_gradients(lambda leaves: by_kernels(leaves, keep, tanh=tanh), inputs, dout, wanted)
    for name, value in exact(inputs, keep, dout, wanted, tanh=tanh).items():
        assert got[name].dtype == (inputs["x"] if name == "out" else inputs[name]).dtype
        assert relative(got[name], value) < TOLERANCE[inputs["y"].dtype], name


def test_it_computes_its_equation():
    inputs = {name: value.double() for name, value in given(2, 5, 3).items()}
    before = inputs["y"] + inputs["D"] * inputs["u"]
    z = 0.5 * before * (1 + torch.erf(before / 2**0.5))
    v, g = (z @ inputs["weight"].mT + inputs["bias"]).chunk(2, dim=-1)
    torch.testing.assert_close(gated_residual(**inputs), inputs["x"] + v * torch.sigmoid(g))


@MARK
@pytest.mark.parametrize("width", [8, 40])
@pytest.mark.usefixtures("nan_memory")
def test_the_kernels_approximate_the_gelu_by_tanh_where_asked(width):
    inputs = given(3, 11, width)
    inputs["y"] *= 3  # where the two forms differ by up to 5e-4
    check_against_the_definition(inputs, flags(1, 11, width), tanh=True)
    both = [
        plain_gated_residual(*(inputs[name] for name in NAMES), None, None, 0.0, tanh=tanh) for tanh in (True, False)
    ]
    assert 1e-5 < relative(*both) < 1e-2


@pytest.mark.parametrize("rows", [1, 2])
def test_what_is_kept_is_scaled_and_the_rest_is_zero(rows):
    z, keep = normal(2, 5, 3), flags(rows, 5, 3)[0]
    torch.testing.assert_close(dropped(z, keep, RATE), torch.where(keep, z / (1 - RATE), 0.0))


def test_a_link_takes_the_gradient_of_the_skip():
    inputs = {name: value.double() for name, value in given(2, 5, 3).items()}
    dout = normal(2, 5, 3, seed=7)
    u = inputs["u"].clone().requires_grad_()
    link = Link(u, *(torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 3), (2, 3))))
    plain = exact(inputs, None, dout)
    plain_gated_residual(*(inputs[name] for name in NAMES[:4]), u, inputs["D"], link, None, 0.0).backward(dout)
    assert u.grad is None
    check_link(link, plain["y"], inputs["u"], 1e-12)
    torch.testing.assert_close(inputs["D"] * link.carrier.grad, plain["u"])


def check_link(link, gradient, u, tolerance):
    """A gradient arrived, with its sums."""
    sums = torch.stack([gradient.double().sum((0, 1)), (gradient.double() * u.double()).sum((0, 1))])
    assert relative(link.carrier.grad, gradient) < tolerance
    assert relative(link.totals.grad, sums) < tolerance


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(5, 3)}, r"weight has shape \(5, 3\), expected \(6, width\)"),
        ({"x": torch.ones(2, 4, 3)}, "x has shape"),
        ({"D": None}, "D is None"),
        ({"u": torch.ones(2, 5, 3).long()}, "u has dtype torch.int64"),
        ({"keep": torch.ones(2, 1, 5, 3)}, "keep is torch.float32"),
        ({"keep": torch.ones(2, 7, 5, 3) > 0}, "keep has 7 rows, expected 1 or batch = 2"),
        ({"keep": torch.ones(2, 1, 5, 3) > 0, "rate": 1.0}, "rate is 1.0"),
    ],
)
def test_bad_input_is_refused_with_what_came(change, message):
    from compressm.ops.block.gated_residual import _check

    inputs = {name: value.cpu() for name, value in given(2, 5, 3).items()}
    everything = {**inputs, "link": None, "keep": None, "rate": 0.0} | change
    with pytest.raises(SequenceError, match=message):
        _check(**everything)


# Width, length, rows of flags, dtype. Width 8 with an even length packs two rows of it into one, 5 with 12 three.
CASES = [
    (1, 16, None, torch.float32),
    (1, 13, 3, torch.bfloat16),
    (5, 12, 3, torch.float32),
    (5, 13, 1, torch.bfloat16),
    (8, 14, 1, torch.float32),
    (8, 14, None, torch.bfloat16),
    (8, 13, 3, torch.float32),
    (31, 13, 1, torch.float32),
    (64, 13, None, torch.float32),
    (64, 13, 1, torch.bfloat16),
    (200, 13, 3, torch.float32),
    later(200, 13, 1, torch.bfloat16),
]


@MARK
@pytest.mark.parametrize(("width", "length", "rows", "dtype"), CASES)
@pytest.mark.usefixtures("nan_memory")
def test_the_kernels_are_the_definition_in_values_and_gradients(width, length, rows, dtype):
    check_against_the_definition(given(3, length, width, dtype), None if rows is None else flags(rows, length, width))


@MARK
@pytest.mark.parametrize("width", [8, 40])
@pytest.mark.parametrize("steps", [1, 77])
def test_any_number_of_steps_is_served(width, steps):
    check_against_the_definition(given(1, steps, width), flags(1, steps, width))


@MARK
@pytest.mark.parametrize(
    ("width", "length", "rows"), [(8, 30, 1), later(8, 30, None), later(40, 91, 1), (40, 91, 7), later(150, 33, 1)]
)
@pytest.mark.usefixtures("few_programs")
def test_programs_that_take_several_tiles_are_the_definition_too(width, length, rows):
    check_against_the_definition(given(7, length, width), None if rows is None else flags(rows, length, width))


@MARK
@pytest.mark.parametrize("width", [5, 64])
def test_half_precision_of_16_bits_is_served(width):
    check_against_the_definition(given(2, 9, width, torch.float16), flags(2, 9, width))


@MARK
@pytest.mark.parametrize("width", [5, 64])
@pytest.mark.parametrize("wanted", [("y",), ("x",), ("weight",), ("bias", "D"), ("u",), ("x", "weight")])
def test_only_the_gradients_that_are_wanted_are_made(width, wanted):
    check_against_the_definition(given(2, 9, width), flags(1, 9, width), wanted)


@MARK
@pytest.mark.parametrize("width", [5, 64])
def test_without_a_skip_there_is_none(width):
    inputs = given(2, 9, width)
    del inputs["u"], inputs["D"]
    check_against_the_definition(inputs, flags(1, 9, width), NAMES[:4])


@MARK
@pytest.mark.parametrize("width", [5, 64])
def test_memory_may_be_laid_out_in_any_way(width):
    inputs = given(3, 9, width)
    turned = {name: value.mT.contiguous().mT for name, value in inputs.items() if value.ndim == 3}
    keep = flags(1, 9, width).mT.contiguous().mT
    check_against_the_definition(inputs | turned, keep)


@MARK
@pytest.mark.parametrize("width", [5, 64])
def test_a_link_takes_the_gradient_of_the_skip_in_the_kernels_too(width):
    inputs, dout = given(2, 9, width), normal(2, 9, width, seed=7)
    carrier = torch.zeros(1, device=DEVICE).expand(2, 9, width).requires_grad_()
    link = Link(inputs["u"], carrier, torch.zeros(2, width, device=DEVICE, requires_grad=True) if width > 32 else None)
    got = with_gradients(lambda leaves: by_kernels(leaves, None, link), inputs, dout, ("y", "D"))
    assert torch.equal(carrier.grad, got["y"])
    assert relative(carrier.grad * inputs["D"], exact(inputs, None, dout)["u"]) < 5e-6
    if width > 32:
        check_link(link, got["y"], inputs["u"], 5e-6)


@MARK
@pytest.mark.parametrize("width", [5, 64])
def test_a_graph_that_is_kept_gives_the_same_gradients_again(width):
    inputs, dout = given(2, 9, width), normal(2, 9, width, seed=7)
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    out = by_kernels(leaves, flags(1, 9, width))
    first, second = (torch.autograd.grad(out, leaves.values(), dout, retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@MARK
@pytest.mark.parametrize("width", [5, 64])
def test_the_product_may_be_narrower_than_the_activations(width):
    """Autocast: float32 in and out, a product in bfloat16."""
    inputs = given(2, 9, width)
    out = by_kernels(inputs, dtype=torch.bfloat16)
    assert out.dtype == torch.float32
    assert relative(out, exact(inputs, None, torch.zeros_like(out))["out"]) < 2e-2


@MARK
@pytest.mark.skipif(not GPU, reason="nothing is compiled")
@pytest.mark.parametrize("width", [8, 64])
def test_a_new_batch_or_length_compiles_no_new_kernel(width):
    from compressm.ops.block import gated_residual_triton as kernels

    def compiled():
        functions = (kernels.activate, kernels.gate, kernels.activate_backward, kernels.gate_backward)
        functions = (kernels.narrow, kernels.narrow_backward) if width == 8 else functions
        return sum(len(cache[0]) for function in functions for cache in function.kernel.device_caches.values())

    check_against_the_definition(given(3, 16, width), flags(1, 16, width))
    before = compiled()
    for batch, length in ((1, 1600), (2, 20), (50, 34)):
        check_against_the_definition(given(batch, length, width), flags(1, length, width))
    assert compiled() == before
