"""One function."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressm.ops.kernels import kernels_serve


def valid_rows(
    x: Float[Tensor, "batch length width"], lengths: Int[Tensor, " batch"]
) -> Float[Tensor, "batch length width"]:
    """x before each sequence's end and 0 from there on, whatever was there: NaN and infinity too."""
    if kernels_serve(x):
        return ValidRows.apply(x, lengths)
    valid = torch.arange(x.shape[1], device=lengths.device) < lengths[:, None]
    return torch.where(valid[..., None], x, 0)


class ValidRows(torch.autograd.Function):
    """Differentiable as often as asked for: gradients are cut off in the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Tensor) -> Tensor:
        from compressm.ops.valid_rows.triton import rows_before

        ctx.save_for_backward(lengths)
        return rows_before(x, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return valid_rows(grads[0], ctx.saved_tensors[0]), None
