"""The short convolution on the GPU, in the layout of sequences: no transposed copies, one pass over memory each way."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from compressm.ops.column_sums.triton import column_sums
from compressm.ops.rows import rows

_TILE = {"ROWS": 32, "COLS": 64, "num_warps": 4}
# Sums over the rows of a tile go through shared memory: so many small tiles are added up before, in registers.
_SUMMED = {"ROWS": 16, "COLS": 64, "num_warps": 4}
_TILES = 16


@triton.jit
def _before_silu(v, weight, bias, t, col, length, channels, v_row, K: tl.constexpr):
    """bias + Σ weight[k] v[t − K + 1 + k]; steps before the first are zero."""
    there = col < channels
    total = tl.zeros((t.shape[0], col.shape[0]), tl.float32)
    if bias is not None:
        total += tl.load(bias + col, mask=there, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(K):
        source = t - (K - 1) + k
        mask = ((source >= 0) & (source < length))[:, None] & there[None, :]
        x = tl.load(v + source[:, None] * v_row + col[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weight + col * K + k, mask=there, other=0.0).to(tl.float32)[None, :] * x
    return total


@triton.jit
def _convolve(
    v, weight, bias, out, length, channels, v_row, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = _before_silu(v + b * length * v_row, weight, bias, t, col, length, channels, v_row, K)
    value = total / (1.0 + tl.exp(-total))
    mask = (t < length)[:, None] & (col < channels)[None, :]
    at = out + (b * length + t[:, None]) * channels + col[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _slopes(
    v, weight, bias, dout, g, sums, length, channels, v_row,
    K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The gradient before SiLU, and its sums with every input and alone for each program: (…, K + 1, channels)."""
    b = tl.program_id(2).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    there = col < channels
    v += b * length * v_row
    totals = ()
    for _ in tl.static_range(K + 1):
        totals = totals + (tl.zeros((ROWS, COLS), tl.float32),)
    for i in range(0, TILES):
        t = (tl.program_id(0) * TILES + i) * ROWS + tl.arange(0, ROWS)
        total = _before_silu(v, weight, bias, t, col, length, channels, v_row, K)
        share = 1.0 / (1.0 + tl.exp(-total))
        mask = (t < length)[:, None] & there[None, :]
        inside = (b * length + t[:, None]) * channels + col[None, :]
        given = tl.load(dout + inside, mask=mask, other=0.0).to(tl.float32)
        slope = given * share * (1.0 + total * (1.0 - share))
        tl.store(g + inside, slope.to(g.dtype.element_ty), mask=mask)
        new = ()
        for k in tl.static_range(K):
            source = t - (K - 1) + k
            seen = ((source >= 0) & (source < length))[:, None] & there[None, :]
            x = tl.load(v + source[:, None] * v_row + col[None, :], mask=seen, other=0.0).to(tl.float32)
            new = new + (totals[k] + slope * x,)
        totals = new + (totals[K] + slope,)
    target = sums + (b * tl.num_programs(0) + tl.program_id(0)) * (K + 1) * channels + col
    for k in tl.static_range(K + 1):
        tl.store(target + k * channels, tl.sum(totals[k], 0), mask=there)


@triton.jit
def _convolve_back(
    g, weight, dv, length, channels, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """dv[t] = Σ weight[k] g[t + K − 1 − k]."""
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    there = col < channels
    total = tl.zeros((ROWS, COLS), tl.float32)
    for k in tl.static_range(K):
        source = t + (K - 1 - k)
        mask = (source < length)[:, None] & there[None, :]
        slope = tl.load(g + (b * length + source[:, None]) * channels + col[None, :], mask=mask, other=0.0)
        total += tl.load(weight + col * K + k, mask=there, other=0.0).to(tl.float32)[None, :] * slope.to(tl.float32)
    at = dv + (b * length + t[:, None]) * channels + col[None, :]
    tl.store(at, total.to(dv.dtype.element_ty), mask=(t < length)[:, None] & there[None, :])


class CausalConv(torch.autograd.Function):
    """As `plain_causal_conv` without what came before; sums in float32 whatever v is."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        v, _ = rows(v)
        weight = weight.contiguous()
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        _convolve[_grid(v, _TILE)](v, weight, bias, out, *v.shape[1:], v.stride(1), K=weight.shape[-1], **_TILE)
        ctx.save_for_backward(v, weight, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        v, weight, bias = ctx.saved_tensors
        taps, channels, grid = weight.shape[-1], v.shape[2], _grid(v, _SUMMED, tiles=_TILES)
        g, dv = (torch.empty(v.shape, dtype=v.dtype, device=v.device) for _ in range(2))
        sums = torch.empty(grid[0] * grid[2], taps + 1, channels, dtype=torch.float32, device=v.device)
        _slopes[grid](
            *(v, weight, bias, dout.contiguous(), g, sums, *v.shape[1:], v.stride(1)), K=taps, **_SUMMED, TILES=_TILES
        )  # fmt: skip
        _convolve_back[_grid(v, _TILE)](g, weight, dv, *v.shape[1:], K=taps, **_TILE)
        total = column_sums(sums.flatten(1)).view(taps + 1, channels)
        dweight = total[:taps].mT.reshape(weight.shape).to(weight.dtype)
        return dv, dweight, None if bias is None else total[taps].to(bias.dtype)


def _grid(v: Tensor, tile: dict[str, int], *, tiles: int = 1) -> tuple[int, int, int]:
    return -(-v.shape[1] // (tiles * tile["ROWS"])), -(-v.shape[2] // tile["COLS"]), v.shape[0]
