"""Models of transformers as plain values, and models built from these with every layer at its order."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from compressm.adapters.base import Adapter, adapter_for
from compressm.adapters.transformers.config import MAPS, PACKAGE, set_state_sizes_, state_sizes
from compressm.adapters.transformers.mamba import MixerAdapter
from compressm.adapters.transformers.mapped import MappedAdapter
from compressm.errors import AdapterError

# Building more would take minutes.
_MOST_LAYERS = 10_000

# The families of models that can be built again, with the config's name of the order. Other hybrid models have buffers
# that their files lack, or other names there: their maps are loaded by `load_checkpoint`.
SIZES = {
    **dict.fromkeys(("mamba", "falcon_mamba", "mamba2"), "state_size"),
    **dict.fromkeys(("jamba", "zamba2"), "mamba_d_state"),
}
MODELS = tuple(name.title().replace("_", "") + part for name in SIZES for part in ("Model", "ForCausalLM"))
_FILES = {f"{PACKAGE}.models.{name}.modeling_{name}" for name in SIZES}


def kind_name(kind: type[Any]) -> str | None:
    """The name of a supported class in files; None for other classes."""
    return f"{PACKAGE}.{kind.__name__}" if kind.__module__ in _FILES and kind.__name__ in MODELS else None


def arguments_of(model: Any) -> dict[str, Any]:
    """The arguments to build the model from, as JSON types: its config and, if it generates, its generation config."""
    arguments = {"config": json.loads(model.config.to_json_string())}
    if model.can_generate():
        arguments["generation_config"] = json.loads(model.generation_config.to_json_string())
    if model.is_gradient_checkpointing:
        arguments["gradient_checkpointing"] = True
    return arguments


def builder(name: str) -> Callable[..., nn.Module] | None:
    """The function that builds models of that name, None for names outside transformers, which must be imported."""
    owner, _, kind = name.rpartition(".")
    if owner != PACKAGE:
        return None
    if kind not in MODELS:
        raise AdapterError(f"{name} is not supported, expected {', '.join(MODELS[:-1])} or {MODELS[-1]} of {PACKAGE}")
    package = sys.modules.get(PACKAGE)
    if package is None:
        raise AdapterError(f"{name} belongs to {PACKAGE}, which is not imported: import {PACKAGE} first")
    return functools.partial(_build, package, getattr(package, kind))


def _build(
    package: Any,
    kind: Any,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    gradient_checkpointing: bool = False,
) -> nn.Module:
    """Build the model as its class does, then give each mixer its order from the config."""
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int | float) and layers > _MOST_LAYERS:
        raise AdapterError(f"the config has {layers} layers, expected at most {_MOST_LAYERS}")
    parsed = _parsed(kind, config)
    size, maps = SIZES[parsed.model_type], parsed.to_dict().get(MAPS, {})
    orders = state_sizes(parsed, size)
    # Constructors of transformers know one size for all layers.
    set_state_sizes_(parsed, [max(orders)] * len(orders), size)
    model: Any = kind(parsed)
    if generation_config is not None:
        model.generation_config = package.GenerationConfig.from_dict(dict(generation_config))
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
    for module in list(model.modules()):
        adapter = adapter_for(module)
        if isinstance(adapter, MixerAdapter | MappedAdapter):
            order = orders[module.layer_idx]
            _make_room_(module, adapter, order, adapter.sizes_at(module, order))
            if isinstance(adapter, MappedAdapter) and str(module.layer_idx) in maps:
                adapter.add_maps_(module, maps[str(module.layer_idx)])
    set_state_sizes_(model.config, orders, size)
    return model


def _parsed(kind: Any, config: Mapping[str, Any]) -> Any:
    # Configs of transformers raise this error for a value of the wrong type; it is not a ValueError.
    refusal = getattr(sys.modules.get("huggingface_hub.errors"), "StrictDataclassError", ValueError)
    try:
        return kind.config_class.from_dict(_with_floats(dict(config)))
    except refusal as error:
        raise AdapterError(f"{kind.config_class.__name__} does not accept the saved config: {error}") from error


def _with_floats(value: Any) -> Any:
    """The values of a config whose infinities, which JSON lacks, transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        return (
            float(value["__float__"]) if set(value) == {"__float__"} else {k: _with_floats(v) for k, v in value.items()}
        )
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def _make_room_(mixer: nn.Module, adapter: Adapter[Any, Any], order: int, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Replace the mixer's parameters and buffers by empty ones of this order; `sizes` has axis and size by name."""
    attributes = adapter.attributes(mixer, order)
    for name, (axis, size) in sizes.items():
        owner, _, leaf = name.rpartition(".")
        old = getattr(mixer.get_submodule(owner), leaf)
        shape = list(old.shape)
        shape[axis] = size
        new = torch.empty(shape, device=old.device, dtype=old.dtype)
        setattr(mixer.get_submodule(owner), leaf, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
    for path, value in attributes.items():
        setattr(*adapter.place(mixer, path), value)
