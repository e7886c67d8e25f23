"""What the pipeline of a cut asks of a layer, whatever its recurrence; a family answers for one kind of recurrence.

How a cut flows, and who answers:

    model                                    found by adapters
      │  Family.read                         once a layer; nothing is read twice
      ▼
    Layer ◄── Observer ── calibrate(model)   Layer.observer, Layer.with_observations
      │  Family.spectra                      σ₁ ≥ σ₂ ≥ …, batched over layers of equal shape
      ▼
    orders                                   the user's policy; the pipeline asks it
      │  Family.plan                         the reduced recurrence, its bound or measured error
      ▼
    PlannedCut                               of several processes the first one's (sent, received)
      │  PlannedCut.change
      ▼
    Change ── Writing                        values, buffers, attributes, added parameters
      │  Change.gradient, Change.update …    moments of the optimizer go the same way
      ▼
    written, or nothing                      compression.surgery, the one place that mutates

The pipeline never asks which family it has. A new one is a class with `@reads(AnAdapter)`; see docs/adding_a_family.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressm.adapters import Adapter, AdapterError
from compressm.control import ControlError, DiagonalSystem
from compressm.errors import CompressionError
from compressm.families.choices import Choices

Values: TypeAlias = Mapping[str, Tensor]
Total: TypeAlias = Callable[[Tensor], Tensor]  # the sum of a tensor over all processes
Kind = TypeVar("Kind", bound="type[Family]")


class Observer(ABC):
    """Watches one layer while the model runs on data."""

    module: nn.Module

    @property
    @abstractmethod
    def name(self) -> str:
        """The layer's name."""

    @property
    @abstractmethod
    def passes(self) -> int:
        """How many forward passes of the layer were observed."""

    @abstractmethod
    def attach(self) -> Sequence[RemovableHandle]:
        """Hang the hooks on the layer; their handles remove them."""


class Layer(ABC):
    """A module of a model, read as a recurrence, and what was observed of it."""

    name: str
    module: nn.Module
    adapter: Any
    system: Any

    @property
    @abstractmethod
    def order(self) -> int:
        """The number of states it has now."""

    @property
    def said(self) -> str:
        """The name that messages use."""
        return self.name or "the model"

    @property
    def linear_system(self) -> DiagonalSystem | None:
        """The system whose Hankel singular values are the spectrum; None where the recurrence is no fixed system."""
        return None

    @abstractmethod
    def observer(self, choices: Choices) -> Observer:
        """An observer that collects what this family needs from a forward pass."""

    @abstractmethod
    def with_observations(self, observer: Any) -> Layer:
        """The layer with what its observer collected."""

    @abstractmethod
    def imagined(self) -> Layer:
        """The layer as if it had observed white noise, for a cut that nobody sees."""

    @abstractmethod
    def over(self, total: Total) -> Layer:
        """The layer with what all processes observed together."""

    @abstractmethod
    def received(self, sent: Any) -> PlannedCut:
        """The cut of this layer that another process has sent."""


class PlannedCut(ABC):
    """A cut of one layer, computed and not yet made, and what it costs."""

    layer: Layer
    error_bound: float | None
    measured_error: float | None
    energy_lost: float

    @property
    @abstractmethod
    def rank(self) -> int:
        """The number of states that are left."""

    @abstractmethod
    def change(self) -> Change:
        """What the cut does to the layer's module."""

    @abstractmethod
    def following(self, module: nn.Module, adapter: Any) -> Writing:
        """The same change of basis for a copy of the module, which then stays in the same coordinates."""

    @abstractmethod
    def sent(self) -> Any:
        """Everything but the layer, on the CPU, for other processes."""

    def squared_change(self) -> Float[Tensor, "2"] | None:
        """‖y_new − y_old‖² and ‖y_old‖² on the data that this process observed; None where there was none."""
        return None

    def measured(self, error: float) -> PlannedCut:
        """The same cut with this measured error."""
        return replace(self, measured_error=error)  # type: ignore[type-var]  # every cut is a dataclass


class Family(ABC):
    """One kind of recurrence: how it is read, what its states are worth, and how it becomes smaller."""

    # How messages call its layers.
    called: ClassVar[str]
    # Whether its layers can only be valued by what they do on data.
    needs_data: ClassVar[bool] = False

    def require_choices(self, names: Sequence[str], choices: Choices) -> None:
        """Refuse what cannot be asked of layers of this family; called before they are read."""
        if self.needs_data and not choices.calibrated:
            raise CompressionError(
                f"{', '.join(name or 'the model' for name in names)}: {self.called} are cut by what they do on data;"
                " pass calibrate, a function that runs the model on data: calibrate=lambda model: model(inputs)"
            )

    @abstractmethod
    def read(self, name: str, module: nn.Module, adapter: Any, choices: Choices) -> Layer:
        """The layer as it is now."""

    def require_layer(self, layer: Any, choices: Choices) -> None:
        """Refuse by name a layer that cannot be cut as asked."""
        return

    def is_bounded(self, choices: Choices) -> bool:
        """Whether 2 Σ of the dropped σ bounds the error of a cut."""
        return False

    def is_by_channel(self, choices: Choices) -> bool:
        """Whether every channel of a layer gets an order of its own."""
        return False

    @abstractmethod
    def spectra(self, layers: Sequence[Any], choices: Choices) -> dict[str, Float[Tensor, "*channels n"]]:
        """The value of every state, falling, by layer name."""

    @abstractmethod
    def plan(
        self,
        layers: Sequence[Any],
        orders: Mapping[str, int | Sequence[int]],
        spectra: Mapping[str, Tensor],
        choices: Choices,
        salt: int,
    ) -> dict[str, PlannedCut]:
        """Cuts to these orders, one a layer or one a channel; layers that need no cut may be left out."""


_FAMILIES: dict[type[Any], Family] = {}


def reads(adapter: Any) -> Callable[[Kind], Kind]:
    """Say that the decorated family reads layers whose adapters are of this class."""
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        raise AdapterError(f"@reads takes a class of adapters, got {adapter!r}")

    def register(family: Kind) -> Kind:
        _FAMILIES[adapter] = family()
        return family

    return register


def family_of(adapter: Adapter[Any, Any]) -> Family:
    """The family that reads layers with this adapter."""
    for kind in type(adapter).__mro__:
        if kind in _FAMILIES:
            return _FAMILIES[kind]
    known = ", ".join(kind.__name__ for kind in _FAMILIES)
    raise AdapterError(f"no family reads {adapter}: expected a subclass of {known}, or a family with @reads")


def read_layer(name: str, module: nn.Module, adapter: Adapter[Any, Any], choices: Choices) -> Layer:
    """A module as a layer of its family; what is wrong with it is said with its name."""
    absent = [entry for entry, parameter in module.named_parameters() if parameter.is_meta]
    if absent:
        raise CompressionError(
            f"{name or 'the model'}: {', '.join(absent)} are on the meta device, expected values: use to_empty and load"
            " them first"
        )
    try:
        return family_of(adapter).read(name, module, adapter, choices)
    except (ControlError, AdapterError) as error:
        raise CompressionError(f"{name or 'the model'}: {error}") from error


def energy_lost(sigma: Float[Tensor, "*channels n"], kept: Tensor) -> float:
    """The share of Σσ that goes with the states that are not kept."""
    dropped = torch.ones(sigma.shape[-1], dtype=torch.bool)
    dropped[kept] = False
    whole = float(sigma.sum())
    return float(sigma.cpu()[..., dropped].sum()) / whole if whole > 0 else 0.0


@final
@dataclass(frozen=True)
class Writing:
    """What a cut writes to a module: values of parameters and buffers by name, and attributes by path.

    `added` names parameters that the module does not have yet, each with the one that it joins: in the optimizer's
    groups, and in all that is said of a parameter.
    """

    values: Values
    buffers: Values = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    added: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Module, adapter: Adapter[Any, Any], system: Any, order: int) -> Writing:
        """Everything that makes the module compute this system, as its adapter encodes it."""
        values = adapter.encode(module, system)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        added = {name: adapter.JOINS[name] for name in values if name in adapter.JOINS and name not in parameters}
        return cls(values, adapter.buffers(module, system), adapter.attributes(module, order), added)


class Change(ABC):
    """A module as it still is, what will be written to it, and how moments of its parameters follow.

    Moments come by parameter name, in float64, as those of old values and leave as those of new ones; a name left out
    counts as zeros.
    """

    module: nn.Module
    writing: Writing

    @property
    def values(self) -> Values:
        """The parameters' values afterwards."""
        return self.writing.values

    @property
    @abstractmethod
    def resized(self) -> Sequence[str]:
        """The parameters with an axis of states: their moments have to follow."""

    @abstractmethod
    def gradient(self, moments: Values) -> dict[str, Tensor]:
        """Means of gradients: covectors, pulled back."""

    @abstractmethod
    def gradient_squares(self, squares: Values) -> dict[str, Tensor]:
        """Means of squared gradients, if no two parameters vary together."""

    @abstractmethod
    def update(self, moments: Values) -> dict[str, Tensor]:
        """Steps in the new parameters from steps in the old ones: vectors, pushed forward."""

    @abstractmethod
    def update_squares(self, squares: Values) -> dict[str, Tensor]:
        """Squared steps."""

    @abstractmethod
    def first(self, name: str, moment: Tensor) -> Tensor:
        """The entries of the first states, as many as stay, whatever became of those."""
