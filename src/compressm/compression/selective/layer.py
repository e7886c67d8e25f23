"""A selective layer before a cut, and a cut of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters import Adapter, SelectiveAdapter
from compressm.compression.change import Change, Writing
from compressm.compression.distributed import Processes
from compressm.compression.layer import Layer, PlannedCut
from compressm.compression.sample import ratio_of
from compressm.compression.selective.calibrated import Calibrated
from compressm.compression.selective.methods import SelectiveMethod
from compressm.compression.selective.reduction import Reduction
from compressm.compression.selective.simulation import squared_change
from compressm.control import ControlError
from compressm.control.selective import SelectiveSystem
from compressm.errors import AdapterError, CompressionError


@final
@dataclass(frozen=True)
class SelectiveLayer(Layer):
    """A module with the system it is now, what it saw, and how it would be cut."""

    name: str
    module: nn.Module
    adapter: SelectiveAdapter[Any]
    data: Calibrated
    method: SelectiveMethod

    @property
    def system(self) -> SelectiveSystem:
        return self.data.system

    @property
    def order(self) -> int:
        return self.system.order

    def over(self, processes: Processes) -> SelectiveLayer:
        return replace(self, data=Calibrated(self.system, self.data.seen.over(processes)))

    def received(self, sent: Any) -> SelectiveCut:
        reduction, lost = sent
        return SelectiveCut(self, reduction.to(self.system.device), None, lost)

    def spectrum(self) -> Float[Tensor, "*channels n"]:
        """Values of the states; what cannot be computed is said with the layer's name."""
        try:
            return self.method.spectrum(self.data)
        except ControlError as error:
            raise CompressionError(f"{self.name or 'the model'}: {error}") from error

    def cut(self, kept: Sequence[Tensor], lost: float) -> SelectiveCut:
        """Onto the states at these places of the spectrum."""
        try:
            reduction = self.method.reduce(self.data, kept)
        except ControlError as error:
            raise CompressionError(f"{self.name or 'the model'}: {error}") from error
        cut = SelectiveCut(self, reduction, None, lost)
        return cut.measured(ratio_of(cut.squared_change()))


@final
@dataclass(frozen=True)
class SelectiveCut(PlannedCut):
    """How the states of one layer become fewer; no bound holds for all that its input may choose."""

    layer: SelectiveLayer
    reduction: Reduction
    measured_error: float | None
    energy_lost: float
    error_bound: float | None = None

    @property
    def rank(self) -> int:
        return self.reduction.order

    @property
    def system(self) -> SelectiveSystem:
        """What the layer becomes."""
        return self.reduction.applied(self.layer.system)

    def change(self) -> Change:
        return self.reduction.change(self.layer.module, self.layer.adapter, self.layer.system)

    def following(self, module: nn.Module, adapter: Adapter[Any, Any]) -> Writing:
        assert isinstance(adapter, SelectiveAdapter)
        return self.reduction.change(module, adapter, adapter.read(module).detach()).writing

    def sent(self) -> Any:
        return self.reduction.to("cpu"), self.energy_lost

    def squared_change(self) -> Float[Tensor, "2"]:
        return squared_change(self.layer.system, self.system, self.layer.data.seen.sample)

    def measured(self, error: float) -> SelectiveCut:
        return replace(self, measured_error=error)


def read_selective(name: str, module: nn.Module, adapter: SelectiveAdapter[Any]) -> SelectiveSystem:
    """A layer as it is now; what is wrong with it is said with its name."""
    try:
        return adapter.read(module).detach()
    except (ControlError, AdapterError) as error:
        raise CompressionError(f"{name or 'the model'}: {error}") from error
