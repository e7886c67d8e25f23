"""What a batch norm remembers."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class RunningStatistics(NamedTuple):
    """Averages over batches, changed in place; without a momentum every batch counts the same."""

    mean: Float[Tensor, " width"]
    variance: Float[Tensor, " width"]
    batches: Int[Tensor, ""]
    momentum: float | None = 0.1
