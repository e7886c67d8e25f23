"""The adapter of MambaMixer of transformers, and the state size of each layer in the model's shared config."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, final

from jaxtyping import Bool
from torch import Tensor, nn

from compressm.adapters.base import adapter_for, adapts_named
from compressm.adapters.mamba import SelectiveAdapter
from compressm.control.selective import SelectiveSystem
from compressm.errors import AdapterError, warn_caller

_SIZE = "state_size"


@final
class LayerConfig:
    """One layer's view of the shared config: reads and sets the layer's own `state_size`.

    While all layers agree, it is config.state_size. If they differ, config.per_layer_config has one for each layer, and
    config.state_size cannot be read: transformers calls such a config heterogeneous.
    """

    def __init__(self, config: Any, layer: int) -> None:
        self._config, self._layer = config, layer

    @property
    def state_size(self) -> int:
        """The state size of this layer."""
        return int(self._config.per_layer_config[self._layer].state_size)

    @state_size.setter
    def state_size(self, order: int) -> None:
        orders = state_sizes(self._config)
        orders[self._layer] = order
        set_state_sizes_(self._config, orders)


def state_sizes(config: Any) -> list[int]:
    """The state size of every layer."""
    # Not from per_layer_config, which copies the config for each layer.
    own, common = _overrides(config), config.to_dict()[_SIZE]
    return [int(own.get(layer, {}).get(_SIZE, common)) for layer in range(config.num_hidden_layers)]


def set_state_sizes_(config: Any, orders: Sequence[int]) -> None:
    """Store these orders, one per layer, in the config; its other settings of single layers stay."""
    layers = _overrides(config)
    common = max(orders)
    for layer, order in enumerate(orders):
        layers.setdefault(layer, {})[_SIZE] = order
    # The common value comes first: transformers drops a layer's setting that equals it.
    config.per_layer_config = None
    config.state_size = common
    if any(own != {_SIZE: common} for own in layers.values()):
        config.per_layer_config = layers
        _warn_when_saved_(type(config))


def _warn_when_saved_(kind: Any) -> None:
    """Make `save_pretrained` of these configs warn of unequal orders: transformers writes what it cannot load."""
    save = kind.save_pretrained
    if getattr(save, "_warns_of_orders", False):
        return

    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **options: Any) -> Any:
        orders = state_sizes(self)
        if len(set(orders)) > 1:
            warn_caller(
                f"the layers have {', '.join(map(str, orders))} states, and from_pretrained of {PACKAGE} reads one"
                " state_size for all: only compressm.load_model can load this. compressm.pad_orders_(model) gives them"
                " one order, and changes no output"
            )
        return save(self, *args, **options)

    save_pretrained._warns_of_orders = True  # type: ignore[attr-defined]
    kind.save_pretrained = save_pretrained


def _overrides(config: Any) -> dict[int, dict[str, Any]]:
    """The config's settings of single layers, by index; transformers has them under strings."""
    said = config.to_dict().get("per_layer_config") or {}
    return {int(layer): dict(own) for layer, own in said.items()}


PACKAGE = "transformers"
# From this version on configs have settings for single layers, caches take their sizes from the states they get, and
# the signature of a mixer can be read.
SINCE = "5.16"


@adapts_named(f"{PACKAGE}.models.mamba.modeling_mamba.MambaMixer")
@final
class MambaMixerAdapter(SelectiveAdapter[nn.Module]):
    """The adapter of MambaMixer: `attention_mask` is 0 in padding; mixer, x_proj and config also store the order."""

    SHARED = frozenset({"config.state_size"})

    def read(self, module: nn.Module) -> SelectiveSystem:
        system = super().read(module)
        _require_config(module)
        sizes = {"time_step_rank": len(system.step_in), "intermediate_size": system.channels}
        _require_attributes(self, module, sizes | self.attributes(module, system.order))
        return system

    def counted(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Bool[Tensor, "batch length"] | None:
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        cache, mask = given.get("cache_params"), given.get("attention_mask")
        if cache is not None and cache.has_previous_state(module.layer_idx):
            raise AdapterError(
                "calibrate continues from a cache, whose states are unknown: let it run the model on whole sequences,"
                " as model(input_ids, attention_mask=...) does, without generate; or two layers have the same"
                f" layer_idx {module.layer_idx} and share a cache entry"
            )
        return None if mask is None else mask.bool()

    def attributes(self, module: nn.Module, order: int) -> dict[str, Any]:
        return super().attributes(module, order) | {"ssm_state_size": order, "config.state_size": order}

    def state_bytes(self, module: nn.Module, order: int) -> int:
        """A whole window of the convolution in the dtype of the model, and states in float32."""
        weight = module.get_parameter("conv1d.weight")
        channels, _, window = weight.shape
        return channels * (window * weight.element_size() + 4 * order)

    def place(self, module: nn.Module, path: str) -> tuple[Any, str]:
        if path not in self.SHARED:
            return super().place(module, path)
        layer = module.layer_idx
        assert isinstance(layer, int)
        return LayerConfig(module.config, layer), "state_size"

    def renewed(self, model: nn.Module, modules: Sequence[nn.Module]) -> list[tuple[Any, str, Any]]:
        configs = {id(module.config): module.config for module in modules}
        return [write for config in configs.values() for write in self._renewed(model, config)]

    def _renewed(self, model: nn.Module, config: Any) -> list[tuple[nn.Module, str, Any]]:
        """The writes that replace this config by a copy with the present orders, one copy for a model."""
        holders = _holders(model, config)
        mixers = [module for module, _ in holders if isinstance(adapter_for(module), MambaMixerAdapter)]
        orders: dict[Any, int] = {module.layer_idx: self.order(module) for module in mixers}
        if len(orders) < len(mixers) and all(module is not model for module, _ in holders):
            # Several models inside of this one were made from one config.
            return [write for child in model.children() for write in self._renewed(child, config)]
        if not orders:
            return []
        # Layers that were removed from the model have no order of their own.
        common = max(orders.values())
        sizes = [orders.get(layer, common) for layer in range(config.num_hidden_layers)]
        if sizes == state_sizes(config):
            return []
        renewed = copy.deepcopy(config)
        set_state_sizes_(renewed, sizes)
        return [(module, name, renewed) for module, name in holders]


def _holders(model: nn.Module, config: Any) -> list[tuple[nn.Module, str]]:
    """Every module that holds the config, with its name there: in the model, and in models that contain this one."""
    # Modules do not know what contains them, and a backbone alone may be cut: its head would keep the old config.
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and thing is not model]
    holding = [module for module in alive if any(value is config for value in vars(module).values())]
    around = [module for module in holding if any(inner is model for inner in module.modules())]
    modules = dict.fromkeys(inner for outer in (model, *around) for inner in outer.modules())
    return [(module, name) for module in modules for name, value in vars(module).items() if value is config]


def _require_config(module: nn.Module) -> None:
    """Require a config with settings for single layers, a valid `layer_idx`, and the arguments of `counted`."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    layers = getattr(config, "per_layer_config", None)
    if layers is None:
        raise AdapterError(f"{_shown(module)} has no config.per_layer_config, expected {PACKAGE} {SINCE} or later")
    if not isinstance(layer, int) or not 0 <= layer < len(layers):
        raise AdapterError(f"{_shown(module)} has layer_idx {layer!r}, but its config has {len(layers)} layers")
    names = list(inspect.signature(type(module).forward).parameters)
    missing = [name for name in ("cache_params", "attention_mask") if name not in names]
    if missing:
        raise AdapterError(
            f"{_shown(module)} takes {', '.join(names[1:])}, expected {' and '.join(missing)} too, as in"
            f" {PACKAGE} {SINCE} or later"
        )


def _require_attributes(adapter: MambaMixerAdapter, module: nn.Module, expected: Mapping[str, Any]) -> None:
    """Require that all stored sizes agree with the parameters, so that a cut can change both."""
    for path, value in expected.items():
        try:
            found = getattr(*adapter.place(module, path))
        except AttributeError:
            raise AdapterError(f"{_shown(module)} has no {path}, expected {value} there") from None
        if found != value:
            shared = "; another model that shares the config may have been cut" if path.startswith("config.") else ""
            raise AdapterError(f"{_shown(module)} has {path} {found!r}, but its parameters are for {value}{shared}")


def _shown(module: nn.Module) -> str:
    version = getattr(sys.modules.get(PACKAGE), "__version__", "of unknown version")
    return f"{type(module).__name__} ({PACKAGE} {version})"
