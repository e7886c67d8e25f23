"""The model of a recipe: layers and factories by name, and the options of our own classifier."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, final, get_args

from torch import nn

from compressm.adapters.base import adapter_of
from compressm.compression import savable
from compressm.errors import did_you_mean
from compressm.families import family_of
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba, SSMLayer
from compressm.saving.kinds import is_known
from compressm_lab.data import DataError
from compressm_lab.data.catalogue import imported

LAYERS: dict[str, type[SSMLayer]] = {"LRU": LRU, "S5": S5, "S4": S4, "S4D": S4D, "LinOSS": LinOSS, "Mamba": Mamba}


class ConfigError(ValueError):
    """A recipe that cannot be run."""


def layer_class(name: object) -> type[SSMLayer]:
    """The layer class that a recipe names, ours or package.module:Name; the latter may then be part of saved models."""
    if isinstance(name, str) and name in LAYERS:
        return LAYERS[name]
    if not isinstance(name, str) or ":" not in name:
        *first, last = map(repr, LAYERS)
        module, _, kind = str(name).rpartition(".")
        near = did_you_mean(str(name), LAYERS) or (f"; did you mean '{module}:{kind}'?" if module else "")
        raise ConfigError(f"expected {', '.join(first)} or {last}, or a class of your own as package.module:Name{near}")
    try:
        found = imported(name)
    except DataError as error:
        raise ConfigError(str(error)) from error
    if not (isinstance(found, type) and issubclass(found, SSMLayer)):
        raise ConfigError(f"it is {found!r:.80}, expected a class of compressm.layers.SSMLayer")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"{found.__name__} has no {' and no '.join(missing)}, which every SSMLayer has")
    signature = inspect.signature(found)
    try:
        signature.bind(1, order=1)
    except TypeError as error:
        raise ConfigError(f"{found.__name__}{signature} is built as (width, order=n): {error}") from None
    return found if is_known(found) else savable(found)


def model_factory(name: object) -> Callable[..., Any]:
    """The function or class of package.module:name that builds models, of which a class may be part of saved models."""
    if not isinstance(name, str):
        raise ConfigError(f"it is {name!r:.80}, expected a function of your own as package.module:name")
    try:
        found = imported(name)
    except DataError as error:
        raise ConfigError(str(error)) from error
    if not callable(found) or (isinstance(found, type) and not issubclass(found, nn.Module)):
        raise ConfigError(f"it is {found!r:.80}, expected a function that returns a model, or a class of nn.Module")
    if "order" not in inspect.signature(found).parameters:
        raise ConfigError(f"{found.__name__}{inspect.signature(found)} does not take order, the states of each layer")
    return savable(found) if isinstance(found, type) and not is_known(found) else found


def needs_data(name: str) -> bool:
    """Tell if a layer can only be cut with data, as selective layers: it has no fixed poles and no error bound."""
    adapter = adapter_of(layer_class(name))
    return adapter is not None and family_of(adapter).needs_data


def has_poles(name: str) -> bool:
    """Tell if a layer has fixed poles, as penalties need, or no adapter that could say so."""
    adapter = adapter_of(layer_class(name))
    return adapter is None or family_of(adapter).has_poles


@dataclass(frozen=True, kw_only=True)
class Config:
    """A part of a recipe; an unknown key in a file is an error."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    def _at_least(self, low: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            # Comparisons, because math.isfinite fails for integers that no float holds.
            if value is not None and not low <= value < math.inf:
                finite = "" if -math.inf < value < math.inf else "a finite number, "
                raise ConfigError(f"{name} is {value}, expected {finite}at least {low}")

    def _at_most(self, high: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value > high:
                said = f"{value:.6g}" if value < 1e300 else "above 1e300"
                raise ConfigError(f"{name} is {said}, expected at most {high:,}")

    def _share(self, *names: str, above: bool = False, up_to_one: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            if not ((value > 0 if above else value >= 0) and (value <= 1 if up_to_one else value < 1)):
                low, high = "above 0" if above else "at least 0", "at most 1" if up_to_one else "below 1"
                raise ConfigError(f"{name} is {value}, expected a number {low} and {high}")


@dataclass(frozen=True)
class _Named:
    """A validator that lets pydantic report a wrong layer or factory at its key."""

    find: Callable[[Any], object]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import PydanticCustomError, core_schema

        def checked(name: object) -> object:
            try:
                if name is not None or type(None) not in get_args(source):
                    self.find(name)
            except ConfigError as error:
                raise PydanticCustomError("layer", "{problem}", {"problem": str(error)}) from error
            return name

        return core_schema.no_info_plain_validator_function(checked)


@final
@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """A `SequenceClassifier`; its inputs and classes are those of the task.

    factory: "package.module:name" builds another model. It is called with those of inputs, vocabulary, classes, length,
    depth, width and order that it names, and with `options`; the other keys are not for it.
    layer: LRU, S5, S4, S4D, LinOSS, Mamba, or your own class, "package.module:Name", that is built as (width, order=n).
    dropout_form: "batch" is one mask for the whole batch, as in the paper's own code, "element" one for every element.
    pooling: "steps" keeps every step, for tasks that ask at each of them.
    gelu: "tanh" is the approximation in the paper's own code; by default it is exact.
    """

    depth: int
    width: int
    order: int
    layer: Annotated[str, _Named(layer_class)] = "LRU"
    layer_options: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.1
    dropout_form: Literal["element", "batch"] = "batch"
    norm: Literal["batch", "running", "layer", "rms", "none"] = "batch"
    norm_options: dict[str, Any] = field(default_factory=dict)
    pooling: Literal["mean", "last", "steps"] = "mean"
    gelu: Literal["exact", "tanh"] | None = None  # runs of earlier versions have no such key
    factory: Annotated[str | None, _Named(model_factory)] = None
    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._at_least(1, "depth", "width", "order")
        self._at_most(10_000, "depth")
        self._at_most(10_000_000, "width", "order")
        self._share("dropout")
        if self.factory is None and self.options is not None:
            raise ConfigError(
                "options are for factory, which is not set: layer_options and norm_options are for layers"
            )
        if self.factory is not None:
            self._require_factory()
            return
        try:
            layer_class(self.layer)
        except ConfigError as error:
            raise ConfigError(f"layer is {self.layer!r}: {error}") from error

    def _require_factory(self) -> None:
        """Refuse keys that only our own model has, and a factory that cannot be had."""
        ours = ("layer", "layer_options", "dropout", "dropout_form", "norm", "norm_options", "pooling", "gelu")
        for key in fields(self):
            usual = key.default if key.default_factory is MISSING else key.default_factory()
            if key.name in ours and (value := getattr(self, key.name)) != usual:
                raise ConfigError(f"{key.name} is {value!r} with factory, which does not take it: put it into options")
        try:
            model_factory(self.factory or "")
        except ConfigError as error:
            raise ConfigError(f"factory is {self.factory!r}: {error}") from error

    @property
    def selective(self) -> bool:
        """True if its layers can only be cut with data; a model of a factory tells it once it is built."""
        return self.factory is None and needs_data(self.layer)
