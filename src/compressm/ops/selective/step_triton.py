"""One step of a Mamba layer's stream on the GPU: between its products, two kernels that write states in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compressm.ops.launching_triton import Planned, launched
from compressm.ops.memory import cdiv, next_power_of_2
from compressm.ops.selective.scan_triton import softplus


@launched
@triton.jit
def _convolve(
    vz, window, taps, bias, u, channels, vz_row, window_row, K: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """u = silu(bias + Σ taps[k] v[t − K + 1 + k]); the window moves on by one step."""
    b, col = tl.program_id(1).to(tl.int64), tl.program_id(0) * COLS + tl.arange(0, COLS)
    there = col < channels
    newest = tl.load(vz + b * vz_row + col, mask=there, other=0.0)
    total = newest * tl.load(taps + (K - 1) * channels + col, mask=there, other=0.0)
    if bias is not None:
        total += tl.load(bias + col, mask=there, other=0.0)
    window += b * window_row + col
    for k in tl.static_range(K - 1):
        value = tl.load(window + k * channels, mask=there, other=0.0)
        total += value * tl.load(taps + k * channels + col, mask=there, other=0.0)
        if k > 0:
            tl.store(window + (k - 1) * channels, value, mask=there)
    if K > 1:
        tl.store(window + (K - 2) * channels, newest, mask=there)
    tl.store(u + b * channels + col, total / (1.0 + tl.exp(-total)), mask=there)


@launched
@triton.jit
def _advance(
    u, z, dt, B, C, weight, bias, rates, D, h, y, channels, n, rank, z_row, dt_row, B_row, h_row,
    OWN: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """h ← exp(Δ a) h + Δ u B, y = (C h + D u) silu(z), Δ = softplus(W dt + bias); OWN: each channel has its B and C."""
    b, d = tl.program_id(1).to(tl.int64), tl.program_id(0) * BD + tl.arange(0, BD)
    k, r = tl.arange(0, BN), tl.arange(0, RANK)
    there = d < channels
    live = there[:, None] & (k < n)[None, :]
    row = tl.load(dt + b * dt_row + r, mask=r < rank, other=0.0)
    at = weight + d[:, None] * rank + r[None, :]
    step = tl.sum(tl.load(at, mask=there[:, None] & (r < rank)[None, :], other=0.0) * row[None, :], 1)
    step = softplus(step + tl.load(bias + d, mask=there, other=0.0))
    x = tl.load(u + b * channels + d, mask=there, other=0.0)
    at = d[:, None] * n + k[None, :]
    if OWN:
        drive = tl.load(B + b * B_row + at, mask=live, other=0.0)
        readout = tl.load(C + b * B_row + at, mask=live, other=0.0)
    else:
        drive = tl.load(B + b * B_row + k, mask=k < n, other=0.0)[None, :]
        readout = tl.load(C + b * B_row + k, mask=k < n, other=0.0)[None, :]
    rate = tl.load(rates + at, mask=live, other=0.0)
    state = tl.load(h + b * h_row + at, mask=live, other=0.0)
    state = tl.exp(step[:, None] * rate) * state + (step * x)[:, None] * drive
    tl.store(h + b * h_row + at, state, mask=live)
    gate = tl.load(z + b * z_row + d, mask=there, other=0.0)
    value = tl.sum(state * readout, 1) + x * tl.load(D + d, mask=there, other=0.0)
    tl.store(y + b * channels + d, value * gate / (1.0 + tl.exp(-gate)), mask=there)


_COLS = 128  # channels of a program of the convolution
_TILE = 2048  # states of a program that steps
_ROW = 1024  # numbers of a program's part of W


def plan_convolution(vz: Tensor, window: Tensor, taps: Tensor) -> Planned:
    """Plan the kernel that is called with (vz, window, taps, bias, u): taps are (K, channels), vz holds v first."""
    K, channels = taps.shape
    cols = min(_COLS, next_power_of_2(channels))
    grid = (cdiv(channels, cols), len(vz))
    return Planned(_convolve, grid, channels, vz.stride(0), window.stride(0), K=K, COLS=cols, num_warps=1)


def plan_advance(z: Tensor, dt: Tensor, B_row: int, h: Tensor, *, own: bool) -> Planned:
    """Plan the kernel that is called with (u, z, dt, B, C, W, bias, rates, D, h, y); h is (batch, channels, n)."""
    batch, channels, n = h.shape
    BN, RANK = next_power_of_2(n), next_power_of_2(dt.shape[1])
    BD = max(1, min(_TILE // BN, _ROW // RANK, next_power_of_2(channels), 16))
    sizes = (channels, n, dt.shape[1], z.stride(0), dt.stride(0), B_row, h.stride(0))
    grid = (cdiv(channels, BD), batch)
    return Planned(_advance, grid, *sizes, OWN=own, BD=BD, BN=BN, RANK=RANK, num_warps=4 if BD * BN >= 1024 else 1)
