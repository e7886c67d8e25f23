"""Norms of rows on the GPU: one pass each way, sums for the weight on the way back."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from compressm.ops.column_sums.triton import column_sums

_VALUES = 4096  # of a tile
_PROGRAMS = 1024  # of the backward pass, each with a row of sums


@triton.jit
def _normalise(x, weight, out, rows, width, eps, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    live = (row < rows)[:, None] & (col < width)[None, :]
    at = row[:, None] * width + col[None, :]
    value = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    value = value * scale[:, None]
    if weight is not None:
        value *= tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=live)


@triton.jit
def _normalise_back(x, weight, dout, beside, dx, sums, rows, width, eps, ROWS: tl.constexpr, COLS: tl.constexpr):
    """With n = x s and g = weight dout, dx = s (g − n mean(g n)) + beside; dweight is the sum of dout n."""
    col = tl.arange(0, COLS)
    factor = tl.full((COLS,), 1.0, tl.float32)
    if weight is not None:
        factor = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        live = (row < rows)[:, None] & (col < width)[None, :]
        at = row[:, None] * width + col[None, :]
        value = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
        given = tl.load(dout + at, mask=live, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
        value *= scale
        total += given * value
        given *= factor[None, :]
        mean = (tl.sum(given * value, 1) / width)[:, None]
        change = scale * (given - value * mean)
        if beside is not None:
            change += tl.load(beside + at, mask=live, other=0.0).to(tl.float32)
        tl.store(dx + at, change.to(dx.dtype.element_ty), mask=live)
    if sums is not None:
        tl.store(sums + tl.program_id(0) * width + col, tl.sum(total, 0), mask=col < width)


class RMSNormRows(torch.autograd.Function):
    """As `plain_rms_norm`, and x again: the gradient of what else reads x is added where that of the norm is made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        dense = x.contiguous()
        out = torch.empty_like(dense)
        rows, width, tile = _sizes(dense)
        _normalise[(-(-rows // tile["ROWS"]),)](dense, weight, out, rows, width, eps, **tile)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dense, weight)
        ctx.eps = eps
        return out, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, beside: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if dout is None:
            return beside, None, None
        x, weight = ctx.saved_tensors
        dx = torch.empty_like(x)
        rows, width, tile = _sizes(x)
        programs = min(_PROGRAMS, -(-rows // tile["ROWS"]))
        sums = None if weight is None else torch.empty(programs, width, dtype=torch.float32, device=x.device)
        beside = None if beside is None else beside.contiguous()
        _normalise_back[(programs,)](x, weight, dout.contiguous(), beside, dx, sums, rows, width, ctx.eps, **tile)
        return dx, None if sums is None else column_sums(sums).to(weight.dtype), None


def _sizes(x: Tensor) -> tuple[int, int, dict[str, int]]:
    """Rows, their width, and the tile of a program."""
    width = x.shape[-1]
    COLS = triton.next_power_of_2(width)
    return x.numel() // width, width, {"ROWS": max(1, _VALUES // COLS), "COLS": COLS, "num_warps": 4}
