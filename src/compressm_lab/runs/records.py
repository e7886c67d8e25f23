"""The lines of a run's JSONL files: plain numbers and text, one dataclass a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, final, get_args

SplitName = Literal["train", "validation", "test"]


class RunError(ValueError):
    """A run directory, or a file in it, that is not what it should be."""


def why_not_json(error: ValueError | RecursionError) -> str:
    """Words for why a text is not JSON."""
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON at line {error.lineno}, column {error.colno}"
    return "not text in UTF-8" if isinstance(error, UnicodeDecodeError) else "not JSON that can be read"


class RunWriteError(RunError):
    """A file of a run that cannot be written, as on a full disk; what was written before is whole, and can resume."""


@dataclass(frozen=True)
class Record:
    """Something that happened at a step, a line of `file`."""

    file: ClassVar[str]
    step: int

    @classmethod
    def from_dict(cls, stored: object) -> Any:
        """Make a record of what JSON held; a missing, unknown or odd field is refused by name."""
        wanted = {entry.name for entry in fields(cls)}
        if not isinstance(stored, Mapping) or set(stored) != wanted:
            came = ", ".join(map(str, stored)) if isinstance(stored, Mapping) else f"{stored!r:.80}"
            raise RunError(f"it holds {came}; expected {', '.join(sorted(wanted))}")
        step = stored["step"]
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise RunError(f"step is {step!r:.80}, expected an integer of at least 0")
        for entry in fields(cls):
            if not _fits(stored[entry.name], str(entry.type)):
                raise RunError(f"{entry.name} is {stored[entry.name]!r:.80}, expected {entry.type}")
        return cls(**stored)


def _fits(value: object, kind: str) -> bool:
    """Tell whether a value from JSON is of a kind, written as the annotation of a field."""
    kind, optional = kind.removesuffix(" | None"), kind.endswith(" | None")
    if value is None:
        return optional
    if kind.startswith("Mapping[str, "):
        inner = kind.removeprefix("Mapping[str, ").removesuffix("]")
        return isinstance(value, Mapping) and all(_fits(entry, inner) for entry in value.values())
    if kind == "list[float]":
        return isinstance(value, list) and {type(entry) for entry in value} <= {int, float}
    if kind == "SplitName":
        return value in get_args(SplitName)
    types: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
    return isinstance(value, types[kind]) and not isinstance(value, bool)


@final
@dataclass(frozen=True)
class Evaluation(Record):
    """Loss and accuracy of a split, "train" being the steps since the record before; a regression has no accuracy.

    `seconds` is the time since training began, interruptions left out; `step_seconds` what gradient steps took of it.
    """

    file = "metrics.jsonl"
    split: SplitName
    loss: float
    accuracy: float | None
    learning_rate: float
    seconds: float
    step_seconds: float


@final
@dataclass(frozen=True)
class CutRecord(Record):
    """One layer went from `order` states to `rank`; fields as in `compressm.compression.Cut`."""

    file = "cuts.jsonl"
    module: str
    order: int
    rank: int
    error_bound: float | None
    measured_error: float | None
    energy_lost: float | None
    seconds: float | None

    @property
    def orders(self) -> Mapping[str, int]:
        """The order from here on, by module."""
        return {self.module: self.rank}


@final
@dataclass(frozen=True)
class RestoredRecord(Record):
    """The guard brought back these orders, by module."""

    file = "cuts.jsonl"
    orders: Mapping[str, int]
    reason: str


@final
@dataclass(frozen=True)
class Spectrum(Record):
    """Hankel singular values of one layer, falling; of a bank their mean.

    `weyl_bound` is max |eig δH| since the record before; None for the first, across a cut and where it was not wanted.
    """

    file = "spectra.jsonl"
    module: str
    sigma: list[float]
    weyl_bound: float | None


@final
@dataclass(frozen=True)
class Timing(Record):
    """Seconds by phase since the record before, in which there were `steps` gradient steps at these `orders`.

    Phases: steps, data, evaluation, spectrum, cut, optimizer, capture, checkpoint, regulariser, teacher, truncation.
    """

    file = "timings.jsonl"
    steps: int
    orders: Mapping[str, int]
    seconds: Mapping[str, float] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class PenaltyRecord(Record):
    """A penalty without its weight `beta`, as it was before step `found_at`.

    It has been found so many times since training began, in so many `seconds`.
    """

    file = "penalties.jsonl"
    kind: str
    value: float
    beta: float
    found_at: int
    evaluations: int
    seconds: float


@final
@dataclass(frozen=True)
class TruncationRecord(Record):
    """A copy of the final model, cut once to `order` states a layer, `mean_order` where layers had fewer to keep.

    `gramian` is that of the recipe, or "selective" where layers are cut by averages over data. `error_bound` is the
    largest of its layers, None where there is none.
    """

    file = "truncations.jsonl"
    gramian: str
    order: int
    mean_order: float
    error_bound: float | None
    split: SplitName
    loss: float
    accuracy: float | None
