"""Means over time, and zeros after the end of each sequence, on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressm.ops.launching_triton import launched
from compressm.ops.memory import cdiv, next_power_of_2


@launched
@triton.jit(do_not_specialize=["length"])
def _mean(x, out, length, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    batch, row = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (col < H)[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    # Unrolling lets four loads wait for memory together.
    for start in tl.range(0, length, ROWS, loop_unroll_factor=4):
        at = x + (batch * length + start + row[:, None]) * H + col[None, :]
        total += tl.load(at, mask=(start + row < length)[:, None] & inside, other=0.0).to(tl.float32)
    tl.store(out + batch * H + col, (tl.sum(total, 0) / length).to(out.dtype.element_ty), mask=col < H)


def mean_of_rows(x: Tensor) -> Tensor:
    """Average (batch, length, width) over time to (batch, width)."""
    x, (batch, length, H) = x.contiguous(), x.shape
    out, columns = x.new_empty(batch, H), min(next_power_of_2(H), 64)
    _mean[(batch, cdiv(H, columns))](x, out, length, H=H, ROWS=2048 // columns, COLS=columns, num_warps=8)
    return out


_VALUES = 4096  # numbers in a tile


@launched
@triton.jit
def _rows_before(x, lengths, out, length, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(2) * COLS + tl.arange(0, COLS)
    inside = (t < length)[:, None] & (col < width)[None, :]
    at = (b * length + t[:, None]) * width + col[None, :]
    value = tl.load(x + at, mask=inside & (t < tl.load(lengths + b))[:, None], other=0.0)
    tl.store(out + at, value, mask=inside)


def rows_before(x: Tensor, lengths: Tensor) -> Tensor:
    """Copy (batch, length, width), with zeros at and after `lengths`."""
    x, lengths = x.contiguous(), lengths.to(x.device).contiguous()
    out = torch.empty_like(x)
    batch, length, width = x.shape
    COLS = min(512, next_power_of_2(width))
    ROWS = max(1, _VALUES // COLS)
    grid = (cdiv(length, ROWS), batch, cdiv(width, COLS))
    _rows_before[grid](x, lengths, out, length, width, ROWS=ROWS, COLS=COLS, num_warps=4)
    return out
