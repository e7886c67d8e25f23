"""Entries in the order of memory; a mask for all sequences begins anew with each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_TILE = {"VALUES": 2048, "num_warps": 4}


@triton.jit
def _add_kept(x, y, keep, out, total, drawn, scale, SHARED: tl.constexpr, VALUES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    live = at < total
    stays = tl.load(keep + (at % drawn if SHARED else at), mask=live, other=0)
    value = tl.where(stays != 0, tl.load(y + at, mask=live, other=0.0).to(tl.float32) * scale, 0.0)
    if x is not None:
        value += tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=live)


class DroppedResidual(torch.autograd.Function):
    """As `dropped_residual`; the gradient of x is what comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, keep: Tensor, rate: float) -> Tensor:
        keep = keep.contiguous().view(torch.uint8)
        ctx.save_for_backward(keep)
        ctx.rate, ctx.dtype = rate, y.dtype
        return _launched(x.contiguous(), y.contiguous(), keep, rate, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return dout, _launched(None, dout.contiguous(), keep, ctx.rate, ctx.dtype), None, None


def _launched(x: Tensor | None, y: Tensor, keep: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    out = torch.empty(y.shape, dtype=dtype, device=y.device)
    shared = keep.numel() < y.numel()
    grid = (triton.cdiv(y.numel(), _TILE["VALUES"]),)
    _add_kept[grid](x, y, keep, out, y.numel(), keep.numel(), 1 / (1 - rate), SHARED=shared, **_TILE)
    return out
