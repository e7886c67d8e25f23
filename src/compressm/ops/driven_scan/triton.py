"""h[t] = λ h[t−1] + B u[t] on the GPU, with gradients of u that come with their sums.

With g the gradient of B u, that of u is Bᵀ g, so that Σ over all steps is Bᵀ Σ g, and Σ (Bᵀ g) ⊙ u are the column sums
of B ⊙ ∂B: nothing as long as the sequence is read for either.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from compressm.ops.diagonal_scan.triton import Walk, compile_walks
from compressm.ops.link import Link
from compressm.ops.products import product_in


@triton.jit(do_not_specialize=["rows", "width"])
def _totals(B, dB, sums, totals, out, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Σ over rows of B times `sums` and of B ⊙ dB; on the way dB in the dtype of `out`."""
    col, row = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, ROWS)
    plain = tl.zeros((ROWS, COLS), tl.float32)
    along = tl.zeros((ROWS, COLS), tl.float32)
    for start in tl.range(0, rows, ROWS, loop_unroll_factor=2):
        at = (start + row)[:, None] * width + col[None, :]
        live = (start + row < rows)[:, None] & (col < width)[None, :]
        weight = tl.load(B + at, mask=live, other=0.0).to(tl.float32)
        plain += weight * tl.load(sums + start + row, mask=start + row < rows, other=0.0)[:, None]
        gradient = tl.load(dB + at, mask=live, other=0.0)
        along += weight * gradient
        if out is not None:
            tl.store(out + at, gradient.to(out.dtype.element_ty), mask=live)
    tl.store(totals + col, tl.sum(plain, 0), mask=col < width)
    tl.store(totals + width + col, tl.sum(along, 0), mask=col < width)


def driven_recurrence(
    drive: Link, log_poles: Tensor, B: Tensor, state: Tensor | None, *, conjugate: bool, keep_last: bool = True
) -> tuple[Tensor, Tensor | None]:
    """All h (or their conjugates) of x = B u, in the dtype of B, and the last h, in float32, if it is to be kept."""
    u, carrier, totals = drive
    return DrivenRecurrence.apply(u.detach(), carrier, totals, log_poles, B, state, conjugate, keep_last)


class DrivenRecurrence(torch.autograd.Function):
    """B is (2, n, p); u is read in its dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        carrier: Tensor,
        totals: Tensor,
        log_poles: Tensor,
        B: Tensor,
        state: Tensor | None,
        conjugate: bool,
        keep_last: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        B, flip = B.contiguous(), -1 if conjugate else 1
        state = None if state is None else state.contiguous()
        learning = any(ctx.needs_input_grad)
        compile_walks(B.dtype, log_poles.dtype, u.device, flip, state is not None, keep_last, learning, True)
        ctx.dtypes, rows = (u.dtype, log_poles.dtype), u.to(B.dtype).flatten(0, 1)
        x = (rows @ B.flatten(0, 1).mT).view(*u.shape[:2], *B.shape[:2])
        walk = Walk(x, log_poles.contiguous(), flip=flip)
        h, last = walk.forward(x, state, keep_last=keep_last)
        ctx.save_for_backward(rows, B, h, walk.table, state)
        ctx.walk = walk
        return h, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, B, h, _, state = ctx.saved_tensors
        dh = torch.zeros_like(h) if grads[0] is None else grads[0].contiguous()
        dlast = None if grads[1] is None else grads[1].contiguous()
        dx, dlog, dstate, sums = ctx.walk.backward(dh, h, state, dlast, summed=True)
        flat, g = B.flatten(0, 1), dx.flatten(0, 1).flatten(1)
        du, dB = (g @ flat).view(*h.shape[:2], -1), product_in(torch.float32, g.mT, rows)
        totals = torch.empty(2, flat.shape[1], dtype=torch.float32, device=g.device)
        grid, narrow = (triton.cdiv(flat.shape[1], 16),), None if B.dtype == torch.float32 else torch.empty_like(B)
        _totals[grid](flat, dB, sums, totals, narrow, *flat.shape, ROWS=64, COLS=16, num_warps=4)
        dB = dB.view_as(B) if narrow is None else narrow
        u_dtype, log_dtype = ctx.dtypes
        dstate = None if state is None else dstate.to(state.dtype)
        return None, du.to(u_dtype), totals, dlog.to(log_dtype), dB, dstate, None, None
