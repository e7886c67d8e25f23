"""Adapters of layers with a matrix state: keys write to it, queries read it, and it decays.

A head has one decay, or a gate for every key dimension.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from compressm.adapters.base import Adapter, Basis, Module, finite_doubles, parameter_of
from compressm.control.memory import delta_values
from compressm.control.validation import ShapeError
from compressm.errors import AdapterError

_NORM_EPS = 1e-6
# Rows of keys, queries and gates, by the parameter's name.
Parts: TypeAlias = tuple[Mapping[str, Tensor], Mapping[str, Tensor], Mapping[str, Tensor]]
# Parameters of modules that keep maps.
KEY_MAP, QUERY_MAP = "key_map", "query_map"


@final
@dataclass(frozen=True)
class Steps:
    """The writes and reads of one call: S[t] = exp(log_decay) S[t−1] + k[t] v[t]ᵀ and o[t] = S[t]ᵀ q[t].

    All heads of a member of the bank share its keys and queries, and so a basis of the states. With `log_gates` every
    key dimension also decays by a gate of its own. With a `strength` β, the delta rule, what is written in place of
    v[t] is β[t] (v[t] − (exp(log_decay) S[t−1])ᵀ k[t]).
    """

    queries: Float[Tensor, "batch bank length n"]
    keys: Float[Tensor, "batch bank length n"]
    values: Float[Tensor, "batch bank heads length p"]
    log_decay: Float[Tensor, "batch bank heads length"]
    strength: Float[Tensor, "batch bank heads length"] | None = None
    log_gates: Float[Tensor, "batch bank length n"] | None = None

    @property
    def written(self) -> Steps:
        """The same steps without a strength: what the delta rule writes are the values."""
        if self.strength is None:
            return self
        values = delta_values(self.keys, self.values, self.log_decay, self.strength, self.log_gates)
        return replace(self, values=values, strength=None)


@final
@dataclass(frozen=True)
class Rows:
    """The rows of one parameter, on its first axis, that make keys, queries or gates of every member of the bank.

    None if the parameter makes none of them.
    """

    keys: Int[Tensor, "bank n"] | None = None
    queries: Int[Tensor, "bank n"] | None = None
    gates: Int[Tensor, "bank n"] | None = None

    @property
    def parts(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The rows of keys, of queries, and of gates."""
        return self.keys, self.queries, self.gates

    @property
    def places(self) -> list[Int[Tensor, "bank n"]]:
        """The rows of those that there are."""
        return [place for place in self.parts if place is not None]


@final
@dataclass(frozen=True)
class Memory:
    """The rows (bank, n, …) of all parameters that make keys, queries and gates, by the parameter's name, in float64.

    With maps, which follow everything else, keys become W⁰ᵀ k and queries T⁰ᵀ q.
    """

    keys: Mapping[str, Tensor]
    queries: Mapping[str, Tensor]
    key_map: Float[Tensor, "bank n r"] | None = None
    query_map: Float[Tensor, "bank n r"] | None = None
    gates: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def parts(self) -> Parts:
        """The rows of keys, of queries, and of gates."""
        return self.keys, self.queries, self.gates

    def with_parts(self, parts: Sequence[Mapping[str, Tensor]]) -> Memory:
        """The same maps with other rows of keys, queries and gates."""
        keys, queries, gates = parts
        return replace(self, keys=keys, queries=queries, gates=gates)

    @property
    def order(self) -> int:
        """The number of states."""
        return self.key_map.shape[-1] if self.key_map is not None else next(iter(self.keys.values())).shape[1]

    @property
    def bank(self) -> int:
        """The number of bases."""
        return next(iter(self.keys.values())).shape[0]

    @property
    def device(self) -> torch.device:
        return next(iter(self.keys.values())).device

    def detach(self) -> Memory:
        """Detach all tensors from the autograd graph."""
        keys, queries, gates = ({name: rows.detach() for name, rows in part.items()} for part in self.parts)
        of_keys, of_queries = (None if part is None else part.detach() for part in (self.key_map, self.query_map))
        return Memory(keys, queries, of_keys, of_queries, gates)


class MemoryAdapter(Adapter[Module, Memory]):
    """An adapter of modules with a matrix state that decays; their order is the number of key dimensions.

    A subclass says which rows of which parameters make keys and queries, and computes a call's steps from them. Modules
    whose keys and queries are linear in these rows have `Basis.ANY` in `STORES`: any change of basis can be multiplied
    into them. Behind a convolution or an activation only a selection can be stored.
    """

    STORES = frozenset({Basis.SELECTED})
    # True if the state erases by the delta rule: it must erase in the basis in which it writes, W = T.
    ERASES: ClassVar[bool] = False
    # True if every key dimension has a decay of its own, its gate, which only a selection leaves as it is.
    GATED: ClassVar[bool] = False

    def stores(self, module: Module) -> frozenset[Basis]:
        """The changes of basis that this module can store."""
        return self.STORES

    def query_gain(self, module: Module, order: int) -> float:
        """The factor of the rows of queries in a cut to this order, for modules that divide queries by its root."""
        return 1.0

    def norm_eps(self, module: Module) -> float | None:
        """ε of a norm behind the read-out, for modules whose outputs a cut multiplies; None if that changes nothing."""
        return None

    def output_gain(
        self, module: Module, queries: Float[Tensor, "batch bank length r"]
    ) -> Float[Tensor, "batch bank length"]:
        """The factor of the outputs of a smaller module, by queries of `steps`: it divides its own by another root."""
        return queries.new_full(queries.shape[:-1], (self.order(module) / queries.shape[-1]) ** 0.5)

    @abstractmethod
    def rows(self, module: Module) -> dict[str, Rows]:
        """The rows of every parameter that grows with the order; sizes come from the parameters alone."""

    @abstractmethod
    def steps(
        self, module: Module, x: Float[Tensor, "batch length width"], memory: Memory, counted: Tensor | None = None
    ) -> Steps:
        """The steps of a call with the input x, in its dtype, with these rows in place of the module's own.

        `counted` masks steps that are not padding. It is differentiable with respect to the rows. Maps of the memory
        are not applied: `mapped_steps` does that.
        """

    def queries_and_keys(
        self, module: Module, x: Float[Tensor, "batch length width"], memory: Memory, counted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The queries and keys of `steps`; a subclass that computes them alone makes fits and comparisons faster."""
        steps = self.steps(module, x, memory, counted)
        return steps.queries, steps.keys

    def log_gates(
        self, module: Module, x: Float[Tensor, "batch length width"], memory: Memory, counted: Tensor | None = None
    ) -> Float[Tensor, "batch bank length n"] | None:
        """The logarithms of the gates of a call, differentiable with respect to their rows; None without gates."""
        return None

    @abstractmethod
    def observed(
        self, module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Bool[Tensor, "batch length"] | None]:
        """The input x of a call with these arguments, and a mask of the steps that are not padding, None for all."""

    def maps(self, module: Module) -> tuple[Tensor, Tensor] | None:
        """The module's maps of keys and queries; None if it has none."""
        return None

    def mapped_state_bytes(self, module: Module, order: int) -> int:
        """The bytes that the state of one sequence takes at this order behind maps, before which all rows stay."""
        raise AdapterError(f"{self} does not say how large a mapped state is: define mapped_state_bytes")

    def order(self, module: Module) -> int:
        maps = self.maps(module)
        return next(iter(self.rows(module).values())).places[0].shape[-1] if maps is None else maps[0].shape[-1]

    def read(self, module: Module) -> Memory:
        rows = self.rows(module)
        values = dict(zip(rows, finite_doubles(module, rows), strict=True))
        maps = self.maps(module)
        keys, queries, gates = (
            {name: values[name][place] for name, own in rows.items() if (place := own.parts[part]) is not None}
            for part in range(3)
        )
        of_keys, of_queries = (None, None) if maps is None else (part.double() for part in maps)
        return Memory(keys, queries, of_keys, of_queries, gates)

    def encode(self, module: Module, system: Memory) -> dict[str, Tensor]:
        """Parameter values in float64, by name, with these rows; they may be fewer than the module has."""
        if not isinstance(system, Memory):
            raise AdapterError(f"encode takes a Memory, as read gives it, got a {type(system).__name__}")
        gain = self.query_gain(module, system.order)
        parts = (system.keys, {name: rows * gain for name, rows in system.queries.items()}, system.gates)
        values = {
            name: with_rows(name, parameter_of(module, name), own, [part.get(name) for part in parts])
            for name, own in self.rows(module).items()
        }
        maps = {KEY_MAP: system.key_map, QUERY_MAP: system.query_map}
        return values | {name: value for name, value in maps.items() if value is not None}

    def mapped_steps(self, module: Module, x: Tensor, memory: Memory, counted: Tensor | None = None) -> Steps:
        """The steps of a call, with the memory's maps applied."""
        steps = self.steps(module, x, memory, counted)
        queries, keys = self._mapped(steps.queries, steps.keys, memory)
        return replace(steps, queries=queries, keys=keys)

    def steps_with(self, steps: Steps, module: Module, x: Tensor, memory: Memory, counted: Tensor | None) -> Steps:
        """The given steps with the queries, keys and gates of another memory."""
        queries, keys = self._mapped(*self.queries_and_keys(module, x, memory, counted), memory)
        return replace(steps, queries=queries, keys=keys, log_gates=self.log_gates(module, x, memory, counted))

    def _mapped(self, queries: Tensor, keys: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        return (queries, keys) if memory.key_map is None else self.through_maps(queries, keys, memory)

    def through_maps(self, queries: Tensor, keys: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Queries and keys behind the memory's maps."""
        assert memory.key_map is not None
        assert memory.query_map is not None
        return queries @ memory.query_map.to(queries), keys @ memory.key_map.to(keys)


def with_rows(name: str, parameter: Tensor, rows: Rows, parts: Sequence[Tensor | None]) -> Tensor:
    """The parameter, or a moment of it, in float64 with new rows for keys, queries and gates, which may be fewer."""
    value, order = parameter.double(), 0
    for place, new in zip(rows.parts, parts, strict=True):
        if place is None:
            continue
        order = 0 if new is None else new.shape[1]
        expected = (len(place), order, *parameter.shape[1:])
        if new is None or tuple(new.shape) != expected or not 1 <= order <= place.shape[1]:
            came = "no rows" if new is None else f"rows of shape {tuple(new.shape)}"
            raise ShapeError(f"{name} gets {came}, expected {expected} with 1 to {place.shape[1]} states")
        value = value.index_put((place[:, :order],), new.to(value))
    return value[rows_that_stay(rows, order, len(value))]


def rows_that_stay(rows: Rows, order: int, count: int) -> Bool[Tensor, " count"]:
    """A mask of all `count` rows of a parameter without those of states beyond the order."""
    places = rows.places
    stays = torch.ones(count, dtype=torch.bool, device=places[0].device)
    stays[torch.cat([place[:, order:] for place in places])] = False
    return stays


def convolved(
    x: Tensor, projection: Tensor, kernel: Tensor | None = None, shift: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Projections of x behind a causal convolution of single channels, if there is a kernel: (batch, length, rows).

    `bias` is added to the projections, `shift` to the convolution.
    """
    found = x @ projection.to(x).mT
    found = found if bias is None else found + bias.to(x)
    if kernel is None:
        return found
    taps = kernel.to(x).reshape(len(projection), -1)
    past = pad(found, (0, 0, taps.shape[-1] - 1, 0))
    # Tap by tap: torch has no fast convolution of single channels in float64.
    found = torch.stack([past[:, j : j + x.shape[1]] * taps[:, j] for j in range(taps.shape[-1])]).sum(0)
    return found if shift is None else found + shift.to(x)


def normalised(x: Tensor) -> Tensor:
    """Vectors of length 1, by the L2 norm with ε that delta nets have."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
