"""What runs on a CPU with several steps a row or a gradient written out, against the definitions."""

import pytest
import torch
from torch.nn.functional import linear

from compressm.ops.block import gated_residual as dispatch
from compressm.ops.block.encoder import linear_of_few
from compressm.ops.block.gated_residual import ExplicitGatedResidual, gated_residual, plain_gated_residual
from compressm.ops.block.norm import Link
from compressm.ops.memory import packed_row, packed_weight, steps_a_row

RATE = 0.3
# Width, batch, length, rows of flags: several steps a row, one, one of an odd number of tokens, rows of one channel.
CASES = [
    (8, 3, 16, 1),
    (8, 3, 16, 3),
    (8, 3, 13, 1),
    (8, 3, 16, None),
    (8, 2, 2048, 1),
    (1, 2, 9, 2),
    (5, 2, 12, 1),
    (130, 2, 3, 1),
]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def given(width, batch, length, rows):
    """y, x, weight, bias, u and D; and the flags."""
    sequences = [normal(batch, length, width, seed=seed) for seed in range(3)]
    weight, bias, D = normal(2 * width, width, seed=3) / width**0.5, normal(2 * width, seed=4), normal(width, seed=5)
    keep = None if rows is None else normal(2, rows, length, width, seed=6) > -0.5
    return [*sequences[:2], weight, bias, sequences[2], D], keep


def arriving(kind, batch, length, width):
    """A gradient as the model behind may give it: its own at every step, a mean's, a sum's, or turned in memory."""
    return {
        "full": normal(batch, length, width, seed=7),
        "mean": normal(batch, 1, width, seed=7).expand(batch, length, width),
        "sum": torch.ones((), dtype=torch.float64).expand(batch, length, width),
        "turned": normal(batch, width, length, seed=7).mT,
    }[kind]


def gradients(call, tensors, dout, wanted=range(6)):
    leaves = [tensor.clone().requires_grad_(i in wanted) for i, tensor in enumerate(tensors)]
    out = call(*leaves)
    return out, torch.autograd.grad(out, [leaves[i] for i in wanted], dout)


def both(tensors, keep, dout, wanted=range(6)):
    def explicit(y, x, weight, bias, u, D):
        return gated_residual(y, x, weight, bias, u=u, D=D, keep=keep, rate=RATE)

    def plain(*leaves):
        return plain_gated_residual(*leaves, None, keep, RATE)

    return gradients(explicit, tensors, dout, wanted), gradients(plain, tensors, dout, wanted)


@pytest.mark.parametrize("kind", ["full", "mean", "sum", "turned"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_definition_in_values_and_gradients(case, kind):
    tensors, keep = given(*case)
    (out, got), (value, wanted) = both(tensors, keep, arriving(kind, *case[1:3], case[0]))
    assert type(out.grad_fn).__name__ == "ExplicitGatedResidualBackward"
    torch.testing.assert_close(out, value)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_the_gelu_may_be_its_approximation_by_tanh(case):
    tensors, keep = given(*case)
    dout = arriving("full", *case[1:3], case[0])

    def explicit(y, x, weight, bias, u, D):
        return gated_residual(y, x, weight, bias, u=u, D=D, keep=keep, rate=RATE, tanh=True)

    out, got = gradients(explicit, tensors, dout)
    value, wanted = gradients(lambda *leaves: plain_gated_residual(*leaves, None, keep, RATE, tanh=True), tensors, dout)
    assert not torch.allclose(out, both(tensors, keep, dout)[0][0], rtol=0, atol=1e-6)
    for one, other in zip((out, *got), (value, *wanted), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_in_float32_it_is_as_close_as_the_definition(case):
    tensors, keep = given(*case)
    dout = arriving("full", *case[1:3], case[0])
    exact = both(tensors, keep, dout)[1]
    got, plain = both([tensor.float() for tensor in tensors], keep, dout.float())
    for one, other, wanted in zip((got[0], *got[1]), (plain[0], *plain[1]), (exact[0], *exact[1]), strict=True):
        allowed = (other - wanted).abs().max() + 1e-6 * wanted.abs().max()
        assert (one - wanted).abs().max() < 2 * allowed


@pytest.mark.parametrize("case", [(3, 2, 4, 1), (4, 1, 5, None), (8, 2, 2, 2)], ids=str)
def test_its_gradient_is_that_of_differences(case):
    (y, x, weight, bias, _, _), keep = given(*case)
    factors = None if keep is None else keep.double() / (1 - RATE)
    inputs = [tensor.requires_grad_() for tensor in (y, x, weight, bias)]
    assert torch.autograd.gradcheck(lambda *leaves: ExplicitGatedResidual.apply(*leaves, factors), inputs)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (1, 2), (4,), (5,), (0, 3)], ids=str)
def test_only_the_gradients_that_are_wanted_are_made(wanted):
    tensors, keep = given(8, 2, 6, 1)
    (_, got), (_, exact) = both(tensors, keep, arriving("full", 2, 6, 8), wanted)
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one, other)


def test_memory_may_be_laid_out_in_any_way():
    tensors, keep = given(8, 3, 6, 1)
    turned = [tensor.mT.contiguous().mT if tensor.ndim == 3 else tensor for tensor in tensors]
    (out, got), _ = both(turned, keep.mT.contiguous().mT, arriving("full", 3, 6, 8))
    _, (value, wanted) = both(tensors, keep, arriving("full", 3, 6, 8))
    for one, other in zip((out, *got), (value, *wanted), strict=True):
        torch.testing.assert_close(one, other)


def test_nothing_that_is_given_is_changed_and_a_kept_graph_gives_the_same_again():
    (y, x, weight, bias, _, _), keep = given(8, 3, 6, 1)
    leaves = [tensor.requires_grad_() for tensor in (y, x, weight, bias)]
    before = [tensor.detach().clone() for tensor in (*leaves, keep)]
    dout = arriving("full", 3, 6, 8)
    out, given_dout = gated_residual(*leaves, keep=keep, rate=RATE), dout.clone()
    first, second = (torch.autograd.grad(out, leaves, dout, retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(torch.equal(one, other) for one, other in zip((*leaves, keep), before, strict=True))
    assert torch.equal(dout, given_dout)


def test_a_link_takes_the_gradient_of_the_skip():
    (y, x, weight, bias, u, D), _ = given(8, 2, 6, None)
    leaf = u.clone().requires_grad_()
    link = Link(leaf, torch.zeros_like(u, requires_grad=True))
    dout = arriving("full", 2, 6, 8)
    gated_residual(y, x, weight, bias, u=leaf, D=D, link=link).backward(dout)
    (_, wanted), _ = both([y, x, weight, bias, u, D], None, dout, (4,))
    assert leaf.grad is None
    torch.testing.assert_close(D * link.carrier.grad, wanted[0])


def test_a_second_derivative_is_refused():
    (y, x, weight, bias, _, _), _ = given(8, 2, 6, None)
    out = gated_residual(y.requires_grad_(), x, weight, bias)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*torch\.func"):
        torch.autograd.grad(out.square().sum(), y, create_graph=True)


def test_other_precisions_are_left_to_the_definition(monkeypatch):
    monkeypatch.setattr(dispatch, "ExplicitGatedResidual", None)
    (y, x, weight, bias, _, _), _ = given(8, 2, 6, None)
    for tensors in ([tensor.bfloat16() for tensor in (y, x, weight, bias)], [y, x.float(), weight, bias]):
        assert torch.equal(gated_residual(*tensors), plain_gated_residual(*tensors, *[None] * 4, 0.0))
    single = [tensor.float() for tensor in (y, x, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gated_residual(*single), plain_gated_residual(*single, *[None] * 4, 0.0))


def test_steps_side_by_side_fill_a_row_and_divide_what_there_is():
    assert [steps_a_row(128, *sizes) for sizes in ((8, 784), (8, 783), (5, 50), (200, 6), (1, 96))] == [
        16,
        1,
        25,
        1,
        32,
    ]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_packed_map_is_the_map_of_each_step(steps):
    x, weight, bias = normal(4, steps, 2), normal(5, 2, seed=1), normal(5, seed=2)
    packed = linear(x.flatten(1), packed_weight(weight, steps), packed_row(bias, steps))
    torch.testing.assert_close(packed.view(4, steps, 5), linear(x, weight, bias))


@pytest.mark.parametrize("shape", [(2, 4096, 1), (5, 2048, 3), (4099, 2), (7, 1), (2, 3, 8)], ids=str)
@pytest.mark.parametrize("width", [1, 8, 40])
def test_a_linear_map_of_few_inputs_is_the_linear_map_in_values_and_gradients(shape, width):
    x, dout = normal(*shape), normal(*shape[:-1], width, seed=1)
    parameters = normal(width, shape[-1], seed=2), normal(width, seed=3)
    out, got = gradients(lambda *leaves: linear_of_few(x, *leaves), parameters, dout, range(2))
    value, wanted = gradients(lambda *leaves: linear(x, *leaves), parameters, dout, range(2))
    for one, other in zip((out, *got), (value, *wanted), strict=True):
        torch.testing.assert_close(one, other)
