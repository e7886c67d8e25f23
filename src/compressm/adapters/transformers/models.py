"""Models of transformers as plain values, and models built from these with every layer at its order."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from compressm.adapters.base import adapter_for
from compressm.adapters.mamba import PROJECTION, RATES
from compressm.adapters.transformers.config import PACKAGE, set_state_sizes_, state_sizes
from compressm.adapters.transformers.mamba import MambaMixerAdapter
from compressm.errors import AdapterError

MODELS = ("MambaModel", "MambaForCausalLM")

_MODULE = f"{PACKAGE}.models.mamba.modeling_mamba"


def kind_name(kind: type[Any]) -> str | None:
    """The name of a supported class in files; None for other classes."""
    return f"{PACKAGE}.{kind.__name__}" if kind.__module__ == _MODULE and kind.__name__ in MODELS else None


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
        raise AdapterError(f"{name} is not supported, expected {' or '.join(MODELS)} of {PACKAGE}")
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
    parsed = _parsed(kind, config)
    orders = state_sizes(parsed)
    # Constructors of transformers know one size for all layers.
    set_state_sizes_(parsed, [max(orders)] * len(orders))
    model: Any = kind(parsed)
    if generation_config is not None:
        model.generation_config = package.GenerationConfig.from_dict(dict(generation_config))
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
    for module in model.modules():
        if isinstance(adapter := adapter_for(module), MambaMixerAdapter):
            _make_room_(module, adapter, orders[module.layer_idx])
    return model


def _parsed(kind: Any, config: Mapping[str, Any]) -> Any:
    # Configs of transformers raise this error for a value of the wrong type; it is not a ValueError.
    refusal = getattr(sys.modules.get("huggingface_hub.errors"), "StrictDataclassError", ValueError)
    try:
        return kind.config_class.from_dict(dict(config))
    except refusal as error:
        raise AdapterError(f"{kind.config_class.__name__} does not accept the saved config: {error}") from error


def _make_room_(mixer: nn.Module, adapter: MambaMixerAdapter, order: int) -> None:
    """Replace the mixer's parameters by empty ones of the given order."""
    attributes = adapter.attributes(mixer, order)
    shapes = {PROJECTION: attributes["x_proj.out_features"], RATES: order}
    for name, axis in ((PROJECTION, 0), (RATES, 1)):
        old = mixer.get_parameter(name)
        shape = list(old.shape)
        shape[axis] = shapes[name]
        owner, _, leaf = name.rpartition(".")
        setattr(mixer.get_submodule(owner), leaf, nn.Parameter(torch.empty(shape, device=old.device, dtype=old.dtype)))
    for path, value in attributes.items():
        setattr(*adapter.place(mixer, path), value)
