"""The protocol of a family: everything that the pipeline of a cut asks about one kind of recurrence.

The steps of a cut, and the methods that answer:

    model                                    found by adapters
      │  Family.read                         once a layer; nothing is read twice
      ▼
    Layer ◄── Observer ── calibrate(model)   Layer.observer, Layer.with_observations
      │  Family.spectra                      σ₁ ≥ σ₂ ≥ …, batched over layers of equal shape
      ▼
    orders                                   chosen by the user's policy
      │  Family.plan                         the reduced recurrence, its bound or measured error
      ▼
    PlannedCut                               sent by the first of several processes, received by others
      │  PlannedCut.change
      ▼
    Change ── Writing                        values, buffers, attributes, added parameters
      │  Change.gradient, Change.update …    the optimizer's moments, in the same basis
      ▼
    all written, or nothing                  compression.surgery, the only place that mutates

The pipeline never asks which family it has. A new family is a class with `@reads(AnAdapter)`: docs/adding_a_family.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressm.adapters import Adapter, AdapterError
from compressm.adapters.base import encode_with
from compressm.control import ControlError, DiagonalSystem, validation
from compressm.errors import CompressionError
from compressm.families.choices import Choices
from compressm.layers.base import StateMap

Values: TypeAlias = Mapping[str, Tensor]
Total: TypeAlias = Callable[[Tensor], Tensor]  # the sum of a tensor over all processes
Kind = TypeVar("Kind", bound="type[Family]")


class Observer(ABC):
    """An observer of one layer while the model runs on data."""

    module: nn.Module

    @property
    @abstractmethod
    def name(self) -> str:
        """The layer's name."""

    @property
    @abstractmethod
    def passes(self) -> int:
        """The number of observed forward passes of the layer."""

    @abstractmethod
    def attach(self) -> Sequence[RemovableHandle]:
        """Register hooks on the layer; the handles remove them."""


class Layer(ABC):
    """A module of a model, read as a recurrence, with its observations."""

    name: str
    module: nn.Module
    adapter: Any
    system: Any

    @property
    @abstractmethod
    def order(self) -> int:
        """The present number of states."""

    @property
    def said(self) -> str:
        """The layer's name in messages."""
        return self.name or "the model"

    @property
    def why_zero(self) -> str:
        """The reason why all values of its states are zero, if they are."""
        return "no state connects an input with an output"

    @property
    def linear_system(self) -> DiagonalSystem | None:
        """The system whose Hankel singular values are the spectrum; None if the recurrence is not a fixed system."""
        return None

    @abstractmethod
    def observer(self, choices: Choices) -> Observer:
        """An observer that collects what this family needs from forward passes."""

    @abstractmethod
    def with_observations(self, observer: Any) -> Layer:
        """The layer with its observer's observations."""

    @abstractmethod
    def imagined(self) -> Layer:
        """The layer as if white noise had been observed, for a rehearsal that changes nothing."""

    def observing_noise(self, choices: Choices) -> Layer | None:
        """The layer with observations of white noise, which an observer has really made; None if it can do without.

        It loads what a calibration needs beside the model's own work.
        """
        return None

    @abstractmethod
    def over(self, total: Total) -> Layer:
        """The layer with the observations of all processes together."""

    @abstractmethod
    def received(self, sent: Any) -> PlannedCut:
        """The cut of this layer that another process sent."""

    def state_bytes(self, order: int) -> int:
        """The bytes that the state of one sequence takes after a cut to this order."""
        return int(self.adapter.state_bytes(self.module, order))

    def state_parameters(self) -> int:
        """The number of parameters that the layer loses with every state that is cut."""
        return int(self.adapter.state_parameters(self.module))

    def compared_forms(self, order: int) -> list[ComparedForm]:
        """The forms in which a cut to this order could be kept, each with its error; empty if there is no choice."""
        return []


@final
@dataclass(frozen=True)
class ComparedForm:
    """A form of a cut, its measured error, the estimate from the spectrum or None, and whether the layer can store it.

    The error is ‖y_new − y_old‖ / ‖y_old‖ of the layer's output without its skip, on sequences that no fit has seen.
    """

    form: Any
    error: float
    estimate: float | None
    storable: bool


class PlannedCut(ABC):
    """A cut of one layer, computed and not yet made, with its error."""

    layer: Layer
    error_bound: float | None
    measured_error: float | None
    energy_lost: float

    @property
    @abstractmethod
    def rank(self) -> int:
        """The number of states that stay."""

    @abstractmethod
    def change(self) -> Change:
        """The change of the layer's module."""

    @classmethod
    def changes(cls, cuts: Sequence[Any]) -> list[Change]:
        """The changes of several cuts of this class; a family may compute them together."""
        return [cut.change() for cut in cuts]

    @abstractmethod
    def following(self, module: nn.Module, adapter: Any) -> Writing:
        """The same change of basis for a copy of the module, so that both keep the same coordinates."""

    def state_map(self, module: nn.Module, adapter: Any, values: Values) -> StateMap | None:
        """The map of streamed states, for the module or a copy of it that gets these values; None if there is none."""
        return None

    @abstractmethod
    def sent(self) -> Any:
        """Everything except the layer, on the CPU, for other processes."""

    def squared_change(self) -> Float[Tensor, "2"] | None:
        """‖y_new − y_old‖² and ‖y_old‖² on the data that this process observed; None without data."""
        return None

    def measured(self, error: float) -> PlannedCut:
        """The same cut with this measured error."""
        return replace(self, measured_error=error)  # type: ignore[type-var]  # every cut is a dataclass


class Family(ABC):
    """One kind of recurrence: how to read it, how to value its states, and how to reduce it."""

    # The name of its layers in messages.
    called: ClassVar[str]
    # True if its states can only be valued on data.
    needs_data: ClassVar[bool] = False
    # True if its layers have fixed poles, which penalties on a spectrum need.
    has_poles: ClassVar[bool] = False
    # Options of a cut that families may leave unused; the compressor warns about those that no layer uses.
    uses: ClassVar[frozenset[str]] = frozenset({"fold", "form", "selective"})

    def overrules_gramian(self, choices: Choices) -> bool:
        """True if another choice decides whether Gramians are measured, against `gramian`."""
        return False

    def require_choices(self, names: Sequence[str], choices: Choices) -> None:
        """Refuse choices that make no sense for layers of this family; called before layers are read."""
        if self.needs_data and not choices.calibrated:
            raise CompressionError(
                f"{', '.join(name or 'the model' for name in names)}: {self.called} can only be inspected and cut with"
                " data; pass calibrate, a function that runs the model on data: calibrate=lambda model: model(inputs)"
            )

    @abstractmethod
    def read(self, name: str, module: nn.Module, adapter: Any, choices: Choices) -> Layer:
        """The module as a layer of this family."""

    def require_layer(self, layer: Any, choices: Choices) -> None:
        """Refuse by name a layer that cannot be cut with these choices."""
        return

    def is_bounded(self, choices: Choices) -> bool:
        """True if 2 Σ of the dropped σ bounds the error of a cut."""
        return False

    def is_by_channel(self, choices: Choices) -> bool:
        """True if every channel of a layer gets its own order."""
        return False

    @abstractmethod
    def spectra(self, layers: Sequence[Any], choices: Choices) -> dict[str, Float[Tensor, "*channels n"]]:
        """The values of the states by layer name, in falling order."""

    @abstractmethod
    def plan(
        self,
        layers: Sequence[Any],
        orders: Mapping[str, int | Sequence[int]],
        spectra: Mapping[str, Tensor],
        choices: Choices,
        salt: int,
    ) -> dict[str, PlannedCut]:
        """Cuts to these orders, one per layer or one per channel; layers that need no cut may be left out."""


class SeparateFamily(Family):
    """A family that plans the cut of every layer by itself."""

    @abstractmethod
    def planned(self, layer: Any, order: Any, sigma: Tensor, choices: Choices, salt: int) -> PlannedCut | None:
        """The cut of a layer with this spectrum to this order, or to one for each channel; None if it needs none."""

    def plan(
        self,
        layers: Sequence[Any],
        orders: Mapping[str, int | Sequence[int]],
        spectra: Mapping[str, Tensor],
        choices: Choices,
        salt: int,
    ) -> dict[str, PlannedCut]:
        names = [(layer, layer.name) for layer in layers]
        cuts = {name: self.planned(layer, orders[name], spectra[name], choices, salt) for layer, name in names}
        return {name: cut for name, cut in cuts.items() if cut is not None}


_FAMILIES: dict[type[Any], Family] = {}


def reads(adapter: Any) -> Callable[[Kind], Kind]:
    """Register the decorated family for layers whose adapters are of this class."""
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        raise AdapterError(f"@reads takes a class of adapters, got {adapter!r}")

    def register(family: Kind) -> Kind:
        if not (isinstance(family, type) and issubclass(family, Family)):
            raise AdapterError(f"@reads({adapter.__name__}) decorates a subclass of Family, got {family!r}")
        if missing := sorted(family.__abstractmethods__):
            raise AdapterError(f"{family.__name__} has no {' and no '.join(missing)}: define what is missing")
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
    """A module as a layer of its family; errors name it."""
    if not isinstance(module, nn.Module):
        raise CompressionError(f"{name or 'the model'} is a {type(module).__name__}, expected an nn.Module")
    absent = [entry for entry, parameter in module.named_parameters() if parameter.is_meta]
    if absent:
        raise CompressionError(
            f"{name or 'the model'}: {', '.join(absent)} are on the meta device, expected values: call to_empty and"
            " load them first"
        )
    try:
        return family_of(adapter).read(name, module, adapter, choices)
    except (ControlError, AdapterError) as error:
        raise CompressionError(f"{name or 'the model'}: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # shapes that do not fit, a dtype that torch cannot compute with
        held = ", ".join(
            f"{key} {str(p.dtype).split('.')[-1]} {tuple(p.shape)}" for key, p in module.named_parameters()
        )
        raise CompressionError(f"{name or 'the model'}: {adapter} cannot read {held}: {error}") from error


def energy_lost(sigma: Float[Tensor, "*channels n"], kept: Tensor) -> float:
    """The share of Σσ that the dropped states have."""
    try:
        validation.require_finite("sigma", validation.require_tensor("sigma", sigma, "n"))
        validation.require_tensor("kept", kept, "r")
    except ControlError as error:
        raise CompressionError(f"energy_lost: {error}") from error
    dropped = torch.ones(sigma.shape[-1], dtype=torch.bool, device="cpu")
    dropped[kept] = False
    whole = float(sigma.sum())
    return float(sigma.cpu()[..., dropped].sum()) / whole if whole > 0 else 0.0


@final
@dataclass(frozen=True)
class Writing:
    """Everything that a cut writes to a module: values of parameters and buffers by name, and attributes by path.

    `added` names parameters that the module does not have yet, each with the parameter whose optimizer group, dtype and
    marks it gets.
    """

    values: Values
    buffers: Values = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    added: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    @torch.no_grad()
    def of(
        cls, module: nn.Module, adapter: Adapter[Any, Any], system: Any, order: int, values: Values | None = None
    ) -> Writing:
        """Everything that makes the module compute this system; `values`, if given, are those that encode it."""
        values = encode_with(adapter, module, {}, system) if values is None else values
        parameters = dict(module.named_parameters(remove_duplicate=False))
        added = {name: adapter.JOINS[name] for name in values if name in adapter.JOINS and name not in parameters}
        return cls(values, adapter.buffers(module, system), adapter.attributes(module, order), added)


class Change(ABC):
    """A module before the cut, the values that will be written, and maps from old moments to new ones.

    Moments are in float64, by parameter name; a name that is left out counts as zeros.
    """

    module: nn.Module
    writing: Writing

    @property
    def values(self) -> Values:
        """The parameters' new values."""
        return self.writing.values

    @property
    def stacking_key(self) -> Hashable | None:
        """Changes of one class with the same key can be carried `together`; None if this one cannot."""
        return None

    @classmethod
    def together(cls, changes: Sequence[Any]) -> Change:
        """Several changes with the same key as one, whose values and moments have one more axis, the first.

        If their orders differ, all have the largest; entries beyond a module's own are left out later. On a GPU the
        host waits for launches: those for all layers then take as long as those for one.
        """
        raise NotImplementedError

    @property
    @abstractmethod
    def resized(self) -> Sequence[str]:
        """The parameters with an axis of states, whose moments must change too."""

    @abstractmethod
    def gradient(self, moments: Values) -> dict[str, Tensor]:
        """Pull means of gradients back: they are covectors."""

    @abstractmethod
    def gradient_squares(self, squares: Values) -> dict[str, Tensor]:
        """Map means of squared gradients, if no two parameters vary together."""

    @abstractmethod
    def update(self, moments: Values) -> dict[str, Tensor]:
        """Push updates of the parameters forward: they are vectors."""

    @abstractmethod
    def update_squares(self, squares: Values) -> dict[str, Tensor]:
        """Map means of squared updates."""

    @abstractmethod
    def first(self, name: str, moment: Tensor) -> Tensor:
        """The entries of the first r states, without a change of basis."""
