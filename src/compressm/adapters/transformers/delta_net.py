"""Adapters of the gated delta nets of transformers: the delta rule with a scalar decay per head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from compressm.adapters.base import Basis, adapts_named, parameter_of
from compressm.adapters.memory import KEY_MAP, QUERY_MAP, Memory, Rows, Steps, convolved, normalised
from compressm.adapters.transformers.config import (
    PACKAGE,
    configs_of,
    renewed_configs,
    require_attributes,
    shown,
    whole_sequences,
)
from compressm.adapters.transformers.mapped import MappedAdapter, MappedDeltaNet, window_bytes
from compressm.errors import AdapterError, unmerged

_CONVOLUTION = "conv1d.weight"


class DeltaNetAdapter(MappedAdapter):
    """An adapter of gated delta nets: SiLU and an L2 norm over key dimensions follow projection and convolution.

    The value heads of a key head share its keys and queries. Queries are divided by √n, which the norm behind the
    read-out cancels, except for its ε: r of n states give the output of the norm with ε r/n. All norms of a model share
    the config's ε, so it stays as it is, and a file gives the model that was saved; a cut warns where it counts. Maps
    stand before the L2 norms: keys keep the length 1, and the norm behind the read-out cancels the lengths of queries.
    """

    STORES = frozenset({Basis.MAPPED, Basis.SELECTED})
    FORWARD = MappedDeltaNet
    ERASES = True
    STATE_AXIS = -2
    SIZE = "linear_key_head_dim"
    SHARED = frozenset({"config"})
    # The norm behind the read-out, and the projection behind it.
    NORM: ClassVar[str] = "norm"
    OUT: ClassVar[str] = "out_proj"

    def projections(self, module: nn.Module) -> tuple[dict[str, Rows], tuple[str, Tensor]]:
        """The rows of keys and queries in projections, and the name and rows (key heads, rows) of that of values."""
        heads, order, values = _sizes(self, module)
        places = torch.arange(2 * heads * order + heads * values, device=module.get_parameter(_CONVOLUTION).device)
        queries, keys, rest = torch.split(places, [heads * order, heads * order, heads * values])
        name = "in_proj_qkv.weight"
        return {name: Rows(keys.view(heads, -1), queries.view(heads, -1))}, (name, rest.view(heads, -1))

    def inputs(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values before the convolution, and the gate of the read-out."""
        return module.in_proj_qkv(x), module.in_proj_z(x)

    def gates(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """The strength β and the step before its softplus, for every value head: (batch, length, heads)."""
        return torch.sigmoid(_applied(module.in_proj_b, x)), _applied(module.in_proj_a, x)

    def read_out(self, module: nn.Module, y: Tensor, gate: Tensor, shape: torch.Size) -> Tensor:
        """The norm with its gate, and the projection of its output."""
        normed = module.get_submodule(self.NORM)(y, gate.reshape(y.shape))
        found: Tensor = module.get_submodule(self.OUT)(normed.reshape(*shape[:2], -1))
        return found

    def rows(self, module: nn.Module) -> dict[str, Rows]:
        heads, order, _ = _sizes(self, module)
        places = torch.arange(2 * heads * order, device=module.get_parameter(_CONVOLUTION).device)
        queries, keys = places.view(2, heads, order)
        return {**self.projections(module)[0], _CONVOLUTION: Rows(keys, queries)}

    def read(self, module: nn.Module) -> Memory:
        names = {name for name, _ in module.named_parameters()}
        needed = {_CONVOLUTION, "A_log", "dt_bias", f"{self.OUT}.weight", f"{self.NORM}.weight"}
        if missing := sorted({*self.JOINS.values(), *needed} - names):
            raise AdapterError(
                f"{shown(module)} has no {', '.join(missing)}: expected a gated delta net{unmerged(names)}"
            )
        if "conv1d.bias" in names or module.activation != "silu":
            raise AdapterError(
                f"{shown(module)} has a bias or another activation than SiLU, which {self} does not know"
            )
        require_attributes(self, module, self.attributes(module, self.order(module)))
        return super().read(module)

    def attributes(self, module: nn.Module, order: int) -> dict[str, Any]:
        heads, now, values = _sizes(self, module)
        order = now if self.maps(module) is not None else order  # maps follow all rows
        channels = 2 * heads * order + heads * values
        own = {
            f"{name.partition('.')[0]}.out_features": len(parameter_of(module, name))
            - len(rows.places) * heads * (now - order)
            for name, rows in self.projections(module)[0].items()
        }
        sizes = {f"conv1d.{size}": channels for size in ("in_channels", "out_channels", "groups")}
        return {"head_k_dim": order, "key_dim": heads * order, "conv_dim": channels, **own, **sizes}

    def norm_eps(self, module: nn.Module) -> float:
        norm: Any = module.get_submodule(self.NORM)
        return float(norm.variance_epsilon)

    def output_gain(
        self, module: nn.Module, queries: Float[Tensor, "batch bank length r"]
    ) -> Float[Tensor, "batch bank length"]:
        """The module's own queries have the length 1/√r, behind maps too."""
        return 1 / (queries.square().sum(-1).clamp_min(1e-30) * queries.shape[-1]).sqrt()

    def state_bytes(self, module: nn.Module, order: int) -> int:
        """A whole window of the convolution in the dtype of the model, and states in float32, as caches keep them."""
        heads, now, values = _sizes(self, module)
        rows = now if self.maps(module) is not None else order
        return window_bytes(module, 2 * heads * rows + heads * values) + 4 * order * heads * values

    def mapped_state_bytes(self, module: nn.Module, order: int) -> int:
        heads, now, values = _sizes(self, module)
        return window_bytes(module, 2 * heads * now + heads * values) + 4 * order * heads * values

    def steps(
        self, module: nn.Module, x: Float[Tensor, "batch length width"], memory: Memory, counted: Tensor | None = None
    ) -> Steps:
        heads, order, _ = _sizes(self, module)
        given = x if counted is None else torch.where(counted[..., None], x, 0)
        _, (name, places) = self.projections(module)
        taps = parameter_of(module, _CONVOLUTION).detach()[2 * heads * order :]
        values = silu(convolved(given, parameter_of(module, name).detach()[places.flatten()], taps))
        strength, step = (part.detach() for part in self.gates(module, given))
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
            strength.mT.reshape(batch, heads, per_head, length),
        )

    def queries_and_keys(
        self, module: nn.Module, x: Float[Tensor, "batch length width"], memory: Memory, counted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        given = x if counted is None else torch.where(counted[..., None], x, 0)
        found = []
        for rows in (memory.queries, memory.keys):
            (name,) = rows.keys() - {_CONVOLUTION}
            part = silu(convolved(given, rows[name].flatten(0, 1), rows[_CONVOLUTION].flatten(0, 1)))
            part = part.view(*x.shape[:2], memory.bank, -1).transpose(1, 2)
            found.append(normalised(part))
        # Divided by the same number for every order: the norm behind the read-out cancels it.
        return found[0] / _sizes(self, module)[1] ** 0.5, found[1]

    def through_maps(self, queries: Tensor, keys: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Keys get the length 1 again; the norm behind the read-out cancels the lengths of queries."""
        queries, keys = super().through_maps(queries, keys, memory)
        return queries, normalised(keys)

    def observed(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Bool[Tensor, "batch length"] | None]:
        return whole_sequences(module, args, kwargs)

    def renewed(self, model: nn.Module, modules: Sequence[nn.Module]) -> list[tuple[Any, str, Any]]:
        return renewed_configs(model, configs_of(model, self.SIZE), self.SIZE, self, self.rows_and_maps)


def _sizes(adapter: DeltaNetAdapter, module: Any) -> tuple[int, int, int]:
    """The number of key heads, the order, and the rows of values for every key head, from the parameters."""
    heads, values = int(module.num_k_heads), parameter_of(module, f"{adapter.OUT}.weight").shape[1]
    rows = len(parameter_of(module, _CONVOLUTION))
    order, rest = divmod(rows - values, 2 * heads)
    if rest or order < 1 or values % heads:
        raise AdapterError(f"{shown(module)} has {rows} rows in conv1d, expected {values} + 2 · {heads} heads · states")
    return heads, order, values // heads


def _applied(part: Any, x: Tensor) -> Tensor:
    """The output of a linear module, in the dtype of x."""
    found: Tensor = part(x) if part.weight.dtype == x.dtype else x @ part.weight.to(x).mT
    return found


@adapts_named(f"{PACKAGE}.models.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet")
@adapts_named(f"{PACKAGE}.models.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet")
@adapts_named(f"{PACKAGE}.models.qwen4_exp.modeling_qwen4_exp.Qwen4ExpTextGatedDeltaNet")
@final
class QwenDeltaNetAdapter(DeltaNetAdapter):
    """The adapter of the gated delta nets of Qwen3.5 and later."""

    JOINS: ClassVar[Mapping[str, str]] = dict.fromkeys((KEY_MAP, QUERY_MAP), "in_proj_qkv.weight")


@adapts_named(f"{PACKAGE}.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet")
@final
class Qwen3NextDeltaNetAdapter(DeltaNetAdapter):
    """The adapter of Qwen3NextGatedDeltaNet, whose projections hold [q, k, v, z] and [b, a] by key head."""

    JOINS: ClassVar[Mapping[str, str]] = dict.fromkeys((KEY_MAP, QUERY_MAP), "in_proj_qkvz.weight")

    def projections(self, module: nn.Module) -> tuple[dict[str, Rows], tuple[str, Tensor]]:
        heads, order, values = _sizes(self, module)
        name = "in_proj_qkvz.weight"
        places = torch.arange(len(parameter_of(module, name)), device=parameter_of(module, name).device).view(heads, -1)
        queries, keys, rest, _ = torch.split(places, [order, order, values, values], dim=1)
        return {name: Rows(keys, queries)}, (name, rest)

    def inputs(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        heads, order, values = _sizes(self, module)
        by_head = module.in_proj_qkvz(x).view(*x.shape[:2], heads, -1)
        *parts, gate = torch.split(by_head, [order, order, values, values], dim=-1)
        return torch.cat([part.flatten(2) for part in parts], dim=-1), gate.flatten(2)

    def gates(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        found = _applied(module.in_proj_ba, x).view(*x.shape[:2], int(module.num_k_heads), -1)
        strength, step = found.chunk(2, dim=-1)
        return torch.sigmoid(strength).flatten(2), step.flatten(2)


@adapts_named(f"{PACKAGE}.models.olmo_hybrid.modeling_olmo_hybrid.OlmoHybridGatedDeltaNet")
@final
class OlmoHybridDeltaNetAdapter(DeltaNetAdapter):
    """The adapter of OlmoHybridGatedDeltaNet, with a projection for each part; β goes up to 2 if the config says so."""

    JOINS: ClassVar[Mapping[str, str]] = {KEY_MAP: "k_proj.weight", QUERY_MAP: "q_proj.weight"}
    NORM, OUT = "o_norm", "o_proj"

    def projections(self, module: nn.Module) -> tuple[dict[str, Rows], tuple[str, Tensor]]:
        heads, order, values = _sizes(self, module)
        every = torch.arange(heads * max(order, values), device=module.get_parameter(_CONVOLUTION).device)
        own, rest = every[: heads * order].view(heads, -1), every[: heads * values].view(heads, -1)
        return {"q_proj.weight": Rows(None, own), "k_proj.weight": Rows(own, None)}, ("v_proj.weight", rest)

    def inputs(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], dim=-1), module.g_proj(x)

    def gates(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        most = 2 if module.allow_neg_eigval else 1
        return most * torch.sigmoid(_applied(module.b_proj, x)), _applied(module.a_proj, x)
