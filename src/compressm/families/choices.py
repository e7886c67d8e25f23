"""Small frozen choices of a user: how states are valued (Gramians) and which of them stay (selections)."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressm.control import validation
from compressm.errors import CompressionError

if TYPE_CHECKING:
    from compressm.families.selective.methods import SelectiveMethod


def require_number(
    what: str, value: object, low: int, high: int | None = None, *, above: bool = False, below: bool = False
) -> float:
    """A finite number from `low` to `high`; `above` and `below` say that the end itself is not allowed."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    within = number > low if above else number >= low
    if high is not None:
        within = within and (number < high if below else number <= high)
    if within and math.isfinite(number):
        return number
    end = "" if high is None else f" {'<' if below else '<='} {high}"
    raise CompressionError(f"{what} is {value!r}, expected a finite number, {low} {'<' if above else '<='} it{end}")


def require_count(what: str, value: object, low: int = 1, high: int | None = None) -> int:
    """An integer from `low` to `high`, of Python, NumPy or a tensor."""
    number = validation.as_integer(value)
    if number is None or number < low or (high is not None and number > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise CompressionError(f"{what} is {value!r}, expected an integer {allowed}")
    return number


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


class Selection(ABC):
    """A choice of `order` of the n states, by their places in the falling spectrum; the channels of a bank share it.

    The indices come sorted, on the CPU. `salt` is text that differs between layers and between cuts, for choices that
    are to differ there too.
    """

    def __call__(self, sigma: Float[Tensor, "*channels n"], order: int, *, salt: str) -> Int[Tensor, "order"]:
        """The states to keep, for `balanced_truncation(states=...)`."""
        if not isinstance(sigma, Tensor) or sigma.ndim == 0:
            raise CompressionError(f"sigma is {sigma!r:.100}, expected a tensor (*channels, n)")
        if not isinstance(salt, str):
            raise CompressionError(f"salt is {salt!r:.100}, expected text that names the layer and the cut")
        n = sigma.shape[-1]
        return torch.tensor(self.chosen(n, require_count("order", order, high=n), salt), dtype=torch.int64)

    @abstractmethod
    def chosen(self, n: int, order: int, salt: str) -> list[int]:
        """Sorted places from 0, the largest σ, to n − 1, the smallest."""


@final
@dataclass(frozen=True)
class Largest(Selection):
    """Balanced truncation as it should be: the states that matter most stay."""

    def chosen(self, n: int, order: int, salt: str) -> list[int]:
        return list(range(order))


@final
@dataclass(frozen=True)
class Smallest(Selection):
    """The opposite, as the paper's adversarial ablation (app:ablate_choice)."""

    def chosen(self, n: int, order: int, salt: str) -> list[int]:
        return list(range(n - order, n))


@final
@dataclass(frozen=True)
class Random(Selection):
    """States drawn uniformly, as the paper's ablation (app:ablate_choice): the same for the same seed and salt."""

    seed: int

    def __post_init__(self) -> None:
        seed = validation.as_integer(self.seed)
        if seed is None:
            raise CompressionError(f"Random: seed is {self.seed!r}, expected an integer")
        object.__setattr__(self, "seed", seed)

    def chosen(self, n: int, order: int, salt: str) -> list[int]:
        # Seeded by text, Python's generator hashes it with SHA-512: the same in every process.
        return sorted(random.Random(f"{self.seed} {salt}").sample(range(n), order))


@final
@dataclass(frozen=True)
class Choices:
    """What a user asked for, as far as families care: the options of a cut without its policy and its schedule."""

    calibrated: bool
    gramian: Gramian | None
    fold: bool
    select: Selection
    selective: SelectiveMethod

    @property
    def measurement(self) -> Measured:
        """How much of the data counts."""
        return self.gramian if isinstance(self.gramian, Measured) else Measured()

    @property
    def is_modal(self) -> bool:
        """Whether modes are dropped as they are."""
        return isinstance(self.gramian, Modal)

    @property
    def is_measured(self) -> bool:
        """Whether P is that of real data: said, or the default where there is data."""
        return isinstance(self.gramian or (Measured() if self.calibrated else WhiteNoise()), Measured)
