"""Adapters of gated delta nets of transformers (Qwen3-Next, Qwen3.5): the delta rule with a scalar decay per head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

from compressm.adapters.base import adapts_named, parameter_of
from compressm.adapters.memory import Memory, MemoryAdapter, Rows, Steps
from compressm.adapters.transformers.config import (
    PACKAGE,
    configs_of,
    renewed_configs,
    require_attributes,
    shown,
    whole_sequences,
)
from compressm.errors import AdapterError

_CONVOLUTION, _SIZE, _NORM_EPS = "conv1d.weight", "linear_key_head_dim", 1e-6


class DeltaNetAdapter(MemoryAdapter[nn.Module]):
    """An adapter of gated delta nets: SiLU and an L2 norm over key dimensions follow projection and convolution.

    The value heads of a key head share its keys and queries. Queries are divided by √n, which the norm behind the
    read-out cancels, except for its ε: r of n states give the output of the norm with ε r/n. All norms of a model share
    the config's ε, so it stays as it is, and a file gives the model that was saved.
    """

    SHARED = frozenset({"config"})

    def projection(self, module: nn.Module) -> tuple[str, Rows, Tensor]:
        """The name of the projection, its rows of keys and queries, and those of values (key heads, rows)."""
        heads, order, values = _sizes(module)
        places = torch.arange(2 * heads * order + heads * values, device=module.get_parameter(_CONVOLUTION).device)
        queries, keys, rest = torch.split(places, [heads * order, heads * order, heads * values])
        return "in_proj_qkv.weight", Rows(keys.view(heads, -1), queries.view(heads, -1)), rest.view(heads, -1)

    def gates(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """The projections that give strength and decay of every value head: (batch, length, heads)."""
        return tuple(x @ part.weight.detach().to(x).mT for part in (module.in_proj_b, module.in_proj_a))

    def rows(self, module: nn.Module) -> dict[str, Rows]:
        name, own, _ = self.projection(module)
        heads, order, _ = _sizes(module)
        places = torch.arange(2 * heads * order, device=module.get_parameter(_CONVOLUTION).device)
        queries, keys = places.view(2, heads, order)
        return {name: own, _CONVOLUTION: Rows(keys, queries)}

    def read(self, module: nn.Module) -> Memory:
        names = {name for name, _ in module.named_parameters()}
        name, _, _ = self.projection(module)
        if missing := sorted({name, _CONVOLUTION, "A_log", "dt_bias", "out_proj.weight", "norm.weight"} - names):
            raise AdapterError(f"{shown(module)} has no {', '.join(missing)}: expected a gated delta net")
        if "conv1d.bias" in names or module.activation != "silu":
            raise AdapterError(
                f"{shown(module)} has a bias or another activation than SiLU, which {self} does not know"
            )
        require_attributes(self, module, self.attributes(module, self.order(module)))
        return super().read(module)

    def attributes(self, module: nn.Module, order: int) -> dict[str, Any]:
        heads, now, values = _sizes(module)
        name, _, _ = self.projection(module)
        channels = 2 * heads * order + heads * values
        return {
            "head_k_dim": order,
            "key_dim": heads * order,
            "conv_dim": channels,
            f"{name.partition('.')[0]}.out_features": len(parameter_of(module, name)) - 2 * heads * (now - order),
            **{f"conv1d.{size}": channels for size in ("in_channels", "out_channels", "groups")},
        }

    def steps(
        self, module: nn.Module, x: Float[Tensor, "batch length width"], memory: Memory, counted: Tensor | None = None
    ) -> Steps:
        heads, order, _ = _sizes(module)
        given = x if counted is None else torch.where(counted[..., None], x, 0)
        name, _, places = self.projection(module)
        taps = parameter_of(module, _CONVOLUTION).detach()[2 * heads * order :]
        values = _convolved(given, parameter_of(module, name).detach()[places.flatten()], taps)
        strength, step = self.gates(module, given)
        own = {part: parameter_of(module, part).detach().to(x) for part in ("A_log", "dt_bias")}
        log_decay = -torch.exp(own["A_log"]) * softplus(step + own["dt_bias"])
        batch, length, _ = x.shape
        per_head = len(own["A_log"]) // heads
        queries, keys = self.queries_and_keys(module, x, memory, counted)
        return Steps(
            queries,
            keys,
            values.view(batch, length, heads, per_head, -1).permute(0, 2, 3, 1, 4),
            log_decay.mT.reshape(batch, heads, per_head, length),
            torch.sigmoid(strength).mT.reshape(batch, heads, per_head, length),
        )

    def queries_and_keys(
        self, module: nn.Module, x: Float[Tensor, "batch length width"], memory: Memory, counted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        given = x if counted is None else torch.where(counted[..., None], x, 0)
        name, _, _ = self.projection(module)
        found = []
        for rows in (memory.queries, memory.keys):
            part = _convolved(given, rows[name].flatten(0, 1), rows[_CONVOLUTION].flatten(0, 1))
            part = part.view(*x.shape[:2], memory.bank, -1).transpose(1, 2)
            found.append(part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _NORM_EPS))
        # Divided by the same number for every order: the norm behind the read-out cancels it.
        return found[0] / _sizes(module)[1] ** 0.5, found[1]

    def observed(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Bool[Tensor, "batch length"] | None]:
        return whole_sequences(module, args, kwargs)

    def renewed(self, model: nn.Module, modules: Sequence[nn.Module]) -> list[tuple[Any, str, Any]]:
        return renewed_configs(model, configs_of(model, _SIZE), _SIZE, self, lambda mixer: (_sizes(mixer)[1], None))


def _sizes(module: Any) -> tuple[int, int, int]:
    """The number of key heads, the order, and the rows of values for every key head, from the parameters."""
    heads, values = int(module.num_k_heads), parameter_of(module, "out_proj.weight").shape[1]
    rows = len(parameter_of(module, _CONVOLUTION))
    order, rest = divmod(rows - values, 2 * heads)
    if rest or order < 1 or values % heads:
        raise AdapterError(f"{shown(module)} has {rows} rows in conv1d, expected {values} + 2 · {heads} heads · states")
    return heads, order, values // heads


def _convolved(x: Tensor, projection: Tensor, kernel: Tensor) -> Tensor:
    """SiLU of a causal convolution of projections of x."""
    taps = kernel.to(x).reshape(len(projection), -1)
    past = pad(x @ projection.to(x).mT, (0, 0, taps.shape[-1] - 1, 0))
    return silu(torch.stack([past[:, j : j + x.shape[1]] * taps[:, j] for j in range(taps.shape[-1])]).sum(0))


@adapts_named(f"{PACKAGE}.models.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet")
@adapts_named(f"{PACKAGE}.models.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet")
@adapts_named(f"{PACKAGE}.models.qwen4_exp.modeling_qwen4_exp.Qwen4ExpTextGatedDeltaNet")
@final
class QwenDeltaNetAdapter(DeltaNetAdapter):
    """The adapter of the gated delta nets of Qwen3.5 and later."""


@adapts_named(f"{PACKAGE}.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet")
@final
class Qwen3NextDeltaNetAdapter(DeltaNetAdapter):
    """The adapter of Qwen3NextGatedDeltaNet, whose projections hold [q, k, v, z] and [b, a] by key head."""

    def projection(self, module: nn.Module) -> tuple[str, Rows, Tensor]:
        heads, order, values = _sizes(module)
        name = "in_proj_qkvz.weight"
        places = torch.arange(len(parameter_of(module, name)), device=parameter_of(module, name).device).view(heads, -1)
        return name, Rows(places[:, order : 2 * order], places[:, :order]), places[:, 2 * order : 2 * order + values]

    def gates(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        found = (x @ module.in_proj_ba.weight.detach().to(x).mT).view(*x.shape[:2], int(module.num_k_heads), -1)
        strength, step = found.chunk(2, dim=-1)
        return strength.flatten(2), step.flatten(2)
