"""The short convolution against its definition, on a GPU or in Triton's interpreter."""

import pytest
import torch

from compressm.ops.selective.conv_and_gate import plain_causal_conv
from tests.kernels import GPU, MARK, later, nan_memory, normal, relative

__all__ = ["nan_memory"]

pytestmark = MARK


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles along both axes at sizes that the interpreter can do."""
    if not GPU:
        walk = {"SPAN": 8, "AHEAD": 4, "COLS": 4, "num_warps": 1}
        monkeypatch.setattr("compressm.ops.selective.conv_and_gate_triton._WALK", walk)


@pytest.mark.usefixtures("nan_memory", "small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "length", "channels", "taps"), [(2, 19, 6, 4), (1, 1, 3, 4), (2, 8, 4, 1), later(3, 65, 9, 3)]
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_it_is_the_convolution_with_its_gradients(batch, length, channels, taps, with_bias, dtype):
    from compressm.ops.selective.conv_and_gate_triton import CausalConv

    # Half of a wider tensor, as in_proj leaves it.
    v = normal(batch, length, 2 * channels).to(dtype)[..., :channels].requires_grad_()
    weight = normal(channels, 1, taps, seed=1).requires_grad_()
    bias = normal(channels, seed=2).requires_grad_() if with_bias else None
    leaves = [leaf for leaf in (v, weight, bias) if leaf is not None]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    got, wanted = CausalConv.apply(*leaves, *[None] * (3 - len(leaves))), _plain(exact)
    dout = normal(*got.shape, seed=3).to(dtype)
    pairs = [(got, wanted)]
    pairs += zip(torch.autograd.grad(got, leaves, dout), torch.autograd.grad(wanted, exact, dout.double()), strict=True)
    for one, other in pairs:
        assert relative(one, other) < (2e-6 if dtype is torch.float32 else 2e-2)


def _plain(leaves):
    return plain_causal_conv(leaves[0], leaves[1], leaves[2] if len(leaves) == 3 else None, None)


@pytest.mark.usefixtures("small_tiles")
def test_what_came_before_is_heard(monkeypatch):
    from compressm.ops.selective.conv_and_gate import causal_conv

    monkeypatch.setattr("compressm.ops.selective.conv_and_gate.kernels_serve", lambda _: True)
    v, weight = normal(2, 11, 5), normal(5, 1, 4, seed=1)
    whole = causal_conv(v, weight)
    second = causal_conv(v[:, 6:], weight, before=v[:, 3:6])
    assert relative(second, whole[:, 6:]) < 1e-6
