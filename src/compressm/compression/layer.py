"""A layer of a model as it is before a cut, and what a cut of it would be: the same for every kind of layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters import Adapter
from compressm.compression.change import Change, Writing
from compressm.compression.distributed import Processes


class Layer(ABC):
    """A module of a model, as a system."""

    name: str
    module: nn.Module

    @property
    @abstractmethod
    def order(self) -> int:
        """States it has now."""

    @abstractmethod
    def over(self, processes: Processes) -> Layer:
        """With what was seen on all processes."""

    @abstractmethod
    def received(self, sent: Any) -> PlannedCut:
        """The cut that `PlannedCut.sent` gave in another process, for this layer."""


class PlannedCut(ABC):
    """What a cut of one layer would be, and what it costs."""

    layer: Layer
    error_bound: float | None
    measured_error: float | None
    energy_lost: float

    @property
    @abstractmethod
    def rank(self) -> int:
        """States that are left."""

    @abstractmethod
    def change(self) -> Change:
        """Of the layer's module."""

    @abstractmethod
    def following(self, module: nn.Module, adapter: Adapter[Any, Any]) -> Writing:
        """The same change of basis for a module like the layer's own: it stays in the coordinates of that."""

    @abstractmethod
    def sent(self) -> Any:
        """All but the layer, on the CPU."""

    @abstractmethod
    def squared_change(self) -> Float[Tensor, "2"] | None:
        """‖y_new − y_old‖² and ‖y_old‖² on the data that this process saw; None where there was none."""

    @abstractmethod
    def measured(self, error: float) -> PlannedCut:
        """The same with this measured error."""
