"""What a cut goes by: the exact Gramian of white noise, that of data a layer really sees, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from compressm.errors import CompressionError


class Gramian:
    """A small choice that can be printed and compared."""


@final
@dataclass(frozen=True)
class WhiteNoise(Gramian):
    """P of the paper: exact, for inputs that are white noise. Cuts come with an error bound."""


@final
@dataclass(frozen=True)
class Measured(Gramian):
    """P = E[h hᴴ] of states on real data, at one of every `stride` steps of the first `batches` passes of a layer.

    Where that would be fewer than four samples a state, at more of the steps that there are.
    Q stays exact, so that what is cut is stable for any data. There is no a-priori bound; `measured_error` of a cut
    says what it changed on the same data.
    """

    batches: int = 4
    stride: int = 8

    def __post_init__(self) -> None:
        for name, value in (("batches", self.batches), ("stride", self.stride)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CompressionError(f"Measured: {name} is {value!r}, expected an integer of at least 1")


@final
@dataclass(frozen=True)
class Modal(Gramian):
    """No Gramian: modes are dropped one by one, those first whose share of the output has the smallest H∞ norm.

    What stays is not changed. A yardstick: at the same order it loses far more than balanced truncation. In place of σ
    stand ½ ‖b‖ ‖c‖ / (1 − |λ|), so that 2 Σ of the dropped bounds the error here too.
    """
