"""Modules and tensors of a model by the names they have inside DistributedDataParallel, torch.compile and the like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from compressm.adapters import adapter_for, find
from compressm.adapters.base import plain_name
from compressm.errors import SavingError
from compressm.layers import SSMLayer


def plain_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module, wrappers left out; one that is used in several places is there under each of its names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    # What is wrapped comes after its wrapper and has the same name.
    return {plain_name(path, modules): module for path, module in modules.items()}


def state_names(model: nn.Module) -> dict[str, str]:
    """For every plain name of a tensor the key under which the model's state dict has it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {plain_name(key, modules): key for key in model.state_dict(keep_vars=True)}


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers themselves, not copies; one that is shared is there under each of its names."""
    state = model.state_dict(keep_vars=True)
    named = {name: state[key] for name, key in state_names(model).items()}
    for name, value in named.items():
        if type(value) not in (Tensor, nn.Parameter):
            raise SavingError(
                f"{name} is a {type(value).__name__}, expected a plain tensor: gather what is sharded, and remove "
                "what is not a tensor from the state dict"
            )
    return named


def module_versions(model: nn.Module) -> dict[str, Any]:
    """What the state dict says of its modules beside their tensors: the version of each."""
    modules = dict(model.named_modules(remove_duplicate=False))
    stored = getattr(model.state_dict(keep_vars=True), "_metadata", {})
    return {plain_name(path, modules): value for path, value in stored.items()}


def keyed_state(model: nn.Module, tensors: Mapping[str, Tensor], versions: Mapping[str, Any]) -> dict[str, Tensor]:
    """Plain names turned back into the keys of this model's state dict."""
    modules = dict(model.named_modules(remove_duplicate=False))
    state = _StateDict({key: tensors[name] for name, key in state_names(model).items()})
    named = {path: versions.get(plain_name(path, modules)) for path in modules}
    state._metadata = {path: value for path, value in named.items() if value is not None}
    return state


class _StateDict(dict[str, Tensor]):
    _metadata: dict[str, Any]


def first_names(named: Mapping[str, object]) -> dict[str, str]:
    """For every other name of an object, the first one."""
    seen: dict[int, str] = {}
    first = {name: seen.setdefault(id(value), name) for name, value in named.items()}
    return {name: other for name, other in first.items() if name != other}


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether the name is that of something in one of the modules."""
    return any(name.startswith(f"{module}.") for module in modules)


def ssm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer that has an order, once."""
    layers = {name: module for name, (module, _) in find(model).items()}
    known = set(layers.values())
    for name, module in plain_modules(model).items():
        if isinstance(module, SSMLayer) and module not in known:
            known.add(module)
            layers[name] = module
    return layers


def order_of(layer: nn.Module) -> int:
    """How many states the layer has now."""
    if isinstance(layer, SSMLayer):
        return layer.order
    adapter = adapter_for(layer)
    assert adapter is not None
    return adapter.order(layer)


def orders_of(model: nn.Module) -> dict[str, int]:
    """The order of every layer by name."""
    return {name: order_of(layer) for name, layer in ssm_layers(model).items()}
