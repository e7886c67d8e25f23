"""Which steps of a padded batch count."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from compressm.ops.kernels import kernels_serve
from compressm.ops.valid_rows import valid_rows


def valid_steps(lengths: Int[Tensor, " batch"], length: int) -> Bool[Tensor, "batch length"]:
    """True before each sequence's end."""
    return torch.arange(length, device=lengths.device) < lengths[:, None]


def without_padding(
    x: Shaped[Tensor, "batch *rest"], lengths: Int[Tensor, " batch"] | None
) -> Shaped[Tensor, "batch *rest"]:
    """Zeros at and after `lengths` on axis 1, whatever was there: NaN and infinity too."""
    if lengths is None:
        return x
    if x.ndim == 3 and kernels_serve(x):
        return valid_rows(x, lengths)
    valid = valid_steps(lengths, x.shape[1])
    return torch.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), x, 0)
