"""What a compressor did: one record an event, readable in print and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias, final

from compressm.errors import CompressionError
from compressm.families.choices import require_count


@final
@dataclass(frozen=True)
class Cut:
    """One layer went from `order` states to `rank`.

    `error_bound` is the H∞ bound 2 Σ of the dropped σ, the largest over the channels of a bank, and None where there
    is none (measured Gramians, selective layers); `measured_error` is ‖y_new − y_old‖ / ‖y_old‖ of the layer's output
    without its skip D·u, over sequences spread evenly over the calibration data of all processes, None without data;
    `energy_lost` the share of Σσ that went. `rank` may be below what was asked for: no more is kept than the numerical
    rank of the layer, #{σ > n ε σ₁}. Where channels of a selective layer have orders of their own it is the largest.
    """

    step: int
    module: str
    order: int
    rank: int
    error_bound: float | None
    measured_error: float | None
    energy_lost: float | None
    seconds: float | None

    def __post_init__(self) -> None:
        _require_text("Cut: module", self.module)
        object.__setattr__(self, "step", require_count("Cut: step", self.step, low=0))
        object.__setattr__(self, "order", require_count("Cut: order", self.order))
        object.__setattr__(self, "rank", require_count("Cut: rank", self.rank, high=self.order))
        for name in ("error_bound", "measured_error", "energy_lost", "seconds"):
            object.__setattr__(self, name, _finite_or_none(f"Cut: {name}", getattr(self, name)))

    def as_dict(self) -> dict[str, Any]:
        """Numbers, text and None, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Cut:
        """The inverse; a missing or unknown field is refused by name."""
        return cls(**_all_fields(stored, cls))

    def __str__(self) -> str:
        parts = [f"{_label(self.module)}: {self.order} -> {self.rank} states"]
        if self.error_bound is not None:
            parts.append(f"error <= {self.error_bound:.2g}")
        if self.measured_error is not None:
            parts.append(f"measured {self.measured_error:.2g}")
        return ", ".join(parts)


@final
@dataclass(frozen=True)
class Restored:
    """The model is again what it was before the first cut that had not been judged: orders by module, and why."""

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

    def as_dict(self) -> dict[str, Any]:
        """Numbers, text and None, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Restored:
        """The inverse; a missing or unknown field is refused by name."""
        return cls(**_all_fields(stored, cls))

    def __str__(self) -> str:
        orders = ", ".join(f"{_label(name)} to {n}" for name, n in self.orders.items())
        return f"restored {orders} states: {self.reason}"


Event: TypeAlias = Cut | Restored


def _all_fields(stored: Mapping[str, Any], kind: type[Cut] | type[Restored]) -> Mapping[str, Any]:
    wanted = [entry.name for entry in fields(kind)]
    if not isinstance(stored, Mapping) or set(stored) != set(wanted):
        came = ", ".join(map(str, stored)) if isinstance(stored, Mapping) else f"{stored!r:.100}"
        raise CompressionError(f"{kind.__name__}: stored as {came}; expected {', '.join(wanted)}")
    return stored


def _label(module: str) -> str:
    """A model that is itself the layer has no name."""
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
