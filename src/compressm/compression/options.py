"""How cuts are planned: the keywords of `Compressor` and `compress_`, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from compressm.compression.policies import ErrorBound, Policy
from compressm.errors import CompressionError
from compressm.families.choices import Choices, Gramian, Largest, Measured, Selection
from compressm.families.observing import Calibrate
from compressm.families.selective.methods import Baked, SelectiveMethod


@dataclass(frozen=True)
class Options:
    """How cuts are planned: the keywords of `Compressor` and `compress_`."""

    keep: Policy
    calibrate: Calibrate | None = None
    gramian: Gramian | None = None
    fold: bool = True
    select: Selection = Largest()
    gate: float = 0.95
    round_to: int = 1
    at_least: int = 1
    filter_fn: Callable[[nn.Module, str], bool] | None = None
    overrides: Mapping[str, Policy] | None = None
    selective: SelectiveMethod = Baked()

    def __post_init__(self) -> None:
        if isinstance(self.gramian, Measured) and self.calibrate is None:
            raise CompressionError(f"gramian is {self.gramian} without calibrate: there is no data to measure on")
        if self.gramian is not None and not isinstance(self.gramian, Gramian):
            raise CompressionError(f"gramian is {self.gramian!r}, expected WhiteNoise(), Measured(...) or Modal()")
        if self.calibrate is not None and not callable(self.calibrate):
            raise CompressionError(f"calibrate is {self.calibrate!r:.100}, expected a function of the model")
        if self.filter_fn is not None and not callable(self.filter_fn):
            raise CompressionError(f"filter_fn is {self.filter_fn!r}, expected a function of a module and its name")
        if not isinstance(self.fold, bool):
            raise CompressionError(f"fold is {self.fold!r}, expected True or False")
        if not isinstance(self.select, Selection):
            raise CompressionError(f"select is {self.select!r}, expected Largest(), Smallest() or Random(seed)")
        if not isinstance(self.selective, SelectiveMethod):
            raise CompressionError(
                f"selective is {self.selective!r:.100}, expected Baked(), PerChannel(...) or SharedIndex()"
            )
        self._require_bounds()

    def _require_bounds(self) -> None:
        """With measured Gramians 2 Σ of the dropped σ bounds nothing, so that a policy by it would promise too much."""
        others = self.overrides.values() if isinstance(self.overrides, Mapping) else ()
        bound = next((policy for policy in (self.keep, *others) if isinstance(policy, ErrorBound)), None)
        if self.choices.is_measured and bound is not None:
            raise CompressionError(
                f"{bound} with Gramians that are measured, which have no error bound: expected gramian=WhiteNoise(),"
                " for which calibrate still gives measured_error, or, as for selective layers in any case, another"
                " policy, such as EnergyTolerance(0.05)"
            )

    @property
    def choices(self) -> Choices:
        """The part of them that families are asked with."""
        return Choices(self.calibrate is not None, self.gramian, self.fold, self.select, self.selective)
