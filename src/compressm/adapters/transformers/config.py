"""The configs of transformers: the state size of each layer, and copies with the present orders."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from compressm.adapters.base import Adapter, adapter_for
from compressm.errors import AdapterError, warn_caller

PACKAGE = "transformers"
# From this version on configs have settings for single layers, caches take their sizes from the states they get, and
# the signature of a mixer can be read.
SINCE = "5.16"

# What a config says of mixers that keep maps: the number of states behind them, by the layer's index as text.
MAPS = "compressm_maps"

_CONFIGS = ("PreTrainedConfig", "PretrainedConfig")


# The mixer's size in the config, and the number of states behind maps, None without maps.
SizesOf: TypeAlias = Callable[[Any], tuple[int, int | None]]


def state_sizes(config: Any, size: str = "state_size") -> list[int]:
    """The state size of every layer; `size` is the config's name of it."""
    # Not from per_layer_config, which copies the config for each layer.
    own, common = _overrides(config), config.to_dict()[size]
    return [int(own.get(layer, {}).get(size, common)) for layer in range(config.num_hidden_layers)]


def set_state_sizes_(config: Any, orders: Sequence[int], size: str = "state_size") -> None:
    """Store these orders, one per layer, in the config; its other settings of single layers stay."""
    layers = _overrides(config)
    common = max(orders)
    for layer, order in enumerate(orders):
        layers.setdefault(layer, {})[size] = order
    # The common value comes first: transformers drops a layer's setting that equals it.
    config.per_layer_config = None
    setattr(config, size, common)
    if any(own != {size: common} for own in layers.values()):
        config.per_layer_config = layers
        _warn_when_saved_(type(config), size)


def _warn_when_saved_(kind: Any, size: str) -> None:
    """Make `save_pretrained` of these configs warn of unequal orders: transformers writes what it cannot load."""
    save = kind.save_pretrained
    if getattr(save, "_warns_of_orders", False):
        return

    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **options: Any) -> Any:
        orders = state_sizes(self, size)
        if len(set(orders)) > 1:
            warn_caller(
                f"the layers have {', '.join(map(str, orders))} states, and from_pretrained of {PACKAGE} reads one"
                f" {size} for all: compressm.load_model or load_checkpoint can load this. compressm.pad_orders_(model),"
                " which changes no output, or a cut with uniform=True gives them one order"
            )
        return save(self, *args, **options)

    save_pretrained._warns_of_orders = True  # type: ignore[attr-defined]
    kind.save_pretrained = save_pretrained


def _overrides(config: Any) -> dict[int, dict[str, Any]]:
    """The config's settings of single layers, by index; transformers has them under strings."""
    said = config.to_dict().get("per_layer_config") or {}
    return {int(layer): dict(own) for layer, own in said.items()}


def configs_of(model: nn.Module, size: str) -> list[Any]:
    """The configs with this size that modules of the model hold, or modules that contain the model."""
    # A backbone or a single mixer may be cut: what contains it would keep the old config.
    alive = (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and "config" in vars(thing))
    around = [module for module in alive if any(inner is model for inner in module.modules())]
    held = {id(value): value for module in (*model.modules(), *around) for value in vars(module).values()}
    configs = [value for value in held.values() if any(kind.__name__ in _CONFIGS for kind in type(value).__mro__)]
    found = [config for config in configs if size in config.to_dict()]
    if any(not hasattr(config, "per_layer_config") for config in found):
        raise AdapterError(f"a config of {type(model).__name__} has no per_layer_config, expected {PACKAGE} {SINCE}")
    return found


def renewed_configs(
    model: nn.Module, configs: Iterable[Any], size: str, adapter: Adapter[Any, Any], sizes_of: SizesOf
) -> list[tuple[nn.Module, str, Any]]:
    """The writes that replace these configs by copies with the present orders of the adapter's mixers."""
    return [write for config in configs for write in _renewed(model, config, size, adapter, sizes_of)]


def _renewed(
    model: nn.Module, config: Any, size: str, adapter: Adapter[Any, Any], sizes_of: SizesOf
) -> list[tuple[nn.Module, str, Any]]:
    """The writes that replace this config by a copy, one copy for a model."""
    holders = holders_of(model, config)
    inside = dict.fromkeys(inner for module, _ in holders for inner in module.modules())
    mixers: list[Any] = [module for module in inside if adapter_for(module) is adapter]
    mixers = [mixer for mixer in mixers if getattr(mixer, "config", config) is config]
    orders: dict[Any, int] = {mixer.layer_idx: sizes_of(mixer)[0] for mixer in mixers}
    maps = {str(mixer.layer_idx): rank for mixer in mixers if (rank := sizes_of(mixer)[1]) is not None}
    if len(orders) < len(mixers) and all(module is not model for module, _ in holders):
        # Several models inside of this one were made from one config.
        return [write for child in model.children() for write in _renewed(child, config, size, adapter, sizes_of)]
    if not orders:
        return []
    # Layers that were removed from the model, or have no mixer, have no order of their own.
    common = max(orders.values())
    sizes = [orders.get(layer, common) for layer in range(config.num_hidden_layers)]
    if sizes == state_sizes(config, size) and maps == config.to_dict().get(MAPS, {}):
        return []
    renewed = copy.deepcopy(config)
    set_state_sizes_(renewed, sizes, size)
    if maps or MAPS in config.to_dict():
        setattr(renewed, MAPS, maps)
    return [(module, name, renewed) for module, name in holders]


def holders_of(model: nn.Module, config: Any) -> list[tuple[nn.Module, str]]:
    """Every module that holds the config, with its name there: in the model, and in models that contain this one."""
    # Modules do not know what contains them, and a backbone alone may be cut: its head would keep the old config.
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and thing is not model]
    holding = [module for module in alive if any(value is config for value in vars(module).values())]
    around = [module for module in holding if any(inner is model for inner in module.modules())]
    modules = dict.fromkeys(inner for outer in (model, *around) for inner in outer.modules())
    return [(module, name) for module in modules for name, value in vars(module).items() if value is config]


def require_attributes(adapter: Adapter[Any, Any], module: nn.Module, expected: Mapping[str, Any]) -> None:
    """Require that all stored sizes agree with the parameters, so that a cut can change both."""
    for path, value in expected.items():
        try:
            found = getattr(*adapter.place(module, path))
        except AttributeError:
            raise AdapterError(f"{shown(module)} has no {path}, expected {value} there") from None
        if found != value:
            shared = "; another model that shares the config may have been cut" if path.startswith("config.") else ""
            raise AdapterError(f"{shown(module)} has {path} {found!r}, but its parameters are for {value}{shared}")


def shown(module: nn.Module) -> str:
    """The module's class, and the version of its package."""
    version = getattr(sys.modules.get(PACKAGE), "__version__", "of unknown version")
    return f"{type(module).__name__} ({PACKAGE} {version})"


def whole_sequences(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The input of a mixer's call, and the mask of steps that are not padding; a call that continues is refused."""
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    cache, mask = given.get("cache_params"), given.get("attention_mask")
    if cache is not None and cache.has_previous_state(module.layer_idx):
        raise AdapterError(
            "calibrate continues from a cache, whose states are unknown: let it run the model on whole sequences,"
            " as model(input_ids, attention_mask=...) does, without generate; or two layers have the same"
            f" layer_idx {module.layer_idx} and share a cache entry"
        )
    return given["hidden_states"], None if mask is None else mask.bool()
