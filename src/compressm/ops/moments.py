"""Means and spreads of a tensor's columns, left by whoever wrote it for a batch norm that would read it again."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

_NAME = "_compressm_moments"


class Moments(NamedTuple):
    """Of the rows that each program wrote: their mean, the sum of squared deviations from it, and their number."""

    parts: Float[Tensor, "programs 3 width"]
    version: int


def leave_moments(x: Tensor, parts: Float[Tensor, "programs 3 width"]) -> None:
    """For as long as x is this very tensor and nothing is written into it."""
    setattr(x, _NAME, Moments(parts, x._version))


def moments_of(x: Tensor) -> Float[Tensor, "programs 3 width"] | None:
    """What was left with x, if it is still true."""
    moments = getattr(x, _NAME, None)
    return moments.parts if isinstance(moments, Moments) and moments.version == x._version else None
