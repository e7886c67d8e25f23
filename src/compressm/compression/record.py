"""Records of a compressor's events, readable in print and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import UnionType
from typing import Any, ClassVar, Self, TypeAlias, final

from compressm.errors import CompressionError, warn_caller
from compressm.families.choices import require_count, require_number


@dataclass(frozen=True)
class _Record:
    """A record that JSON can hold."""

    later: ClassVar[frozenset[str]] = frozenset()  # fields that earlier versions did not write; None is left out

    def as_dict(self) -> dict[str, Any]:
        """The fields as numbers, text and None, for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None or name not in self.later}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The record of these fields; a missing or unknown field is refused by name."""
        wanted = [entry.name for entry in fields(cls)]
        if not isinstance(stored, Mapping) or not set(wanted) - cls.later <= set(stored) <= set(wanted):
            came = ", ".join(map(str, stored)) if isinstance(stored, Mapping) else f"{stored!r:.100}"
            raise CompressionError(f"{cls.__name__}: stored as {came}; expected {', '.join(wanted)}")
        return cls(**stored)


@final
@dataclass(frozen=True)
class Cut(_Record):
    """A cut of one layer from `order` states to `rank`.

    `error_bound` is the H∞ bound 2 Σ of the dropped σ plus the rounding of the cut in float64 (`rounding_floor`), the
    largest over the channels of a bank, or None without a bound (measured Gramians, selective layers).
    `measured_error` is ‖y_new − y_old‖ / ‖y_old‖ of the layer's output without its skip D·u, on a sample of the
    calibration data of all processes, or None without data. `energy_lost` is the share of Σσ that was dropped. `rank`
    is at most the numerical rank of the layer, #{σ > n ε σ₁}, and may thus be below the requested order; if zero states
    fill the layer up, they count. It is the largest if channels of a selective layer have their own orders. A layer to
    which `uniform` only adds zero states has a rank above its order, and both `error_bound` and `energy_lost` are 0.

    If the policy tried cuts, `loss_before` and `loss_after` are the losses of the whole model before and after all cuts
    of this step, as measured on a copy; None without trials, or if these orders were not tried.
    """

    later = frozenset({"loss_before", "loss_after"})

    step: int
    module: str
    order: int
    rank: int
    error_bound: float | None
    measured_error: float | None
    energy_lost: float | None
    seconds: float | None
    loss_before: float | None = None
    loss_after: float | None = None

    def __post_init__(self) -> None:
        _require_text("Cut: module", self.module)
        object.__setattr__(self, "step", require_count("Cut: step", self.step, low=0))
        object.__setattr__(self, "order", require_count("Cut: order", self.order))
        most = None if self.fills else self.order
        object.__setattr__(self, "rank", require_count("Cut: rank", self.rank, high=most))
        for name in ("error_bound", "measured_error", "energy_lost", "seconds", "loss_before", "loss_after"):
            object.__setattr__(self, name, _finite_or_none(f"Cut: {name}", getattr(self, name)))

    @property
    def fills(self) -> bool:
        """True if nothing was dropped: only then may zero states have been added."""
        return self.error_bound == 0 and self.energy_lost == 0

    def __str__(self) -> str:
        parts = [f"{_label(self.module)}: {self.order} -> {self.rank} state{'s' * (self.rank > 1)}"]
        if self.error_bound is not None:
            parts.append(f"error <= {self.error_bound:.2g}")
        if self.measured_error is not None:
            parts.append(f"measured {self.measured_error:.2g}")
        if self.loss_before is not None and self.loss_after is not None:
            parts.append(f"loss {self.loss_before:.4g} -> {self.loss_after:.4g}")
        return ", ".join(parts)


@final
@dataclass(frozen=True)
class Restored(_Record):
    """The model was restored to its state before the first cut under test: its orders by module, and the reason."""

    step: int
    orders: Mapping[str, int] = field(hash=False)
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", require_count("Restored: step", self.step, low=0))
        _require_text("Restored: reason", self.reason)
        if not isinstance(self.orders, Mapping):
            raise CompressionError(f"Restored: orders are {self.orders!r:.100}, expected {{module: order}}")
        for name in self.orders:
            _require_text("Restored: a module", name)
        orders = {name: require_count(f"Restored: order of {name!r}", n) for name, n in self.orders.items()}
        object.__setattr__(self, "orders", orders)

    def __str__(self) -> str:
        orders = ", ".join(f"{_label(name)} to {n}" for name, n in self.orders.items())
        return f"restored {orders} states: {self.reason}"


# What a schedule may decide, in the words of its decisions.
ACTIONS = ("wait", "cut", "keep", "stop")


@final
@dataclass(frozen=True)
class Decision(_Record):
    """A decision of a schedule at a step, and its reason.

    `action` is "wait", "cut" if a try cut at least one layer, "keep" if it cut none, or "stop". `again` is the step of
    the next look, None if there is none.
    """

    step: int
    action: str
    reason: str
    again: int | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", require_count("Decision: step", self.step, low=0))
        if self.action not in ACTIONS:
            raise CompressionError(f"Decision: action is {self.action!r:.100}, expected one of {', '.join(ACTIONS)}")
        _require_text("Decision: reason", self.reason)
        if self.again is not None:
            object.__setattr__(self, "again", require_count("Decision: again", self.again, low=self.step + 1))

    def __str__(self) -> str:
        words = {"wait": "waits", "cut": "cuts", "keep": "keeps all states", "stop": "cuts no more"}
        again = "" if self.again is None or self.action == "stop" else f"; looks again at step {self.again}"
        return f"{words[self.action]}: {self.reason}{again}"


Event: TypeAlias = Cut | Restored | Decision
# The field that only records of this kind have.
_KINDS: Mapping[str, type[Cut] | type[Restored] | type[Decision]] = {
    "module": Cut,
    "orders": Restored,
    "action": Decision,
}


def event_of(stored: Mapping[str, Any]) -> Event:
    """The event of these fields."""
    kind = next((kind for field, kind in _KINDS.items() if isinstance(stored, Mapping) and field in stored), None)
    if kind is None:
        raise CompressionError(
            f"an event is stored as {stored!r:.100}, expected the fields of a Cut or of a Restored, or of a Decision"
        )
    return kind.from_dict(stored)


def orders_after(event: Event) -> Mapping[str, int]:
    """The orders that an event leaves, of the modules that it changed."""
    if isinstance(event, Decision):
        return {}
    return {event.module: event.rank} if isinstance(event, Cut) else event.orders


def require_entries(what: str, state: object, **kinds: type | UnionType) -> None:
    """Require a mapping with entries of these kinds; it may have others."""
    if not isinstance(state, Mapping):
        raise CompressionError(f"{what} is {state!r:.100}, expected a mapping with {', '.join(kinds)}")
    missing = [name for name in kinds if name not in state]
    if missing:
        came = ", ".join(map(str, state)) or "nothing"
        raise CompressionError(f"{what} has {came:.200}; {', '.join(missing)} missing, expected what state_dict() gave")
    for name, kind in kinds.items():
        value = state[name]
        # True is an integer for Python, a step or a count it is not.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wanted = kind.__name__ if isinstance(kind, type) else str(kind).replace("collections.abc.", "")
            raise CompressionError(f"{what}: {name} is {value!r:.100}, expected {wanted}, as state_dict() gave it")


def past_of(state: Mapping[str, Any]) -> tuple[list[int], int]:
    """The schedule in a compressor's saved state, and the last step that was reached; other states are refused."""
    what = "the state of a compressor"
    require_entries(what, state, schedule=list | tuple, ended=bool, history=list | tuple, watch=Mapping | None)
    seen, orders = state.get("seen"), state.get("orders")
    if orders is not None and not isinstance(orders, Mapping):
        raise CompressionError(f"{what}: orders is {orders!r:.100}, expected {{module: order}}")
    for name, order in (orders or {}).items():
        require_count(f"{what}: the order of {name!r:.100}", order)
    reached = [0] if seen is None else [require_count(f"{what}: seen", seen, low=0)]
    reached += [event_of(stored).step for stored in state["history"]]
    return [require_count(f"{what}: a step of the schedule", step) for step in state["schedule"]], max(reached)


def losses_of(state: Mapping[str, Any]) -> tuple[float | None, float]:
    """The best loss in a compressor's saved state, and what cuts have added to it since; None and 0 without trials."""
    losses = state.get("losses")
    if losses is None:
        return None, 0.0
    what = "the state of a compressor: losses"
    require_entries(what, losses, best=int | float, added=int | float)
    found = _finite_or_none(f"{what}: best", losses["best"])
    return found, require_number(f"{what}: added", losses["added"], 0)


def warn_uncut(history: Sequence[Event], orders: Mapping[str, int], saved: Mapping[str, int] | None) -> None:
    """Warn if layers that were cut have more states than when the history was saved.

    Earlier versions did not save orders: there, as many states as before the last event are too many, although
    `pad_orders_` may have added them.
    """
    after: dict[str, int] = {}
    before: dict[str, int] = {}
    for event in history:
        if isinstance(event, Decision):
            continue
        after |= orders_after(event)
        more = {event.module: event.order} if isinstance(event, Cut) else {k: n + 1 for k, n in event.orders.items()}
        before |= more
    most = {name: (saved[name] if saved and name in saved else before[name] - 1) for name in after}
    uncut = {name: order for name, order in orders.items() if order > most.get(name, order)}
    if uncut:
        said = ", ".join(f"{_label(name)} has {order}, cut to {after[name]}" for name, order in uncut.items())
        warn_caller(
            f"the loaded history does not fit the model ({said} states): those cuts are not made again; load model,"
            " optimizer and compressor together by load_checkpoint, or the weights of the model first"
        )


def _label(module: str) -> str:
    """The module's name in messages; the model itself has none."""
    return module or "the model"


def _require_text(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise CompressionError(f"{what} is {value!r:.100}, expected text")


def _finite_or_none(what: str, value: object) -> float | None:
    if value is None:
        return None
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number):
        raise CompressionError(f"{what} is {value!r}, expected a finite number or None")
    return number
