"""What a cut writes to a module, and what it does to everything that an optimizer has learned about its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters import Adapter
from compressm.compression.distributed import Processes

Values: TypeAlias = Mapping[str, Tensor]


@final
@dataclass(frozen=True)
class Writing:
    """New values of parameters, by name; new buffers; and attributes by path, as {"config.state_size": 8}.

    `added` names parameters that the module does not have yet, each with the one that it joins: in the optimizer's
    groups, and in all that is said of a parameter.
    """

    values: Values
    buffers: Values = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    added: Mapping[str, str] = field(default_factory=dict)


class Change(ABC):
    """A module as it still is, what will be written to it, and how moments of its parameters go along.

    Moments come by parameter name, in float64, as those of old values and leave as those of new ones; a name left out
    counts as zeros.
    """

    module: nn.Module
    writing: Writing

    @property
    def values(self) -> Values:
        """Of the parameters, afterwards."""
        return self.writing.values

    @property
    @abstractmethod
    def resized(self) -> Sequence[str]:
        """The parameters with an axis of states: their moments have to follow."""

    @abstractmethod
    def gradient(self, moments: Values) -> dict[str, Tensor]:
        """Means of gradients."""

    @abstractmethod
    def gradient_squares(self, squares: Values) -> dict[str, Tensor]:
        """Means of their squares, if no two parameters vary together."""

    @abstractmethod
    def update(self, moments: Values) -> dict[str, Tensor]:
        """Steps in the new parameters from steps in the old ones."""

    @abstractmethod
    def update_squares(self, squares: Values) -> dict[str, Tensor]:
        """Squares of those."""

    @abstractmethod
    def first(self, name: str, moment: Tensor) -> Tensor:
        """The entries of the first states, as many as stay, whatever became of those."""


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
