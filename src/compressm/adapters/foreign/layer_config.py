"""The config that all layers of a transformers model share, told from each layer's side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

_SIZE = "state_size"


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
    # Not from per_layer_config, which makes a copy of the config for each.
    own, common = _overrides(config), config.to_dict()[_SIZE]
    return [int(own.get(layer, {}).get(_SIZE, common)) for layer in range(config.num_hidden_layers)]


def set_state_sizes_(config: Any, orders: Sequence[int]) -> None:
    """Let the config say these orders, one a layer, and leave all else that it says of single layers."""
    layers = _overrides(config)
    common = max(orders)
    for layer, order in enumerate(orders):
        layers.setdefault(layer, {})[_SIZE] = order
    # The common value first: what is said of a layer and equals it is dropped.
    config.per_layer_config = None
    config.state_size = common
    if any(own != {_SIZE: common} for own in layers.values()):
        config.per_layer_config = layers


def _overrides(config: Any) -> dict[int, dict[str, Any]]:
    """What the config says of single layers; the keys of transformers are text."""
    said = config.to_dict().get("per_layer_config") or {}
    return {int(layer): dict(own) for layer, own in said.items()}
