"""Column sums on the GPU, added in a fixed order: the same input gives the same bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressm.ops.launching_triton import Planned, launched, plan_of
from compressm.ops.memory import cdiv

_ROWS, _COLS = 256, 8


@launched
@triton.jit(do_not_specialize=["rows", "width"])
def _column_sums(x, out, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    row = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    # Unrolling lets four loads wait for memory together.
    for start in tl.range(0, rows, ROWS, loop_unroll_factor=4):
        live = (start + row < rows)[:, None] & (col < width)[None, :]
        total += tl.load(x + (start + row)[:, None] * width + col[None, :], mask=live, other=0.0)
    tl.store(out + col, tl.sum(total, 0), mask=col < width)


def column_sums(x: Tensor) -> Tensor:
    """Sum (rows, width) over its rows to (width,), float32; the rows are partial sums of earlier programs."""
    rows, width = x.shape
    out = torch.empty(width, dtype=torch.float32, device=x.device)
    _plan(rows, width, x.device)(x, out)
    return out


@plan_of
def _plan(rows: int, width: int, device: torch.device) -> Planned:
    return Planned(_column_sums, (cdiv(width, _COLS),), rows, width, ROWS=_ROWS, COLS=_COLS, num_warps=8)
