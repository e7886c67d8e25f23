"""Records of a compressor's events, readable in print and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, TypeAlias, final

from compressm.errors import CompressionError
from compressm.families.choices import require_count


@dataclass(frozen=True)
class _Record:
    """A record that JSON can hold."""

    def as_dict(self) -> dict[str, Any]:
        """The fields as numbers, text and None, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The record of these fields; a missing or unknown field is refused by name."""
        wanted = [entry.name for entry in fields(cls)]
        if not isinstance(stored, Mapping) or set(stored) != set(wanted):
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
    is at most the numerical rank of the layer, #{σ > n ε σ₁}, and may thus be below the requested order. It is the
    largest if channels of a selective layer have their own orders.
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

    def __str__(self) -> str:
        parts = [f"{_label(self.module)}: {self.order} -> {self.rank} states"]
        if self.error_bound is not None:
            parts.append(f"error <= {self.error_bound:.2g}")
        if self.measured_error is not None:
            parts.append(f"measured {self.measured_error:.2g}")
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


Event: TypeAlias = Cut | Restored


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
