"""The adapter of MambaMixer of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, final

from jaxtyping import Bool
from torch import Tensor, nn

from compressm.adapters.base import adapts_named
from compressm.adapters.mamba import SelectiveAdapter
from compressm.adapters.transformers.config import (
    PACKAGE,
    SINCE,
    renewed_configs,
    require_attributes,
    set_state_sizes_,
    shown,
    state_sizes,
)
from compressm.control.selective import SelectiveSystem
from compressm.errors import AdapterError


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


@adapts_named(f"{PACKAGE}.models.mamba.modeling_mamba.MambaMixer")
@final
class MambaMixerAdapter(SelectiveAdapter[nn.Module]):
    """The adapter of MambaMixer: `attention_mask` is 0 in padding; mixer, x_proj and config also store the order."""

    SHARED = frozenset({"config.state_size"})
    SIZE = "state_size"

    def read(self, module: nn.Module) -> SelectiveSystem:
        system = super().read(module)
        _require_config(module)
        sizes = {"time_step_rank": len(system.step_in), "intermediate_size": system.channels}
        require_attributes(self, module, sizes | self.attributes(module, system.order))
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
        return renewed_configs(
            model, list(configs.values()), "state_size", self, lambda mixer: (self.order(mixer), None)
        )


def _require_config(module: nn.Module) -> None:
    """Require a config with settings for single layers, a valid `layer_idx`, and the arguments of `counted`."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    layers = getattr(config, "per_layer_config", None)
    if layers is None:
        raise AdapterError(f"{shown(module)} has no config.per_layer_config, expected {PACKAGE} {SINCE} or later")
    if not isinstance(layer, int) or not 0 <= layer < len(layers):
        raise AdapterError(f"{shown(module)} has layer_idx {layer!r}, but its config has {len(layers)} layers")
    names = list(inspect.signature(type(module).forward).parameters)
    missing = [name for name in ("cache_params", "attention_mask") if name not in names]
    if missing:
        raise AdapterError(
            f"{shown(module)} takes {', '.join(names[1:])}, expected {' and '.join(missing)} too, as in"
            f" {PACKAGE} {SINCE} or later"
        )
