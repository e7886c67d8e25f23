"""Adapters of the Mamba-2 mixers of transformers: one recurrence under several names, with its size in the config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from compressm.adapters.base import Basis, Growth, adapts_named, parameter_of
from compressm.adapters.memory import KEY_MAP, QUERY_MAP, Memory, Rows, Steps
from compressm.adapters.transformers.config import (
    PACKAGE,
    SINCE,
    configs_of,
    renewed_configs,
    require_attributes,
    shown,
    whole_sequences,
)
from compressm.adapters.transformers.mapped import MappedAdapter, MappedMamba2, window_bytes
from compressm.errors import AdapterError, unmerged

_OF_CONVOLUTION, _MULTIPLIERS = ("conv1d.weight", "conv1d.bias"), "mup_vector"


class Mamba2Adapter(MappedAdapter):
    """The adapter of mixers whose in_proj has the rows [gate, x, B, C, Δ] and whose conv1d has [x, B, C].

    B are the keys and C the queries, for each of the groups of heads; Δ x are the values, and exp(−Δ exp(A_log)) is the
    decay. SiLU follows the convolution, so rows can be selected and fitted, but not mixed; maps may follow.
    """

    STORES = frozenset({Basis.MAPPED, Basis.SELECTED})
    FORWARD = MappedMamba2
    JOINS: ClassVar[Mapping[str, str]] = dict.fromkeys((KEY_MAP, QUERY_MAP), "in_proj.weight")
    SHARED = frozenset({"config"})
    RECURRENCE = "Mamba-2"
    # The config's name of the order.
    SIZE: ClassVar[str] = "state_size"
    # Arguments that its forward pass takes.
    CALLED: ClassVar[tuple[str, ...]] = ("hidden_states", "cache_params", "attention_mask")

    def rows(self, module: nn.Module) -> dict[str, Rows]:
        inner, groups, order = _sizes(module)
        steps = torch.arange(groups * order, device=parameter_of(module, "in_proj.weight").device).view(groups, order)
        found: dict[str, Rows] = {}
        for part, before in (("in_proj", 2 * inner), ("conv1d", inner)):
            own = Rows(before + steps, before + groups * order + steps)
            found |= {f"{part}.{leaf}": own for leaf, _ in module.get_submodule(part).named_parameters()}
        return found

    def read(self, module: nn.Module) -> Memory:
        self._require_known(module)
        require_attributes(self, module, self.attributes(module, self.order(module)))
        return super().read(module)

    def growth(self, module: nn.Module) -> dict[str, Growth]:
        """Rows of B and of C for every group; zeros there, in the convolution too, are states without effect."""
        if self.maps(module) is not None:
            raise AdapterError(
                f"an earlier Mapped cut gave this {type(module).__name__} maps, to which none can be added"
            )
        inner, groups, _ = _sizes(module)
        heads = len(parameter_of(module, "A_log"))
        sizes = {"in_proj": (2 * inner, heads), "conv1d": (inner, 0)}
        return {
            name: Growth(axis=0, first=sizes[part][0], blocks=2 * groups, last=sizes[part][1])
            for name in self.rows(module)
            for part in [name.partition(".")[0]]
        }

    def inner_width(self, module: nn.Module) -> int:
        return _sizes(module)[0]

    def state_bytes(self, module: nn.Module, order: int) -> int:
        """A whole window of the convolution in the dtype of the model, and states in float32, as caches keep them."""
        inner, groups, _ = _sizes(module)
        if self.maps(module) is not None:
            return self.mapped_state_bytes(module, order)
        return window_bytes(module, inner + 2 * groups * order) + 4 * order * inner

    def mapped_state_bytes(self, module: nn.Module, order: int) -> int:
        inner, groups, rows = _sizes(module)
        return window_bytes(module, inner + 2 * groups * rows) + 4 * order * inner

    def attributes(self, module: nn.Module, order: int) -> dict[str, Any]:
        inner, groups, rows = _sizes(module)
        order = rows if self.maps(module) is not None else order  # maps follow all rows
        channels = inner + 2 * groups * order
        sizes = {f"conv1d.{name}": channels for name in ("in_channels", "out_channels", "groups")}
        return {
            **self.counts(order, channels),
            "in_proj.out_features": inner + channels + len(parameter_of(module, "A_log")),
            **sizes,
        }

    def counts(self, order: int, channels: int) -> dict[str, int]:
        """The module's own attributes for its order and for the channels of its convolution."""
        return {"ssm_state_size": order, "conv_dim": channels}

    def steps(
        self, module: nn.Module, x: Float[Tensor, "batch length width"], memory: Memory, counted: Tensor | None = None
    ) -> Steps:
        inner, groups, _ = _sizes(module)
        given, mask = self._input(module, x, counted)
        own = {name: value.detach() for name, value in module.named_parameters()}
        heads = len(own["A_log"])
        of_x, _, _, of_step = self.multipliers(module)
        width = {"in_proj": slice(inner, 2 * inner), "conv1d": slice(inner)}
        rows = {name: value[width[name.partition(".")[0]]] for name, value in own.items() if name in memory.keys}
        last = {name: value[-heads:] for name, value in own.items() if name.startswith("in_proj")}
        low, high = _step_limit(module)
        step = softplus(_projected(given, last) * of_step + own["dt_bias"].to(x)).clamp(low, high)
        log_decay = (-torch.exp(own["A_log"].to(x)) * step).mT
        batch, length, _ = x.shape
        values = (
            _convolved(self.activation(module), given, rows, of_x, mask).view(batch, length, heads, -1)
            * step[..., None]
        )
        queries, keys = self.queries_and_keys(module, x, memory, counted)
        return Steps(
            queries,
            keys,
            values.view(batch, length, groups, heads // groups, -1).permute(0, 2, 3, 1, 4),
            log_decay.reshape(batch, groups, heads // groups, length),
        )

    def queries_and_keys(
        self, module: nn.Module, x: Float[Tensor, "batch length width"], memory: Memory, counted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        given, mask = self._input(module, x, counted)
        _, of_B, of_C, _ = self.multipliers(module)
        queries, keys = (
            _convolved(self.activation(module), given, rows, factor, mask)
            .view(*x.shape[:2], memory.bank, -1)
            .transpose(1, 2)
            for rows, factor in ((memory.queries, of_C), (memory.keys, of_B))
        )
        return queries, keys

    def _input(self, module: nn.Module, x: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The input of in_proj, zeros in padding, and the mask of steps that are none."""
        mask = None if counted is None else counted[..., None]
        return self.scaled_input(module, x if mask is None else torch.where(mask, x, 0)), mask

    def activation(self, module: Any) -> Callable[[Tensor], Tensor]:
        """The activation behind the convolution, in any dtype."""
        found: Callable[[Tensor], Tensor] = module.act
        return found

    def scaled_input(self, module: nn.Module, x: Tensor) -> Tensor:
        """The input of in_proj."""
        return x

    def multipliers(self, module: nn.Module) -> tuple[float, float, float, float]:
        """Factors of x, B, C and Δ behind in_proj."""
        return 1.0, 1.0, 1.0, 1.0

    def observed(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Bool[Tensor, "batch length"] | None]:
        return whole_sequences(module, args, kwargs)

    def renewed(self, model: nn.Module, modules: Sequence[nn.Module]) -> list[tuple[Any, str, Any]]:
        return renewed_configs(model, configs_of(model, self.SIZE), self.SIZE, self, self.rows_and_maps)

    def _require_known(self, module: nn.Module) -> None:
        """Refuse a module whose parameters or call this adapter does not know."""
        names = {name for name, _ in module.named_parameters()}
        needed = {"A_log", "dt_bias", "D", "in_proj.weight", "conv1d.weight", "out_proj.weight"}
        known = needed | {"in_proj.bias", "conv1d.bias", "out_proj.bias", "norm.weight"}
        if odd := sorted((needed - names) | (names - known - self.OPTIONAL)):
            raise AdapterError(
                f"{shown(module)} differs in {', '.join(odd)} from a Mamba-2 mixer: expected {', '.join(sorted(known))}"
                f"{unmerged(odd)}"
            )
        called = inspect.signature(type(module).forward).parameters
        if missing := [name for name in self.CALLED if name not in called]:
            raise AdapterError(
                f"{shown(module)} takes {', '.join(called)}, expected {' and '.join(missing)} too, as in"
                f" {PACKAGE} {SINCE} or later"
            )


def _sizes(module: Any) -> tuple[int, int, int]:
    """The inner width, the number of groups, and the order, from the parameters."""
    inner, heads = parameter_of(module, "out_proj.weight").shape[1], len(parameter_of(module, "A_log"))
    rows, groups = (len(parameter_of(module, "in_proj.weight")), int(getattr(module, "n_groups", 0) or module.ngroups))
    order, rest = divmod(rows - 2 * inner - heads, 2 * groups)
    if rest or order < 1:
        raise AdapterError(
            f"{shown(module)} has {rows} rows in in_proj, expected 2 · {inner} + {heads} + 2 · {groups} groups · states"
        )
    return inner, groups, order


def _step_limit(module: Any) -> tuple[float, float]:
    low, high = module.time_step_limit if hasattr(module, "time_step_limit") else module.dt_limit
    return low, high


def _convolved(
    activation: Callable[[Tensor], Tensor], x: Tensor, rows: Mapping[str, Tensor], factor: float, mask: Tensor | None
) -> Tensor:
    """The activation of a causal convolution of projections of x by these rows; padding gives zeros."""
    kernel, shift = (None if (part := rows.get(name)) is None else part.to(x) for name in _OF_CONVOLUTION)
    assert kernel is not None
    taps = kernel.reshape(-1, kernel.shape[-1])
    past = pad(_projected(x, rows) * factor, (0, 0, taps.shape[-1] - 1, 0))
    # Tap by tap: torch has no fast convolution of single channels in float64.
    found = torch.stack([past[:, j : j + x.shape[1]] * taps[:, j] for j in range(taps.shape[-1])]).sum(0)
    found = activation(found if shift is None else found + shift.flatten())
    return found if mask is None else torch.where(mask, found, 0)


def _projected(x: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
    """The projections of x by rows of in_proj."""
    weight, bias = rows["in_proj.weight"].to(x), rows.get("in_proj.bias")
    found = x @ weight.reshape(-1, weight.shape[-1]).mT
    return found if bias is None else found + bias.to(x).flatten()


@adapts_named(f"{PACKAGE}.models.mamba2.modeling_mamba2.Mamba2Mixer")
@final
class Mamba2MixerAdapter(Mamba2Adapter):
    """The adapter of Mamba2Mixer."""


@adapts_named(f"{PACKAGE}.models.bamba.modeling_bamba.BambaMixer")
@adapts_named(f"{PACKAGE}.models.granitemoehybrid.modeling_granitemoehybrid.GraniteMoeHybridMambaLayer")
@adapts_named(f"{PACKAGE}.models.zamba2.modeling_zamba2.Zamba2MambaMixer")
@final
class BambaMixerAdapter(Mamba2Adapter):
    """The adapter of the mixers of Bamba, GraniteMoeHybrid and Zamba2, whose configs have `mamba_d_state`."""

    SIZE = "mamba_d_state"


@adapts_named(f"{PACKAGE}.models.nemotron_h.modeling_nemotron_h.NemotronHMamba2Mixer")
@final
class NemotronHMixerAdapter(Mamba2Adapter):
    """The adapter of NemotronHMamba2Mixer."""

    SIZE = "ssm_state_size"


@adapts_named(f"{PACKAGE}.models.falcon_h1.modeling_falcon_h1.FalconH1Mixer")
@final
class FalconH1MixerAdapter(Mamba2Adapter):
    """The adapter of FalconH1Mixer: `mup_vector` multiplies the output of in_proj, each part by one number."""

    SIZE = "mamba_d_state"

    def attributes(self, module: nn.Module, order: int) -> dict[str, Any]:
        sizes = super().attributes(module, order)
        return sizes | {"groups_time_state_size": _sizes(module)[1] * sizes["ssm_state_size"]}

    def buffers(self, module: nn.Module, system: Memory) -> dict[str, Tensor]:
        return self.unsaved_buffers(module, system.order)

    def unsaved_buffers(self, module: nn.Module, order: int) -> dict[str, Tensor]:
        inner, groups, rows = _sizes(module)
        order, heads = rows if self.maps(module) is not None else order, len(parameter_of(module, "A_log"))
        factors = self._factors(module)
        sizes = torch.tensor([inner, inner, groups * order, groups * order, heads], device=factors.device)
        return {_MULTIPLIERS: factors.repeat_interleave(sizes).view(1, 1, -1)}

    def _factors(self, module: nn.Module) -> Float[Tensor, "5"]:
        """The factors of gate, x, B, C and Δ; the buffer may be that of another order than the parameters."""
        inner, found = _sizes(module)[0], module.get_buffer(_MULTIPLIERS).flatten()
        states = (len(found) - 2 * inner - len(parameter_of(module, "A_log"))) // 2  # of all groups
        return found[[0, inner, 2 * inner, 2 * inner + states, 2 * inner + 2 * states]]

    def scaled_input(self, module: nn.Module, x: Tensor) -> Tensor:
        factor: Any = module.ssm_in_multiplier
        return x * factor

    def multipliers(self, module: nn.Module) -> tuple[float, float, float, float]:
        _, of_x, of_B, of_C, of_dt = self._factors(module).tolist()
        return of_x, of_B, of_C, of_dt
