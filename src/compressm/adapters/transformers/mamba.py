"""Adapters of the Mamba-1 mixers of transformers, with and without norms of B and C."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from compressm.adapters.base import Growth, adapts_named, finite_doubles, parameter_of
from compressm.adapters.mamba import PROJECTION, RATES, SelectiveAdapter
from compressm.adapters.transformers.config import (
    PACKAGE,
    SINCE,
    renewed_configs,
    require_attributes,
    set_state_sizes_,
    shown,
    state_sizes,
    whole_sequences,
)
from compressm.control.selective import Norms, SelectiveSystem
from compressm.errors import AdapterError


@final
class LayerConfig:
    """One layer's view of the shared config: reads and sets the layer's own order, under the config's name `size`.

    While all layers agree, it is config.state_size. If they differ, config.per_layer_config has one for each layer, and
    config.state_size cannot be read: transformers calls such a config heterogeneous.
    """

    def __init__(self, config: Any, layer: int, size: str) -> None:
        self._config, self._layer, self._size = config, layer, size

    @property
    def order(self) -> int:
        """The state size of this layer."""
        return int(getattr(self._config.per_layer_config[self._layer], self._size))

    @order.setter
    def order(self, order: int) -> None:
        orders = state_sizes(self._config, self._size)
        orders[self._layer] = order
        set_state_sizes_(self._config, orders, self._size)


class MixerAdapter(SelectiveAdapter[nn.Module]):
    """An adapter of Mamba-1 mixers: `attention_mask` is 0 in padding; mixer, x_proj and config also store the order."""

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
        return whole_sequences(module, args, kwargs)[1]

    def attributes(self, module: nn.Module, order: int) -> dict[str, Any]:
        return super().attributes(module, order) | {"ssm_state_size": order, f"config.{self.SIZE}": order}

    def sizes_at(self, module: nn.Module, order: int) -> dict[str, tuple[int, int]]:
        """The axis of states, and the size there at this order, of every parameter and buffer that grows with it."""
        return {PROJECTION: (0, super().attributes(module, order)["x_proj.out_features"]), RATES: (1, order)}

    def state_growth(self, module: nn.Module) -> Growth:
        """States alone: caches have the window of the convolution apart."""
        return Growth(axis=-1)

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
        return LayerConfig(module.config, layer, self.SIZE), "order"

    def renewed(self, model: nn.Module, modules: Sequence[nn.Module]) -> list[tuple[Any, str, Any]]:
        configs = {id(module.config): module.config for module in modules}
        return renewed_configs(model, list(configs.values()), self.SIZE, self, lambda mixer: (self.order(mixer), None))


@adapts_named(f"{PACKAGE}.models.mamba.modeling_mamba.MambaMixer")
@final
class MambaMixerAdapter(MixerAdapter):
    """The adapter of MambaMixer."""


_PARTS = ("dt", "b", "c")
_OF_STATES = ("b_layernorm.weight", "c_layernorm.weight")


class NormedMixerAdapter(MixerAdapter):
    """An adapter of mixers with RMS norms of Δ, B and C behind x_proj, each with the same ε.

    A projection or a selection stands before the norms, whose mean is then over fewer states.
    """

    RECURRENCE = "normed Mamba-1"
    BESIDE = frozenset(f"{part}_layernorm.weight" for part in _PARTS)

    def growth(self, module: nn.Module) -> dict[str, Growth]:
        """Rows of B and C grow by √(r/n), so that the norms' means over r states, some of them zero, stay the same."""
        own = super().growth(module)
        return own | {PROJECTION: replace(own[PROJECTION], power=0.5)}

    def sizes_at(self, module: nn.Module, order: int) -> dict[str, tuple[int, int]]:
        return super().sizes_at(module, order) | dict.fromkeys(_OF_STATES, (0, order))


@adapts_named(f"{PACKAGE}.models.jamba.modeling_jamba.JambaMambaMixer")
@final
class JambaMixerAdapter(NormedMixerAdapter):
    """The adapter of JambaMambaMixer, whose norms have weights."""

    SHARED = frozenset({"config.mamba_d_state"})
    SIZE = "mamba_d_state"
    NORMED = _OF_STATES

    def growth(self, module: nn.Module) -> dict[str, Growth]:
        return super().growth(module) | dict.fromkeys(_OF_STATES, Growth(axis=0, idle=1.0, power=-0.5))

    def norms(self, module: nn.Module) -> Norms:
        step, B, C = finite_doubles(module, [f"{part}_layernorm.weight" for part in _PARTS])
        return Norms(step, B, C, _one_eps(module, "variance_epsilon"))


@adapts_named(f"{PACKAGE}.models.falcon_mamba.modeling_falcon_mamba.FalconMambaMixer")
@final
class FalconMambaMixerAdapter(NormedMixerAdapter):
    """The adapter of FalconMambaMixer, whose norms have no weights: their factors go into D and out_proj."""

    def norms(self, module: Any) -> Norms:
        rank, order = parameter_of(module, "dt_proj.weight").shape[1], self.order(module)
        one = torch.ones(1, dtype=torch.float64, device=parameter_of(module, RATES).device)
        return Norms(one.expand(rank), one.expand(order), one.expand(order), _one_eps(module, "eps"), tied=True)

    def growth(self, module: nn.Module) -> dict[str, Growth]:
        """B and C get longer, so D and out_proj make up for it."""
        beside = {"D": Growth(axis=0, blocks=0, power=1.0), "out_proj.weight": Growth(axis=0, blocks=0, power=-1.0)}
        return super().growth(module) | beside

    def state_growth(self, module: nn.Module) -> Growth:
        return Growth(axis=-1, power=0.5)

    def factors(self, system: SelectiveSystem) -> dict[str, Tensor]:
        """(g y + D u) silu(z) is g (y + D/g u) silu(z), and out_proj takes g."""
        assert system.norms is not None
        gain = system.norms.B[0] * system.norms.C[0]
        return {"D": 1 / gain, "out_proj.weight": gain}

    def buffers(self, module: nn.Module, system: SelectiveSystem) -> dict[str, Tensor]:
        return self.unsaved_buffers(module, system.order)

    def unsaved_buffers(self, module: nn.Module, order: int) -> dict[str, Tensor]:
        """The ones that its kernels take as weights."""
        return {name: module.get_buffer(name).new_ones(order) for name in _OF_STATES}

    def constant_buffers(self, module: nn.Module) -> dict[str, Tensor]:
        like = parameter_of(module, PROJECTION)
        return {name: like.new_ones(len(module.get_buffer(name))) for name in sorted(self.BESIDE)}


def _one_eps(module: nn.Module, name: str) -> float:
    """The ε that all norms have, under this name."""
    found = [getattr(getattr(module, f"{part}_layernorm", None), name, None) for part in _PARTS]
    if None in found or len(set(found)) > 1:
        said = ", ".join(map(str, found))
        raise AdapterError(f"{shown(module)} has norms of Δ, B and C with ε {said}, expected one ε for all")
    return float(found[0])  # type: ignore[arg-type]  # none is None


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
