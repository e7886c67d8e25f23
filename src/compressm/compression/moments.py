"""What becomes of an optimizer's moments at a cut: small frozen choices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from compressm.compression.change import Change, Values


class Role(Enum):
    """What a tensor of an optimizer's state is made of."""

    GRADIENT = "means of gradients"
    GRADIENT_SQUARE = "means of squares of gradients"
    GRADIENT_SIZE = "sizes of gradients"
    UPDATE = "means of updates"
    UPDATE_SQUARE = "means of squares of updates"
    UPDATE_SIZE = "sizes of updates"


@final
@dataclass(frozen=True)
class Entry:
    """One entry of the state, of all parameters of a module that have it: float64, by name, and as it once began."""

    role: Role | None
    values: Values
    initial: Mapping[str, float]


Entries: TypeAlias = Mapping[str, Entry]


class Moments(ABC):
    """A rule for the state of parameters whose number of states changes; all other parameters keep theirs."""

    # Whether an entry of unknown role can be carried.
    needs_roles = False

    @abstractmethod
    def carry(self, change: Change, entries: Entries) -> dict[str, dict[str, Tensor]]:
        """The entries, by key and parameter name, that belong to the new values."""

    def carry_scalar(self, key: str, value: Any) -> Any:
        """A step count, or another number a parameter."""
        return value


@final
@dataclass(frozen=True)
class Transport(Moments):
    """Moments go through the change of basis: gradients as covectors, updates as vectors, squares by squared entries.

    Cosines with the gradients of the reduced model are 0.6 to 1 for B and C where those of `Slice` are about 0.
    """

    needs_roles = True

    def carry(self, change: Change, entries: Entries) -> dict[str, dict[str, Tensor]]:
        carried = {key: _carried(change, entry) for key, entry in _uncentred(entries).items()}
        return _within_reach(_centred(carried, entries), entries)


@final
@dataclass(frozen=True)
class Restart(Moments):
    """Moments begin anew: as they were before the first step, and step counts with them.

    Zeros at a late step count would make Adam's first update (1 − β₁)/√(1 − β₂) = 3.2 times too long.
    """

    def carry(self, change: Change, entries: Entries) -> dict[str, dict[str, Tensor]]:
        return {
            key: {name: torch.full_like(change.values[name], entry.initial[name]) for name in entry.values}
            for key, entry in entries.items()
        }

    def carry_scalar(self, key: str, value: Any) -> Any:
        if key not in _FIRST_SCALARS:
            return value
        first = _FIRST_SCALARS[key]
        return torch.full_like(value, first) if isinstance(value, Tensor) else type(value)(first)


@final
@dataclass(frozen=True)
class Slice(Moments):
    """The first r entries of every moment, as in the paper's code: whatever modes they had belonged to."""

    def carry(self, change: Change, entries: Entries) -> dict[str, dict[str, Tensor]]:
        return {
            key: {name: change.first(name, value) for name, value in entry.values.items()}
            for key, entry in entries.items()
        }


_FIRST_SCALARS = {"step": 0, "mu_product": 1}


def _carried(change: Change, entry: Entry) -> dict[str, Tensor]:
    match entry.role:
        case Role.GRADIENT:
            found = change.gradient(entry.values)
        case Role.GRADIENT_SQUARE:
            found = change.gradient_squares(entry.values)
        case Role.GRADIENT_SIZE:
            found = {name: torch.sqrt(value) for name, value in change.gradient_squares(_squares(entry)).items()}
        case Role.UPDATE:
            found = change.update(entry.values)
        case Role.UPDATE_SQUARE:
            found = change.update_squares(entry.values)
        case _:
            found = {name: torch.sqrt(value) for name, value in change.update_squares(_squares(entry)).items()}
    return {name: found[name] for name in entry.values}


def _squares(entry: Entry) -> dict[str, Tensor]:
    return {name: value * value for name, value in entry.values.items()}


def _uncentred(entries: Entries) -> dict[str, Entry]:
    """RMSprop divides by the root of square_avg − grad_avg²: it is that difference which must not become negative."""
    changed = dict(entries)
    if {"square_avg", "grad_avg"} <= entries.keys():
        mean, square = entries["grad_avg"].values, entries["square_avg"].values
        variance = {
            name: (value - mean[name] * mean[name]).clamp_min(0) for name, value in square.items() if name in mean
        }
        changed["square_avg"] = replace(entries["square_avg"], values={**square, **variance})
    return changed


def _centred(carried: dict[str, dict[str, Tensor]], entries: Entries) -> dict[str, dict[str, Tensor]]:
    """The inverse, after both were carried."""
    if {"square_avg", "grad_avg"} <= entries.keys():
        mean, square = carried["grad_avg"], carried["square_avg"]
        whole = {name: value + mean[name] * mean[name] for name, value in square.items() if name in mean}
        return {**carried, "square_avg": {**square, **whole}}
    return carried


# Of Adam with β = (0.9, 0.999): m² ≤ (1 − β₁)² / ((1 − β₁²/β₂)(1 − β₂)) v = 53 v whatever the gradients were.
_LARGEST_RATIO = 53.0


def _within_reach(carried: dict[str, dict[str, Tensor]], entries: Entries) -> dict[str, dict[str, Tensor]]:
    """Second moments no smaller than first moments allow: v = 0 beside m ≠ 0 would be a step of 1e8 learning rates.

    The carried squares leave out what varies together, so that the inequality may be lost by the way.
    """
    if "exp_avg" not in carried:
        return carried
    bounded = dict(carried)
    for key, values in carried.items():
        role = entries[key].role
        if role not in (Role.GRADIENT_SQUARE, Role.GRADIENT_SIZE):
            continue
        least = {name: value * value / _LARGEST_RATIO for name, value in carried["exp_avg"].items()}
        if role is Role.GRADIENT_SIZE:
            least = {name: torch.sqrt(value) for name, value in least.items()}
        bounded[key] = {
            name: torch.maximum(value, least[name]) if name in least else value for name, value in values.items()
        }
    return bounded
