"""Steps by softplus and the gate: in plain torch against float64, and by kernels, on a GPU or in the interpreter."""

import pytest
import torch

from compressm.ops.selective.conv_and_gate import gated, step_sizes
from tests.kernels import DEVICE, GPU, MARK, nan_memory, normal

__all__ = ["nan_memory"]

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
SIZES = [(2, 19, 6), (1, 1, 1), (3, 5, 9)]


@pytest.fixture(params=["plain", pytest.param("kernels", marks=MARK)])
def way(request, monkeypatch, nan_memory):
    """Both, with tiles so small that there are several."""
    monkeypatch.setattr("compressm.ops.dispatch._DEVICES", (DEVICE.type,) if request.param == "kernels" else ())
    if request.param == "kernels" and not GPU:
        monkeypatch.setattr(
            "compressm.ops.selective.conv_and_gate_triton._TILE", {"ROWS": 8, "COLS": 4, "num_warps": 1}
        )


def half_of(*shape, seed, dtype):
    """The first half of rows twice as wide, as a projection leaves it; behind it is what must not be read."""
    x = normal(*shape, seed=seed, dtype=dtype)
    return torch.cat([x, torch.full_like(x, torch.nan)], dim=-1)[..., : shape[-1]].requires_grad_()


def check_against(got, wanted, leaves, exact, tolerance):
    weight = normal(*got.shape, seed=9)
    pairs = [(got, wanted)]
    pairs += zip(
        torch.autograd.grad((got * weight).sum(), leaves),
        torch.autograd.grad((wanted * weight).sum(), exact),
        strict=True,
    )
    for one, other in pairs:
        assert one.shape == other.shape
        assert (one.double() - other).abs().max() <= tolerance * other.abs().max().clamp_min(1.0)


def softplus(x):
    return torch.logaddexp(x, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("soft", [True, False], ids=["softplus", "as given"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_steps_are_softplus_of_delta_and_bias(sizes, soft, with_bias, dtype, way):
    batch, length, channels = sizes
    delta, bias = half_of(*sizes, seed=1, dtype=dtype), normal(channels, seed=2).requires_grad_() if with_bias else None
    lengths = torch.arange(batch, device=DEVICE) * length // batch  # the first has no steps at all
    got = step_sizes(delta, bias, lengths, softplus=soft)
    leaves = [x for x in (delta, bias) if x is not None]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = sum(exact)
    wanted = (softplus(wanted) if soft else wanted) * (torch.arange(length, device=DEVICE) < lengths[:, None])[
        ..., None
    ]
    assert got.dtype == torch.float32
    check_against(got, wanted, leaves, exact, 1e-6 if dtype is torch.float32 else TOLERANCE[dtype])


def test_steps_that_all_count_need_no_lengths(way):
    delta = normal(2, 7, 3)
    assert torch.equal(step_sizes(delta), step_sizes(delta, None, torch.full((2,), 7, device=DEVICE)))


def test_steps_are_right_to_the_last_digits_however_small_or_large(way):
    delta = torch.tensor([-80.0, -30.0, -17.0, -8.0, -1e-3, 0.0, 19.99, 20.01, 88.0, 1e4], device=DEVICE)[:, None, None]
    delta.requires_grad_()
    exact = delta.detach().double().requires_grad_()
    got, wanted = step_sizes(delta), softplus(exact)
    assert ((got - wanted).abs() <= 3e-6 * wanted).all()
    (slope,), (exactly,) = (torch.autograd.grad(y.sum(), x) for y, x in ((got, delta), (wanted, exact)))
    assert ((slope - exactly).abs() <= 3e-6 * exactly).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_gate_is_silu(sizes, dtype, way):
    leaves = [half_of(*sizes, seed=seed, dtype=dtype) for seed in (1, 2)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    got, wanted = gated(*leaves), exact[0] * exact[1] / (1 + torch.exp(-exact[1]))
    assert got.dtype == dtype
    check_against(got, wanted, leaves, exact, TOLERANCE[dtype])


def test_the_gate_closes_and_opens_without_overflow(way):
    y, z = normal(1, 4, 3), torch.tensor([-85.0, -75.0, 75.0, 85.0], device=DEVICE)[:, None].expand(1, 4, 3)
    y, z = y.requires_grad_(), z.clone().requires_grad_()
    out = gated(y, z)
    gradients = torch.autograd.grad(out.sum(), (y, z))
    assert all(x.isfinite().all() for x in (out, *gradients))
    assert torch.equal(out[:, 2:], (y * z)[:, 2:])
    assert out[:, :2].abs().max() < 1e-30
