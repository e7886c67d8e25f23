"""The lines of a run's JSONL files: plain numbers and text, one dataclass a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeAlias, final, get_args

SplitName = Literal["train", "validation", "test"]
# What a time was counted by; the first that all runs have compares them best, for other load is in none but the last.
TimeKind = Literal["GPU time", "CPU time", "wall time"]

# What a field may hold; a plain float may also be NaN or infinite, as the loss of a run that diverged.
Count: TypeAlias = int
Order: TypeAlias = int
Number: TypeAlias = float
Size: TypeAlias = float
Share: TypeAlias = float
_WORDS = {
    "Count": "an integer of at least 0",
    "Order": "an integer of at least 1",
    "float": "a number",
    "Number": "a finite number",
    "Size": "a finite number of at least 0",
    "Share": "a number from 0 to 1",
    "str": "text",
    "SplitName": "train, validation or test",
    "list[Size]": "finite numbers of at least 0",
    "list[Order]": "integers of at least 1",
    "Mapping[str, Order]": "integers of at least 1 by name",
    "Mapping[str, Size]": "finite numbers of at least 0 by name",
    "Mapping[str, str]": "text by name",
}
_ACTIONS = ("wait", "cut", "keep", "stop")
_MOST = 2**53  # counts above it are no counts, and no floats


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
    later: ClassVar[frozenset[str]] = frozenset()  # fields that earlier versions did not write; None is left out
    step: Count

    @classmethod
    def from_dict(cls, stored: object) -> Any:
        """Make a record of what JSON held; a missing, unknown or odd field is refused by name."""
        wanted = {entry.name for entry in fields(cls)}
        if not isinstance(stored, Mapping) or not wanted - cls.later <= set(stored) <= wanted:
            came = ", ".join(map(str, stored)) if isinstance(stored, Mapping) else f"{stored!r:.80}"
            raise RunError(f"it holds {came}; expected {', '.join(sorted(wanted))}")
        for entry in fields(cls):
            if entry.name in stored:
                require_kind(entry.name, stored[entry.name], str(entry.type))
        return cls(**stored)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None or name not in self.later}


def require_kind(name: str, value: object, kind: str) -> None:
    """Refuse a value from JSON that is not of a kind, written as the annotation of a field."""
    plain = kind.removesuffix(" | None")
    if not (value is None and kind != plain) and not _fits(value, plain):
        words = _WORDS[plain] + (" or null" if kind != plain else "")
        raise RunError(f"{name} is {value!r:.80}, expected {words}")


def _fits(value: object, kind: str) -> bool:
    if kind.startswith("Mapping[str, "):
        inner = kind.removeprefix("Mapping[str, ").removesuffix("]")
        return isinstance(value, Mapping) and all(_fits(entry, inner) for entry in value.values())
    if kind.startswith("list["):
        return isinstance(value, list) and all(_fits(entry, kind[5:-1]) for entry in value)
    if kind == "SplitName":
        return value in get_args(SplitName)
    if kind == "str":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(value, int) and abs(value) > _MOST:
        return False
    if kind in ("Count", "Order"):
        return isinstance(value, int) and value >= (kind == "Order")
    low, high = {"Size": (0.0, math.inf), "Share": (0.0, 1.0)}.get(kind, (-math.inf, math.inf))
    return kind == "float" or (math.isfinite(value) and low <= value <= high)


@final
@dataclass(frozen=True)
class Evaluation(Record):
    """Loss and accuracy of a split, "train" being the steps since the record before; a regression has no accuracy.

    `seconds` is the time since training began, interruptions left out; `step_seconds` what gradient steps took of it.
    `mse` and `mae` are the squared and the absolute error of a regression in the units of its targets.
    """

    file = "metrics.jsonl"
    later = frozenset({"mse", "mae"})
    split: SplitName
    loss: float
    accuracy: Share | None
    learning_rate: Size
    seconds: Size
    step_seconds: Size
    mse: float | None = None
    mae: float | None = None


@final
@dataclass(frozen=True)
class CutRecord(Record):
    """One layer went from `order` states to `rank`; fields as in `compressm.compression.Cut`."""

    file = "cuts.jsonl"
    later = frozenset({"loss_before", "loss_after"})
    module: str
    order: Order
    rank: Order
    error_bound: Size | None
    measured_error: Size | None
    energy_lost: Size | None
    seconds: Size | None
    loss_before: Number | None = None
    loss_after: Number | None = None

    @classmethod
    def from_dict(cls, stored: object) -> Any:
        """Make a record as the others; a cut adds no states, except zero states, which make no error."""
        found = super().from_dict(stored)
        if found.rank > found.order and not found.error_bound == found.energy_lost == 0:
            raise RunError(f"rank is {found.rank}, expected at most order, {found.order}")
        return found

    @property
    def orders(self) -> Mapping[str, int]:
        """The order from here on, by module."""
        return {self.module: self.rank}


@final
@dataclass(frozen=True)
class RestoredRecord(Record):
    """The guard brought back these orders, by module."""

    file = "cuts.jsonl"
    orders: Mapping[str, Order]
    reason: str


@final
@dataclass(frozen=True)
class DecisionRecord(Record):
    """A decision of a schedule; fields as in `compressm.compression.Decision`."""

    file = "decisions.jsonl"
    action: str
    reason: str
    again: Order | None

    @classmethod
    def from_dict(cls, stored: object) -> Any:
        """Make a record as the others; a decision is one of four, and the next look comes later."""
        found = super().from_dict(stored)
        if found.action not in _ACTIONS:
            raise RunError(f"action is {found.action!r:.100}, expected one of {', '.join(_ACTIONS)}")
        if found.again is not None and found.again <= found.step:
            raise RunError(f"again is {found.again}, expected a step after step {found.step}, or null")
        return found


@final
@dataclass(frozen=True)
class Spectrum(Record):
    """Hankel singular values of one layer, falling; of a bank their mean.

    `weyl_bound` is max |eig δH| since the record before; None for the first, across a cut and where it was not wanted.
    """

    file = "spectra.jsonl"
    module: str
    sigma: list[Size]
    weyl_bound: Size | None


@final
@dataclass(frozen=True)
class Timing(Record):
    """Seconds by phase since the record before, in which there were `steps` gradient steps at these `orders`.

    Phases: steps, data, evaluation, spectrum, cut, optimizer, capture, checkpoint, regulariser, teacher, truncation.
    `seconds` are of the wall clock; `cpu` of the processors, in all threads of the process that writes; `gpu` those
    between CUDA events. `load` is how many processes of the machine wanted a processor, the mean of the last minute.
    """

    file = "timings.jsonl"
    later = frozenset({"cpu", "gpu", "load"})
    steps: Count
    orders: Mapping[str, Order]
    seconds: Mapping[str, Size] = field(default_factory=dict)
    cpu: Mapping[str, Size] | None = None
    gpu: Mapping[str, Size] | None = None
    load: Size | None = None

    def by(self, kind: TimeKind) -> Mapping[str, float]:
        """Seconds by phase and a kind of clock; none where it did not run."""
        return {"GPU time": self.gpu, "CPU time": self.cpu, "wall time": self.seconds}[kind] or {}


@final
@dataclass(frozen=True)
class PenaltyRecord(Record):
    """A penalty without its weight `beta`, as it was before step `found_at`.

    It has been found so many times since training began, in so many `seconds`.
    """

    file = "penalties.jsonl"
    kind: str
    value: Number
    beta: Number
    found_at: Count
    evaluations: Count
    seconds: Size


@final
@dataclass(frozen=True)
class TruncationRecord(Record):
    """A copy of the final model, cut once to `order` states a layer, `mean_order` where layers had fewer to keep.

    `gramian` is that of the recipe, or "selective" where layers are cut by averages over data. `error_bound` is the
    largest of its layers, None where there is none.
    """

    file = "truncations.jsonl"
    later = frozenset({"mse", "mae"})
    gramian: str
    order: Order
    mean_order: Size
    error_bound: Size | None
    split: SplitName
    loss: float
    accuracy: Share | None
    mse: float | None = None
    mae: float | None = None
