"""Adapters of Mamba and Mamba2 of mamba_ssm, and of Mamba2 of flash-linear-attention; the classes are named.

mamba_ssm cannot be imported without its CUDA extension: these adapters are tested on modules with the same parameters.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import silu

from compressm.adapters.base import Basis, adapts_named, parameter_of
from compressm.adapters.fla import PACKAGE as FLA
from compressm.adapters.fla import fla_input, with_one_order
from compressm.adapters.mamba import SelectiveAdapter
from compressm.adapters.memory import Memory, convolved
from compressm.adapters.transformers.config import holders_of, require_attributes
from compressm.adapters.transformers.mamba2 import Mamba2Adapter
from compressm.control.selective import SelectiveSystem
from compressm.errors import AdapterError

PACKAGE = "mamba_ssm"


class _Selected(Mamba2Adapter):
    """Mixers of Mamba-2 that store selections alone: their kernels take no maps."""

    STORES = frozenset({Basis.SELECTED})
    OPTIONAL = frozenset()
    UNDECAYED = frozenset()
    JOINS: ClassVar[Mapping[str, str]] = {}
    CALLED: ClassVar[tuple[str, ...]] = ("hidden_states", "attention_mask", "past_key_values")

    def activation(self, module: Any) -> Callable[[Tensor], Tensor]:
        """SiLU in torch: that of the module may be a kernel for a GPU."""
        return silu

    def _require_known(self, module: Any) -> None:
        super()._require_known(module)
        if module.activation not in ("silu", "swish"):
            raise AdapterError(f"a {type(module).__name__} has the activation {module.activation!r}, expected 'silu'")


@adapts_named(f"{FLA}.layers.mamba2.Mamba2")
@final
class FlaMamba2Adapter(_Selected):
    """The adapter of Mamba2 of flash-linear-attention, which has the parameters of transformers' Mamba2Mixer."""

    def observed(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Bool[Tensor, "batch length"] | None]:
        return fla_input(module, args, kwargs)

    def renewed(self, model: nn.Module, modules: Sequence[nn.Module]) -> list[tuple[Any, str, Any]]:
        return with_one_order(model, self, modules, lambda module, order: {"state_size": order})


@adapts_named(f"{PACKAGE}.modules.mamba2.Mamba2")
@final
class SsmMamba2Adapter(_Selected):
    """The adapter of Mamba2 of mamba_ssm."""

    CALLED = ("u", "inference_params")
    SIZE = "d_state"

    def read(self, module: Any) -> Memory:
        if module.d_ssm != module.d_inner or getattr(module, "process_group", None) is not None:
            raise AdapterError(
                f"a {type(module).__name__} of {PACKAGE} has d_ssm {module.d_ssm} of {module.d_inner} channels, or is"
                " split over processes; expected d_ssm=None and process_group=None"
            )
        return super().read(module)

    def counts(self, order: int, channels: int) -> dict[str, int]:
        return {"d_state": order}

    def observed(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Bool[Tensor, "batch length"] | None]:
        given = _whole(module, args, kwargs)
        if given.get("seqlen") is not None or given.get("seq_idx") is not None or given.get("cu_seqlens") is not None:
            raise AdapterError("calibrate packs several sequences into one: expected u of (batch, length, width) alone")
        return given["u"], None

    def renewed(self, model: nn.Module, modules: Sequence[nn.Module]) -> list[tuple[Any, str, Any]]:
        return _renewed(model, self, modules)


@adapts_named(f"{PACKAGE}.modules.mamba_simple.Mamba")
@final
class SsmMambaAdapter(SelectiveAdapter[nn.Module]):
    """The adapter of Mamba of mamba_ssm; its fused kernel runs no part of it, so u is computed from its own input."""

    SIZE = "d_state"
    SHARED = frozenset({"config"})

    def read(self, module: nn.Module) -> SelectiveSystem:
        system = super().read(module)
        require_attributes(self, module, self.attributes(module, system.order))
        return system

    def counted(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        return None

    def inputs(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Float[Tensor, "batch length channels"]:
        x: Tensor = _whole(module, args, kwargs)["hidden_states"]
        x = x.to(torch.promote_types(x.dtype, torch.float32))  # as wide as the kernel that it stands for
        channels = len(parameter_of(module, "A_log"))
        bias = None if module.in_proj.bias is None else module.in_proj.bias[:channels]
        return silu(convolved(x, module.in_proj.weight[:channels], module.conv1d.weight, module.conv1d.bias, bias))

    def attributes(self, module: nn.Module, order: int) -> dict[str, Any]:
        return super().attributes(module, order) | {"d_state": order}

    def renewed(self, model: nn.Module, modules: Sequence[nn.Module]) -> list[tuple[Any, str, Any]]:
        return _renewed(model, self, modules)


def _whole(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that does not continue another one."""
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    continued = given.get("inference_params")
    if continued is not None and continued.seqlen_offset > 0:
        raise AdapterError(
            "calibrate continues from a cache, whose states are unknown: let it run the model on whole sequences,"
            " without generate"
        )
    return given


def _renewed(model: nn.Module, adapter: Any, modules: Sequence[nn.Module]) -> list[tuple[Any, str, Any]]:
    """Configs of mamba_ssm with the one order of all layers in `ssm_cfg`."""
    orders = {adapter.order(module) for module in modules}
    if len(orders) > 1:
        return []
    order = orders.pop()
    held = {id(value): value for inner in model.modules() for value in vars(inner).values()}
    found = []
    for config in held.values():
        if isinstance(getattr(config, "ssm_cfg", None), dict) and config.ssm_cfg.get("d_state") != order:
            renewed = copy.deepcopy(config)
            renewed.ssm_cfg = {**config.ssm_cfg, "d_state": order}
            found += [(owner, name, renewed) for owner, name in holders_of(model, config)]
    return found
