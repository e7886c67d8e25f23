"""The mean over time, a linear map of it, and zeros after the end of each sequence."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from compressm.ops.dispatch import is_transformed, is_watched, kernels_serve


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


COLUMNS = 64  # of a mean that one GPU program forms
_OUTPUTS, _BATCH = 64, 1024  # of a map of it that one program multiplies, in rounds of 64 sequences


def maps_mean_by_kernel(linear: nn.Module, x: Float[Tensor, "batch length width"]) -> TypeGuard[nn.Linear]:
    """True if `mapped_mean` may replace a linear layer behind the mean: a small one in float32, without hooks."""
    if type(linear) is not nn.Linear or not kernels_serve(x) or is_watched(linear):
        return False
    weight, bias = linear.weight, linear.bias
    if bias is None or {x.dtype, weight.dtype, bias.dtype} != {torch.float32} or torch.is_autocast_enabled("cuda"):
        return False
    small = x.shape[2] <= COLUMNS and len(weight) <= _OUTPUTS and len(x) <= _BATCH
    return small and weight.device == bias.device == x.device and weight.shape[1] == x.shape[2]


def mapped_mean(
    x: Float[Tensor, "batch length width"], weight: Float[Tensor, "outputs width"], bias: Float[Tensor, " outputs"]
) -> Float[Tensor, "batch outputs"]:
    """Compute weight · mean + bias for the mean over time, by one kernel each way."""
    from compressm.ops.block.pooling_triton import MappedMean

    return MappedMean.apply(x, weight, bias)


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
