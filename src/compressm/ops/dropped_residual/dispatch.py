"""One function."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from compressm.ops.gated_residual import dropped
from compressm.ops.kernels import kernels_serve


def dropped_residual(
    x: Float[Tensor, "batch length width"],
    y: Float[Tensor, "batch length width"],
    keep: Bool[Tensor, "rows length width"] | None,
    rate: float,
) -> Float[Tensor, "batch length width"]:
    """x + y / (1 − rate) where `keep` is true, x elsewhere, in the dtype of x; rows are sequences, or one for all."""
    if keep is None:
        return x + y.to(x.dtype)
    if not kernels_serve(x) or not kernels_serve(y):
        return x + dropped(y, keep, rate).to(x.dtype)
    from compressm.ops.dropped_residual.triton import DroppedResidual

    return DroppedResidual.apply(x, y, keep, rate)
