"""The config that all layers of a transformers model share, told from each layer's side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final


@final
class LayerConfig:
    """What the shared config says of one layer: `state_size` is that of the layer, read and written.

    While all layers agree it is config.state_size. Where they differ config.per_layer_config has one for each, and
    config.state_size cannot be read: transformers calls such a config heterogeneous.
    """

    def __init__(self, config: Any, layer: int) -> None:
        self._config, self._layer = config, layer

    @property
    def state_size(self) -> int:
        """Of this layer."""
        return int(self._config.per_layer_config[self._layer].state_size)

    @state_size.setter
    def state_size(self, order: int) -> None:
        orders = state_sizes(self._config)
        orders[self._layer] = order
        set_state_sizes_(self._config, orders)


def state_sizes(config: Any) -> list[int]:
    """Of every layer."""
    return [int(layer.state_size) for layer in config.per_layer_config]


def set_state_sizes_(config: Any, orders: Sequence[int]) -> None:
    """Let the config say these orders, one a layer, and leave all else that it says of single layers."""
    said = config.to_dict().get("per_layer_config") or {}
    layers = {int(layer): {key: value for key, value in own.items() if key != _SIZE} for layer, own in said.items()}
    common = max(orders)
    for layer, order in enumerate(orders):
        if order != common:
            layers.setdefault(layer, {})[_SIZE] = order
    # In this order: with differences left in it the config would not let its common value be compared.
    config.per_layer_config = None
    config.state_size = common
    if any(layers.values()):
        config.per_layer_config = layers


_SIZE = "state_size"
