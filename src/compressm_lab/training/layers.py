"""Layers by the names that recipes have for them: those of the library, and any class as package.module:Name."""

from __future__ import annotations

import inspect

from compressm.adapters.base import adapter_of
from compressm.compression import savable
from compressm.errors import did_you_mean
from compressm.families import family_of
from compressm.layers import LRU, S4D, S5, Mamba, SSMLayer
from compressm.saving.kinds import is_known
from compressm_lab.data import DataError
from compressm_lab.data.catalogue import imported
from compressm_lab.training.config import ConfigError

LAYERS: dict[str, type[SSMLayer]] = {"LRU": LRU, "S5": S5, "S4D": S4D, "Mamba": Mamba}


def layer_class(name: object) -> type[SSMLayer]:
    """The class of that name; one that is named by its place may from then on be part of saved models."""
    if not isinstance(name, str) or (name not in LAYERS and ":" not in name):
        raise ConfigError(_unknown(str(name)))
    return LAYERS[name] if name in LAYERS else _own(name)


def needs_data(name: str) -> bool:
    """Whether the layer can only be cut by what it does on data: it has no fixed poles and no error bound."""
    adapter = adapter_of(layer_class(name))
    return adapter is not None and family_of(adapter).needs_data


def _own(path: str) -> type[SSMLayer]:
    try:
        kind = imported(path)
    except DataError as error:
        raise ConfigError(str(error)) from error
    if not (isinstance(kind, type) and issubclass(kind, SSMLayer)):
        raise ConfigError(f"it is {kind!r:.80}, expected a class of compressm.layers.SSMLayer")
    if missing := sorted(kind.__abstractmethods__):
        raise ConfigError(f"{kind.__name__} has no {' and no '.join(missing)}, which every SSMLayer has")
    signature = inspect.signature(kind)
    try:
        signature.bind(1, order=1)
    except TypeError as error:
        raise ConfigError(f"{kind.__name__}{signature} is built as (width, order=n): {error}") from None
    return kind if is_known(kind) else savable(kind)


def _unknown(name: str) -> str:
    *first, last = map(repr, LAYERS)
    allowed = f"{', '.join(first)} or {last}, or a class of your own as package.module:Name"
    module, _, kind = name.rpartition(".")
    near = did_you_mean(name, LAYERS) or (f"; did you mean '{module}:{kind}'?" if module else "")
    return f"Input should be {allowed}{near}"
