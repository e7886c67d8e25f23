"""The mean over time, and zeros after the end of each sequence."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from compressm.ops.dispatch import is_transformed, kernels_serve


def time_mean(x: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch width"]:
    """The mean over time, summed in float32 at least."""
    return x.mean(dim=1) if torch.compiler.is_compiling() or is_transformed() else TimeMean.apply(x)


class TimeMean(torch.autograd.Function):
    """The mean over time; both passes are linear, so it can be differentiated any number of times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        if not kernels_serve(x):
            return x.mean(dim=1)
        from compressm.ops.block.pooling_triton import mean_of_rows

        return mean_of_rows(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return (grads[0] / ctx.shape[1]).unsqueeze(1).expand(ctx.shape)


def valid_rows(
    x: Shaped[Tensor, "batch length *rest"], lengths: Int[Tensor, " batch"]
) -> Shaped[Tensor, "batch length *rest"]:
    """Zero every step after a sequence's end, even NaN and infinity."""
    if x.ndim == 3 and kernels_serve(x):
        return ValidRows.apply(x, lengths)
    valid = torch.arange(x.shape[1], device=lengths.device) < lengths[:, None]
    return torch.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), x, 0)


class ValidRows(torch.autograd.Function):
    """Zero every step after a sequence's end; gradients are cut in the same way, any number of times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Tensor) -> Tensor:
        from compressm.ops.block.pooling_triton import rows_before

        ctx.save_for_backward(lengths)
        return rows_before(x, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return valid_rows(grads[0], ctx.saved_tensors[0]), None
