"""One pass over memory; rows behind an end are not read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_VALUES = 4096  # of a tile


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
    """(batch, length, width), zero at and after lengths."""
    x, lengths = x.contiguous(), lengths.to(x.device).contiguous()
    out = torch.empty_like(x)
    batch, length, width = x.shape
    COLS = min(512, triton.next_power_of_2(width))
    ROWS = max(1, _VALUES // COLS)
    grid = (triton.cdiv(length, ROWS), batch, triton.cdiv(width, COLS))
    _rows_before[grid](x, lengths, out, length, width, ROWS=ROWS, COLS=COLS, num_warps=4)
    return out
