"""Models and their arguments as JSON values and back; only our classes and `savable` ones are ever built."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path as FilePath
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from compressm import models
from compressm.adapters import AdapterError
from compressm.adapters import transformers as foreign
from compressm.adapters.base import COMPILED
from compressm.compression.sharding import require_whole
from compressm.errors import SavingError
from compressm.layers import IM, LRU, S4, S4D, S5, ZOH, Bilinear, DampedIMEX, Inv, Legs, Lin, LinOSS, Mamba
from compressm.layers.base import arguments_of, keeps_arguments
from compressm.models.block import RandomMask
from compressm.models.normalisation import PaddedBatchNorm, PaddedRunningNorm, StepNorm, StepRMSNorm, Unchanged
from compressm.ops import Path
from compressm.ops.selective import ScanPath

Kind = TypeVar("Kind", bound=type[Any])
Stored: TypeAlias = Any  # what JSON can hold

_OURS: tuple[type[Any], ...] = (
    *(LRU, S4, S4D, S5, LinOSS, Mamba, ZOH, Bilinear, Inv, Legs, Lin, IM, DampedIMEX, Path, ScanPath),
    *(models.SequenceClassifier, models.LanguageModel, models.PerElement, models.OneMask),
    *(models.BatchNorm, models.RunningNorm, models.LayerNorm, models.RMSNorm, models.NoNorm),
    *(models.MeanPooling, models.LastStep, models.EveryStep),
)
# Common modules of torch, and the attributes that are their arguments.
_BY_ATTRIBUTES: Mapping[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("in_features", "out_features"),
    nn.Embedding: ("num_embeddings", "embedding_dim"),
    nn.LayerNorm: ("normalized_shape", "eps", "elementwise_affine"),
    nn.Dropout: ("p",),
    nn.GELU: ("approximate",),
    **dict.fromkeys((nn.Identity, nn.ReLU, nn.SiLU, nn.Tanh), ()),
    # The parts of our blocks.
    PaddedBatchNorm: ("num_features", "eps", "momentum", "affine"),
    PaddedRunningNorm: ("num_features", "eps", "momentum", "affine", "through"),
    StepNorm: ("normalized_shape", "eps", "elementwise_affine"),
    StepRMSNorm: ("normalized_shape", "eps", "elementwise_affine"),
    Unchanged: (),
    RandomMask: ("rate", "shared"),
}
# Options that came later, with their defaults, at which files leave them out: earlier versions read these files.
_LATER: dict[type[Any], dict[str, object]] = {
    models.SequenceClassifier: {"gelu": "exact"},
    models.RunningNorm: {"through": False},
    PaddedRunningNorm: {"through": False},
}
_WITH_BIAS = (nn.Linear, nn.LayerNorm)
# Built with placeholders for their children, which are then replaced like any module.
_OF_CHILDREN: tuple[type[nn.Module], ...] = (nn.Sequential, models.Block, models.MixerBlock)
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (*_BY_ATTRIBUTES, *_OF_CHILDREN, *_OURS)}
_KINDS["nn.LayerNorm"] = nn.LayerNorm  # one of ours has that name

# The errors of constructors that refuse their arguments.
_REFUSALS = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ArithmeticError)


def as_path(path: object) -> FilePath:
    """The path of a file or folder that can exist."""
    expected = "expected the path of a file or folder, as text or a pathlib.Path"
    if not isinstance(path, str | os.PathLike) or not (text := os.fspath(path)) or not isinstance(text, str):
        raise SavingError(f"path is {path!r:.100}, {expected}")
    try:
        os.lstat(text)
    except FileNotFoundError:
        return FilePath(text)
    except (OSError, ValueError) as error:
        # Too long a name, a name with a null character, a file where a folder should be.
        raise SavingError(f"path is {text!r:.100}, {expected}: {getattr(error, 'strerror', None) or error}") from None
    return FilePath(text)


def unreadable(path: FilePath, error: OSError) -> SavingError:
    """The error of a file that the system does not let be read."""
    return SavingError(f"{path} cannot be read: {error.strerror or error}; expected an ordinary file that you may read")


def require_state(name: str, part: object) -> None:
    """Require something with a state to save and restore, or None."""
    stateful = all(callable(getattr(part, method, None)) for method in ("state_dict", "load_state_dict"))
    if part is not None and (isinstance(part, type) or not stateful):
        raise SavingError(f"{name} is {part!r:.100}, expected an object with state_dict and load_state_dict, or None")


def require_model(model: object) -> None:
    """Refuse anything but a model of Python modules."""
    if not isinstance(model, nn.Module):
        raise SavingError(f"model is a {type(model).__name__}, expected an nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise SavingError(COMPILED.format(model.original_name))
    require_whole("the model", model, SavingError)


def savable(kind: Kind) -> Kind:
    """Allow files to name this class: your own module, frozen dataclass or Enum.

    A module then stores the arguments of its constructor, which must run under `torch.device("meta")`. Files hold only
    the name of the class: import it before you load them.
    """
    if not (isinstance(kind, type) and (issubclass(kind, nn.Module | Enum) or is_dataclass(kind))):
        raise SavingError(f"@savable takes a class of nn.Module, a dataclass or an Enum, got {kind!r}")
    if issubclass(kind, nn.Module):
        keeps_arguments(kind)
    _KINDS[f"{kind.__module__}.{kind.__qualname__}"] = kind
    return kind


def encode(value: object, where: str) -> Stored:
    """The value in JSON's types: an object as its kind and arguments, a class as its name."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float) and not isinstance(value, Enum):
        return _finite(value, where)
    if isinstance(value, list | tuple):
        return [encode(item, f"{where}[{k}]") for k, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _named(value, where)
    if isinstance(value, type):
        return {"class": _name_of(value, value, where)}
    name, later = _name_of(type(value), value, where), _LATER.get(type(value), {})
    given = {key: one for key, one in _arguments(value, where).items() if key not in later or one != later[key]}
    return {"kind": name} | _named(given, name)


def decode(stored: Stored, where: str) -> Any:
    """The value of these JSON types; objects are built again."""
    if isinstance(stored, list):
        return [decode(item, f"{where}[{k}]") for k, item in enumerate(stored)]
    if not isinstance(stored, dict):
        return stored
    if set(stored) == {"class"}:
        return _kind_of(stored["class"], where)
    values = {name: decode(value, name) for name, value in stored.items() if name != "kind"}
    if "kind" not in stored:
        return values
    kind = _builder_of(stored["kind"], where)
    try:
        if kind is nn.Sequential:
            return nn.Sequential(OrderedDict((name, nn.Identity()) for name in values["names"]))
        is_enum = isinstance(kind, type) and issubclass(kind, Enum)
        return kind[values["name"]] if is_enum else kind(**values)
    except _REFUSALS as error:
        raise SavingError(f"{where} cannot be built: {stored!r:.200} gives {type(error).__name__}: {error}") from error


def is_known(kind: type[Any]) -> bool:
    """True if files may name the class."""
    return kind in _KINDS.values()


def is_known_by_arguments(kind: type[Any]) -> bool:
    """True if the class's arguments describe it completely; other classes also need their children."""
    return is_known(kind) and kind not in _OF_CHILDREN


def _arguments(value: Any, where: str) -> Mapping[str, object]:
    """The arguments of the object's constructor, by name."""
    if isinstance(value, Enum):
        return {"name": value.name}
    if type(value) in _BY_ATTRIBUTES:
        given = {name: getattr(value, name) for name in _BY_ATTRIBUTES[type(value)]}
        return given | {"bias": value.bias is not None} if isinstance(value, _WITH_BIAS) else given
    if type(value) is nn.Sequential:
        return {"names": list(value._modules)}
    if isinstance(value, models.ResidualBlock):
        return {"mixer": value.ssm}
    if foreign.kind_name(type(value)) is not None:
        return foreign.arguments_of(value)
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    kept = arguments_of(value)
    if kept is None:
        raise SavingError(
            f"{where} is a {type(value).__name__} that was built before its class was savable: decorate the class"
        )
    return kept


def _named(values: Mapping[Any, object], where: str) -> dict[str, Stored]:
    odd = [name for name in values if not isinstance(name, str) or name in ("kind", "class")]
    if odd:
        raise SavingError(f"{where} has the key {odd[0]!r}, expected text other than 'kind' and 'class'")
    return {name: encode(value, f"{where}.{name}" if where else name) for name, value in values.items()}


def _finite(value: int | float, where: str) -> int | float:
    if not math.isfinite(value):
        raise SavingError(f"{where} is {value}, expected a finite number")
    return int(value) if isinstance(value, int) else float(value)


def _name_of(kind: type[Any], value: object, where: str) -> str:
    name = next((name for name, known in _KINDS.items() if known is kind), foreign.kind_name(kind))
    if name is None:
        shown = f"a {type(value).__name__}" if isinstance(value, nn.Module) else f"{value!r:.80}"
        cure = (
            "decorate it with @compressm.compression.savable (of a class that is not yours, a subclass), or save "
            "model.state_dict() with safetensors and build the model yourself"
        )
        if kind.__module__.partition(".")[0] == foreign.PACKAGE:
            # A subclass does not help: its config is no class that files may name either.
            cure = (
                "call model.save_pretrained(...), if all layers have one order, or save_checkpoint(path, model=model);"
                " load_checkpoint(path, model=...) reads that into a new model of the first config"
            )
        raise SavingError(
            f"{where} is {shown}, and {kind.__module__}.{kind.__qualname__} is no class that files may name: {cure}"
        )
    return name


def _builder_of(name: object, where: str) -> Any:
    """A class, or the function that builds a model of another package."""
    try:
        found = foreign.builder(name) if isinstance(name, str) and name not in _KINDS else None
    except AdapterError as error:
        raise SavingError(f"{where}: {error}") from None
    return _kind_of(name, where) if found is None else found


def _kind_of(name: object, where: str) -> type[Any]:
    if not isinstance(name, str) or name not in _KINDS:
        raise SavingError(
            f"{where} is of the kind {name!r:.80}, which is not known here: import what defines it, with "
            f"@compressm.compression.savable, before loading; known are {', '.join(sorted(_KINDS))}"
        )
    return _KINDS[name]
