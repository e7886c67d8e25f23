"""Which steps of a padded batch count."""

from __future__ import annotations

from jaxtyping import Int, Shaped
from torch import Tensor

from compressm.ops.valid_rows import valid_rows


def without_padding(
    x: Shaped[Tensor, "batch *rest"], lengths: Int[Tensor, " batch"] | None
) -> Shaped[Tensor, "batch *rest"]:
    """Zeros at and after `lengths`, where there are any."""
    return x if lengths is None else valid_rows(x, lengths)
