"""Choices of a user as small frozen objects: how states are valued, which of them stay, and which orders are allowed.

These are Gramians, selections and allowed orders.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, TypeAlias, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressm.control import validation
from compressm.errors import CompressionError

if TYPE_CHECKING:
    from compressm.families.memory.forms import Form
    from compressm.families.selective.methods import SelectiveMethod


def require_number(
    what: str, value: object, low: int, high: int | None = None, *, above: bool = False, below: bool = False
) -> float:
    """The value as a finite number from `low` to `high`; `above` and `below` exclude that end."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    within = number > low if above else number >= low
    if high is not None:
        within = within and (number < high if below else number <= high)
    if within and math.isfinite(number):
        return number
    end = "" if high is None else f" {'<' if below else '<='} {high}"
    raise CompressionError(f"{what} is {value!r}, expected a finite number, {low} {'<' if above else '<='} it{end}")


def require_count(what: str, value: object, low: int = 1, high: int | None = None) -> int:
    """The value as an integer from `low` to `high`; it may come from Python, NumPy or a tensor."""
    number = validation.as_integer(value)
    if number is None or number < low or (high is not None and number > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise CompressionError(f"{what} is {value!r}, expected an integer {allowed}")
    return number


class Gramian:
    """A way to value states; it can be printed and compared."""


@final
@dataclass(frozen=True)
class WhiteNoise(Gramian):
    """The paper's P: exact for inputs that are white noise. Cuts have an error bound."""


@final
@dataclass(frozen=True)
class Measured(Gramian):
    """P = E[h hᴴ] of states on real data, at one of every `stride` steps of the first `batches` passes of a layer.

    More steps are used if there would be fewer than four samples per state. Q stays exact, so a cut is stable for any
    data. There is no a-priori bound; `measured_error` of a cut is its error on the same data.
    """

    batches: int = 4
    stride: int = 8

    def __post_init__(self) -> None:
        for name, value in (("batches", self.batches), ("stride", self.stride)):
            object.__setattr__(self, name, require_count(f"Measured: {name}", value))


@final
@dataclass(frozen=True)
class Modal(Gramian):
    """No Gramian: modes are dropped whole, first those whose part of the output has the smallest H∞ norm.

    The other modes do not change. It is a baseline: at the same order it loses far more than balanced truncation. The
    spectrum is ½ ‖b‖ ‖c‖ / (1 − |λ|), so 2 Σ of the dropped values bounds the error here too.
    """


class Selection(ABC):
    """A choice of `order` of the n states, by their places in the falling spectrum; the channels of a bank share it.

    The indices are sorted, on the CPU. `salt` is text that differs between layers and cuts, so random choices differ.
    """

    def __call__(self, sigma: Float[Tensor, "*channels n"], order: int, *, salt: str) -> Int[Tensor, "order"]:
        """The states to keep, for `balanced_truncation(states=...)`."""
        if not isinstance(sigma, Tensor) or sigma.ndim == 0:
            raise CompressionError(f"sigma is {sigma!r:.100}, expected a tensor (*channels, n)")
        if not isinstance(salt, str):
            raise CompressionError(f"salt is {salt!r:.100}, expected text that names the layer and the cut")
        n = sigma.shape[-1]
        return torch.tensor(
            self.chosen(n, require_count("order", order, high=n), salt), dtype=torch.int64, device="cpu"
        )

    @abstractmethod
    def chosen(self, n: int, order: int, salt: str) -> list[int]:
        """Sorted places from 0, the largest σ, to n − 1, the smallest."""


@final
@dataclass(frozen=True)
class Largest(Selection):
    """The states with the largest σ stay, as in balanced truncation."""

    def chosen(self, n: int, order: int, salt: str) -> list[int]:
        return list(range(order))


@final
@dataclass(frozen=True)
class Smallest(Selection):
    """The states with the smallest σ stay: the paper's adversarial ablation (app:ablate_choice)."""

    def chosen(self, n: int, order: int, salt: str) -> list[int]:
        return list(range(n - order, n))


@final
@dataclass(frozen=True)
class Random(Selection):
    """Uniformly drawn states stay: the paper's ablation (app:ablate_choice). Seed and salt determine them."""

    seed: int

    def __post_init__(self) -> None:
        seed = validation.as_integer(self.seed)
        if seed is None:
            raise CompressionError(f"Random: seed is {self.seed!r}, expected an integer")
        object.__setattr__(self, "seed", seed)

    def chosen(self, n: int, order: int, salt: str) -> list[int]:
        # Python's generator hashes a seed of text with SHA-512: the same in every process.
        return sorted(random.Random(f"{self.seed} {salt}").sample(range(n), order))


@final
@dataclass(frozen=True)
class Choices:
    """The options of a cut that concern families: all except policy and schedule."""

    calibrated: bool
    gramian: Gramian | None
    fold: bool
    select: Selection
    selective: SelectiveMethod
    # True if cuts follow: a family may then keep what it computes for the spectra.
    cutting: bool = False
    # None: the best form that a layer can store.
    form: Form | None = None

    @property
    def measurement(self) -> Measured:
        """The amount of data to measure on."""
        return self.gramian if isinstance(self.gramian, Measured) else Measured()

    @property
    def is_modal(self) -> bool:
        """True if modes are dropped whole."""
        return isinstance(self.gramian, Modal)

    @property
    def is_measured(self) -> bool:
        """True if P is measured on data: by choice, or by default if there is data."""
        return self.calibrated if self.gramian is None else isinstance(self.gramian, Measured)


class AllowedOrders(ABC):
    """The orders that layers may have after a cut; `round_to` takes it."""

    # True if all layers of a model must have the same order.
    one_for_all: bool = False

    @abstractmethod
    def next(self, order: int) -> int | None:
        """The smallest allowed order that is not below `order`; None if there is none."""

    def of(self, recurrence: str) -> AllowedOrders:
        """The orders for this kind of layer, an adapter's `RECURRENCE`."""
        return self

    def allows(self, order: int) -> bool:
        """True if a layer may have this order."""
        return self.next(order) == order

    @property
    def fills_up(self) -> bool:
        """True if a layer that is cut to its numerical rank gets zero states up to an allowed order."""
        return True


@final
@dataclass(frozen=True)
class Multiples(AllowedOrders):
    """The multiples of `step` up to `at_most`."""

    step: int
    at_most: int | None = None
    fills: bool = True

    def next(self, order: int) -> int | None:
        found = -(-order // self.step) * self.step
        return found if self.at_most is None or found <= self.at_most else None

    @property
    def fills_up(self) -> bool:
        return self.fills

    def __str__(self) -> str:
        said = "any" if self.step == 1 else f"multiples of {self.step}"
        return said if self.at_most is None else f"{said} up to {self.at_most}".removeprefix("any ")


@final
@dataclass(frozen=True)
class OneOf(AllowedOrders):
    """These orders and no others."""

    orders: tuple[int, ...]

    def next(self, order: int) -> int | None:
        return next((found for found in self.orders if found >= order), None)

    def __str__(self) -> str:
        return ", ".join(map(str, self.orders))


@final
@dataclass(frozen=True)
class PowersOfTwo(AllowedOrders):
    """1, 2, 4, 8 and so on, up to `at_most`."""

    at_most: int | None = None

    def next(self, order: int) -> int | None:
        found = 1 << max(0, order - 1).bit_length()
        return found if self.at_most is None or found <= self.at_most else None

    def __str__(self) -> str:
        return "powers of two" if self.at_most is None else f"powers of two up to {self.at_most}"


powers_of_two = PowersOfTwo()
"""Orders 1, 2, 4, 8 and so on, for `round_to`."""

# More than any layer has states, and quick to look through.
_MOST_ORDERS = 10_000

RoundTo: TypeAlias = int | Collection[int] | AllowedOrders


def as_allowed_orders(round_to: object) -> AllowedOrders:
    """The allowed orders that `round_to` means: a number's multiples, a collection's members, or its own."""
    if isinstance(round_to, AllowedOrders):
        return round_to
    number = validation.as_integer(round_to)
    if number is not None and number >= 1:
        return Multiples(number, fills=False)
    if number is None and isinstance(round_to, Collection) and not isinstance(round_to, Mapping | str | bytes):
        members = list(islice(round_to, _MOST_ORDERS + 1))
        if len(members) > _MOST_ORDERS:
            raise CompressionError(
                f"round_to is {round_to!r:.100}, with more than {_MOST_ORDERS:,} orders; expected fewer, or at_least"
                " for all orders from one on"
            )
        orders = sorted({require_count("round_to: an order", order) for order in members})
        if orders:
            return OneOf(tuple(orders))
    raise CompressionError(
        f"round_to is {round_to!r:.100}, expected an integer of at least 1, a collection of orders such as (16, 32),"
        " powers_of_two, or a runtime such as deploy.LLAMA_CPP_CUDA"
    )


@final
@dataclass(frozen=True)
class LayerOrders(AllowedOrders):
    """The allowed orders of each layer, by name."""

    by_name: Mapping[str, AllowedOrders]

    def next(self, order: int) -> int | None:
        return next_common(self.by_name.values(), order, limit=order)


def orders_by_name(round_to: object, names: Iterable[str]) -> dict[str, AllowedOrders]:
    """The allowed orders of these layers."""
    found = as_allowed_orders(round_to)
    return {name: found.by_name[name] if isinstance(found, LayerOrders) else found for name in names}


def next_common(allowed: Iterable[AllowedOrders], order: int, limit: int) -> int | None:
    """The smallest order from `order` to `limit` that all of them allow; None if there is none."""
    rules = list(dict.fromkeys(allowed))
    while order <= limit:
        following = [rule.next(order) for rule in rules]
        if None in following:
            return None
        if (largest := max(found for found in following if found is not None)) == order:
            return order
        order = largest
    return None
