"""Adapters of flash-linear-attention's layers with a matrix state; the package is not imported, its classes are named.

Each part has a projection of its own: q_proj, k_proj, v_proj, and q_conv1d, k_conv1d, v_conv1d if the layer convolves.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import elu, logsigmoid, relu, silu, softplus

from compressm.adapters.base import Basis, adapts_named, parameter_of
from compressm.adapters.memory import Memory, MemoryAdapter, Rows, Steps, convolved, normalised
from compressm.adapters.transformers.config import holders_of
from compressm.errors import AdapterError

PACKAGE = "fla"

# The names of the norm behind the read-out; a gate may follow in the same module.
_NORMS = ("o_norm", "g_norm_swish_gate", "g_norm")

Map = Callable[[Tensor], Tensor]


class FlaAdapter(MemoryAdapter[nn.Module]):
    """An adapter of layers of flash-linear-attention whose queries and keys have one head each for every key head.

    The layers divide queries by the root of the order. Where queries are linear their rows make up for it; elsewhere
    the norm behind the read-out cancels it, except for its ε; where that counts a cut warns.
    """

    SHARED = frozenset({"config"})

    @abstractmethod
    def sizes(self, module: Any, order: int) -> dict[str, Any]:
        """The arguments of the layer's constructor that say the order, as its config has them too."""

    @abstractmethod
    def gates(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logarithms of the decays, and the strength β of a delta rule: (batch, length, heads)."""

    @abstractmethod
    def activation(self, module: Any, part: str) -> Map:
        """The activation of the part "q", "k" or "v" behind its projection and convolution."""

    def normalised(self, x: Tensor) -> Tensor:
        """Queries or keys behind their norm over the states."""
        return x

    def rows(self, module: nn.Module) -> dict[str, Rows]:
        places = _places(module)
        names = {name for name, _ in module.named_parameters()}
        found: dict[str, Rows] = {}
        for part, own in (("q", Rows(queries=places)), ("k", Rows(keys=places))):
            of_part = (f"{part}_proj.weight", f"{part}_conv1d.weight", f"{part}_conv1d.bias")
            found |= {name: own for name in of_part if name in names}
        return found

    def read(self, module: nn.Module) -> Memory:
        heads, order = _heads_and_order(module)
        names = {name for name, _ in module.named_parameters()}
        if missing := sorted({"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"} - names):
            raise AdapterError(f"a {type(module).__name__} has no {', '.join(missing)}, expected a layer of {PACKAGE}")
        for path, value in self._counts(module, order).items():
            owner, leaf = self.place(module, path)
            if getattr(owner, leaf, None) != value:
                raise AdapterError(
                    f"a {type(module).__name__} has {path} {getattr(owner, leaf, None)!r}, but its parameters are for"
                    f" {heads} heads of {order} states: {value}"
                )
        return super().read(module)

    def attributes(self, module: nn.Module, order: int) -> dict[str, Any]:
        return self._counts(module, order) | self.sizes(module, order)

    def _counts(self, module: nn.Module, order: int) -> dict[str, int]:
        """Whole numbers that go with the order."""
        heads, _ = _heads_and_order(module)
        found = {"head_k_dim": order, "key_dim": heads * order}
        for part in "qk":
            found[f"{part}_proj.out_features"] = heads * order
            if f"{part}_conv1d.weight" in self.rows(module):
                sizes = ("in_channels", "out_channels", "groups", "hidden_size")
                found |= {f"{part}_conv1d.{size}": heads * order for size in sizes}
        return found

    def steps(
        self, module: nn.Module, x: Float[Tensor, "batch length width"], memory: Memory, counted: Tensor | None = None
    ) -> Steps:
        given = x if counted is None else torch.where(counted[..., None], x, 0)
        own = {name: value.detach() for name, value in module.named_parameters() if name.startswith("v_")}
        batch, length, _ = x.shape
        heads, _ = _heads_and_order(module)
        values = self._part(module, given, "v", own).view(batch, length, heads, -1, _value_size(module))
        log_decay, strength = self.gates(module, given)
        queries, keys = self.queries_and_keys(module, x, memory, counted)
        log_gates = self.log_gates(module, x, memory, counted)
        by_head = [
            None if part is None else part.detach().mT.reshape(batch, heads, -1, length)
            for part in (log_decay, strength)
        ]
        assert by_head[0] is not None
        return Steps(queries, keys, values.permute(0, 2, 3, 1, 4), by_head[0], by_head[1], log_gates)

    def queries_and_keys(
        self, module: nn.Module, x: Float[Tensor, "batch length width"], memory: Memory, counted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        given = x if counted is None else torch.where(counted[..., None], x, 0)
        found = []
        for part, rows in (("q", memory.queries), ("k", memory.keys)):
            own = self._part(module, given, part, {name: value.flatten(0, 1) for name, value in rows.items()})
            found.append(self.normalised(own.view(*x.shape[:2], memory.bank, -1).transpose(1, 2)))
        # Divided by the same number for every order.
        return found[0] / _heads_and_order(module)[1] ** 0.5, found[1]

    def log_gates(
        self, module: nn.Module, x: Float[Tensor, "batch length width"], memory: Memory, counted: Tensor | None = None
    ) -> Tensor | None:
        """The logarithms of the gates of key dimensions, if the layer has them."""
        return None

    def norm_eps(self, module: Any) -> float | None:
        if self.query_gain(module, 1) != 1:  # rows of queries make up for it
            return None
        norms = (getattr(module, name, None) for name in _NORMS)
        return next((float(norm.eps) for norm in norms if norm is not None), None)

    def _part(self, module: nn.Module, x: Tensor, part: str, rows: Mapping[str, Tensor]) -> Tensor:
        """The part behind projection, convolution and activation: (batch, length, rows)."""
        kernel, shift = (rows.get(f"{part}_conv1d.{leaf}") for leaf in ("weight", "bias"))
        return self.activation(module, part)(convolved(x, rows[f"{part}_proj.weight"], kernel, shift))

    def observed(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Bool[Tensor, "batch length"] | None]:
        return fla_input(module, args, kwargs)

    def state_bytes(self, module: nn.Module, order: int) -> int:
        """The windows of the convolutions in the dtype of the model, and states in float32, as caches keep them."""
        heads, _ = _heads_and_order(module)
        own = {part: getattr(module, f"{part}_conv1d", None) for part in "qkv"}
        windows = [
            (heads * order if part in "qk" else len(conv.weight)) * conv.weight.shape[-1] * conv.weight.element_size()
            for part, conv in own.items()
            if conv is not None
        ]
        return sum(windows) + 4 * order * len(parameter_of(module, "v_proj.weight"))

    def renewed(self, model: nn.Module, modules: Sequence[nn.Module]) -> list[tuple[Any, str, Any]]:
        return with_one_order(model, self, modules, self.sizes)


def fla_input(
    module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Bool[Tensor, "batch length"] | None]:
    """The input of a layer's call, and the mask of steps that are not padding; a call that continues is refused."""
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    cache, mask = given.get("past_key_values"), given.get("attention_mask")
    if cache is not None and len(cache) > module.layer_idx and cache[module.layer_idx] is not None:
        raise AdapterError(
            "calibrate continues from a cache, whose states are unknown: let it run the model on whole sequences,"
            " without generate"
        )
    if given.get("kwargs", {}).get("cu_seqlens") is not None:
        raise AdapterError("calibrate packs several sequences into one (cu_seqlens): expected one sequence a row")
    x: Tensor = given["hidden_states"]
    return x, None if mask is None else mask.bool()


def with_one_order(
    model: nn.Module,
    adapter: MemoryAdapter[Any],
    modules: Sequence[nn.Module],
    sizes: Callable[[Any, int], Mapping[str, Any]],
) -> list[tuple[Any, str, Any]]:
    """The writes that give configs the order of all layers, if they have one: a config has no place for others."""
    orders = {adapter.order(module) for module in modules}
    if len(orders) > 1:
        return []
    new = sizes(modules[0], orders.pop())
    held = {id(value): value for inner in model.modules() for value in vars(inner).values()}
    found = []
    for config in held.values():
        is_config = type(config).__module__.startswith(f"{PACKAGE}.models.") and new.keys() <= vars(config).keys()
        if is_config and any(getattr(config, name) != size for name, size in new.items()):
            renewed = copy.deepcopy(config)
            vars(renewed).update(new)
            found += [(owner, name, renewed) for owner, name in holders_of(model, config)]
    return found


def _heads_and_order(module: Any) -> tuple[int, int]:
    """The number of key heads, and the order, from the parameters."""
    if getattr(module, "num_kv_heads", module.num_heads) != module.num_heads:
        raise AdapterError(
            f"a {type(module).__name__} has {module.num_kv_heads} heads of keys for {module.num_heads} of queries,"
            " expected one each"
        )
    heads = int(module.num_heads)
    (queries, keys) = (len(parameter_of(module, f"{part}_proj.weight")) for part in "qk")
    if queries != keys or queries % heads:
        raise AdapterError(
            f"a {type(module).__name__} has {queries} rows of queries and {keys} of keys, expected {heads} · states"
        )
    return heads, queries // heads


def _value_size(module: Any) -> int:
    return int(module.head_v_dim)


def _applied(part: Any, x: Tensor) -> Tensor:
    found = x @ part.weight.to(x).mT
    return found if part.bias is None else found + part.bias.to(x)


def _places(module: nn.Module) -> Int[Tensor, "heads n"]:
    """The rows of every head in projections of queries, keys and gates."""
    heads, order = _heads_and_order(module)
    return torch.arange(heads * order, device=parameter_of(module, "q_proj.weight").device).view(heads, order)


def _plain(x: Tensor) -> Tensor:
    return x


class LinearAttentionAdapter(FlaAdapter):
    """An adapter of layers whose queries and keys are linear in the input without a convolution, and can be folded."""

    STORES = frozenset({Basis.ANY, Basis.SELECTED})
    SIZE = "expand_k"

    def stores(self, module: Any) -> frozenset[Basis]:
        return self.STORES - {Basis.ANY} if module.use_short_conv else self.STORES

    def query_gain(self, module: Any, order: int) -> float:
        return 1.0 if module.use_short_conv else (order / _heads_and_order(module)[1]) ** 0.5

    def read(self, module: Any) -> Memory:
        if module.feature_map_fn is not None:
            raise AdapterError(f"a {type(module).__name__} has a feature map, expected feature_map=None")
        return super().read(module)

    def sizes(self, module: Any, order: int) -> dict[str, Any]:
        return {"expand_k": order * module.num_heads / module.hidden_size}

    def _counts(self, module: nn.Module, order: int) -> dict[str, int]:
        found = super()._counts(module, order)
        return found | {"key_dim_per_group": found["key_dim"]}

    def activation(self, module: Any, part: str) -> Map:
        return silu if module.use_short_conv else _plain


class KeyGatedAdapter(FlaAdapter):
    """An adapter of layers with a gate for every key dimension."""

    GATED: ClassVar[bool] = True
    # The projection of the gates, and parameters that are added to it.
    GATE: ClassVar[str]
    ADDED: ClassVar[tuple[str, ...]]

    @abstractmethod
    def gate_of(self, module: Any, logits: Float[Tensor, "batch bank length n"]) -> Tensor:
        """The logarithms of gates from what their projection gives."""

    def rows(self, module: nn.Module) -> dict[str, Rows]:
        places = Rows(gates=_places(module))
        return super().rows(module) | dict.fromkeys((f"{self.GATE}.1.weight", *self.ADDED), places)

    def _counts(self, module: nn.Module, order: int) -> dict[str, int]:
        found = super()._counts(module, order)
        return found | {f"{self.GATE}.1.out_features": found["key_dim"]}

    def log_gates(
        self, module: nn.Module, x: Float[Tensor, "batch length width"], memory: Memory, counted: Tensor | None = None
    ) -> Tensor | None:
        given = x if counted is None else torch.where(counted[..., None], x, 0)
        code = given @ parameter_of(module, f"{self.GATE}.0.weight").detach().to(x).mT
        weight, *added = (memory.gates[name].to(x) for name in (f"{self.GATE}.1.weight", *self.ADDED))
        logits = code[:, None] @ weight.mT
        return self.gate_of(module, sum((one[:, None] for one in added), logits))


@adapts_named(f"{PACKAGE}.layers.simple_gla.SimpleGatedLinearAttention")
@final
class SimpleGLAAdapter(LinearAttentionAdapter):
    """The adapter of SimpleGatedLinearAttention: a scalar decay."""

    def gates(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return logsigmoid(_applied(module.gk_proj, x)) / module.gate_logit_normalizer, None


@adapts_named(f"{PACKAGE}.layers.gla.GatedLinearAttention")
@final
class GLAAdapter(KeyGatedAdapter, LinearAttentionAdapter):
    """The adapter of GatedLinearAttention: a gate for every key dimension."""

    GATE = "gk_proj"
    ADDED = ("gk_proj.1.bias",)

    def gates(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x.new_zeros(*x.shape[:2], module.num_heads), None

    def gate_of(self, module: Any, logits: Tensor) -> Tensor:
        logs = logsigmoid(logits) / module.gate_logit_normalizer
        return logs if module.clamp_min is None else logs.clamp_min(module.clamp_min)


_ACTIVATIONS: dict[str, Map] = {"silu": silu, "identity": _plain, "relu": relu, "elu": lambda x: elu(x) + 1}


@adapts_named(f"{PACKAGE}.layers.delta_net.DeltaNet")
@final
class FlaDeltaNetAdapter(FlaAdapter):
    """The adapter of DeltaNet: the delta rule without a decay, behind an L2 norm of queries and keys."""

    ERASES: ClassVar[bool] = True
    SIZE = "expand_k"

    def read(self, module: Any) -> Memory:
        if module.qk_norm != "l2":
            raise AdapterError(f"a {type(module).__name__} has qk_norm {module.qk_norm!r}, expected 'l2'")
        return super().read(module)

    def sizes(self, module: Any, order: int) -> dict[str, Any]:
        return {"expand_k": order * module.num_heads / module.hidden_size}

    def normalised(self, x: Tensor) -> Tensor:
        return normalised(x)

    def activation(self, module: Any, part: str) -> Map:
        return silu if part == "v" else _ACTIVATIONS[module.qk_activation]

    def gates(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        one = x.new_ones(*x.shape[:2], module.num_heads)
        strength = torch.sigmoid(_applied(module.b_proj, x)) if module.use_beta else one
        return 0 * one, (2 if module.allow_neg_eigval else 1) * strength


class HeadSizedAdapter(FlaAdapter):
    """An adapter of delta nets with the size of a head; that of values stays by `expand_v`, in sizes of heads."""

    ERASES: ClassVar[bool] = True
    SIZE = "head_dim"

    def sizes(self, module: Any, order: int) -> dict[str, Any]:
        ratio = module.head_v_dim / order
        # The constructor takes the whole part of the product, which may be rounded down.
        return {"head_dim": order, "expand_v": ratio if int(order * ratio) == module.head_v_dim else _above(ratio)}

    def normalised(self, x: Tensor) -> Tensor:
        return normalised(x)

    def activation(self, module: Any, part: str) -> Map:
        return silu

    def strength(self, module: Any, x: Tensor) -> Tensor:
        """β: (batch, length, heads)."""
        return (2 if module.allow_neg_eigval else 1) * torch.sigmoid(_applied(module.b_proj, x))


@adapts_named(f"{PACKAGE}.layers.gated_deltanet.GatedDeltaNet")
@final
class FlaGatedDeltaNetAdapter(HeadSizedAdapter):
    """The adapter of GatedDeltaNet: a scalar decay."""

    def gates(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        step = softplus(_applied(module.a_proj, x) + module.dt_bias.to(x))
        return -torch.exp(module.A_log.to(x)) * step, self.strength(module, x)


@adapts_named(f"{PACKAGE}.layers.kda.KimiDeltaAttention")
@final
class KDAAdapter(KeyGatedAdapter, HeadSizedAdapter):
    """The adapter of KimiDeltaAttention: a gate for every key dimension, and as many heads of values as of keys."""

    GATE = "f_proj"
    ADDED = ("dt_bias",)

    def read(self, module: Any) -> Memory:
        if module.num_v_heads != module.num_heads:
            raise AdapterError(
                f"a {type(module).__name__} has {module.num_v_heads} heads of values for {module.num_heads} of keys,"
                " each with gates of its own; expected one each"
            )
        return super().read(module)

    def _counts(self, module: nn.Module, order: int) -> dict[str, int]:
        found = super()._counts(module, order)
        return found | {"gate_dim": found["key_dim"]}

    def gates(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x.new_zeros(*x.shape[:2], module.num_heads), self.strength(module, x)

    def gate_of(self, module: Any, logits: Tensor) -> Tensor:
        rate = torch.exp(module.A_log.detach().to(logits))[:, None, None]
        if module.lower_bound is None:
            return -rate * softplus(logits)
        return float(module.lower_bound) * torch.sigmoid(rate * logits)


def _above(ratio: float) -> float:
    return math.nextafter(ratio, math.inf)
