"""Forms in which a cut of a matrix state can be stored: from moments over data to values of states and a reduction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compressm.adapters import Basis
from compressm.adapters.memory import Memory, MemoryAdapter
from compressm.control import memory as matrix_states
from compressm.control.memory import MemoryBasis
from compressm.errors import CompressionError
from compressm.families.base import ComparedForm
from compressm.families.choices import require_count
from compressm.families.fitting import halves
from compressm.families.memory import simulation
from compressm.families.memory.observer import MemoryObservations
from compressm.families.memory.reduction import MemoryReduction
from compressm.families.memory.simulation import fitted_rows, sequences_together, squared_change
from compressm.families.observing import Sample, ratio_of


@final
@dataclass(frozen=True)
class ObservedMemory:
    """A layer's memory and its observations."""

    module: nn.Module
    adapter: MemoryAdapter[Any]
    memory: Memory
    observations: MemoryObservations

    @property
    def moments(self) -> tuple[Float[Tensor, "bank n n"], Float[Tensor, "bank n n"]]:
        """P = E[S Sᵀ] and Q = E[q qᵀ], divided by powers of two, 1 for ordinary sizes."""
        return self.observations.moments(self.memory.order)

    @property
    def mean_gates(self) -> Float[Tensor, "bank n"]:
        """The mean gate of every key dimension over the sample; ½ without one."""
        total = torch.zeros(self.memory.bank, self.memory.order, dtype=torch.float64, device=self.memory.device)
        count, sample = 0, self.observations.sample
        for x, counts in sample.parts(sequences_together(sample.longest, self.memory, 1, 1)):
            logs = self.adapter.log_gates(self.module, x, self.memory, counts)
            assert logs is not None
            total += torch.where(counts[:, None, :, None], torch.exp(logs), 0).sum((0, 2))
            count += int(counts.sum())
        return total / count if count else total + 0.5

    def error(self, reduction: MemoryReduction, sample: Sample | None = None) -> float:
        """‖o_new − o_old‖ / ‖o_old‖ on the sample, or on another one."""
        return ratio_of(self.squared_change(reduction, sample))

    def squared_change(self, reduction: MemoryReduction, sample: Sample | None = None) -> Float[Tensor, "2"]:
        """‖o_new − o_old‖² and ‖o_old‖², in the layer's units; a fit is judged by sequences that it has not seen."""
        if sample is None:
            sample = self.observations.sample if reduction.fitted is None else halves(self.observations.sample)[1]
        new, unit = reduction.applied(self.memory), self.observations.unit
        return squared_change(self.adapter, self.module, self.memory, new, sample, unit)


def changed_by_eps(layer: ObservedMemory, reduction: MemoryReduction) -> float:
    """The change of the output of a norm behind the read-out, whose ε stays; 0 without such a norm."""
    eps = layer.adapter.norm_eps(layer.module)
    if eps is None:
        return 0.0
    new, sample = reduction.applied(layer.memory), layer.observations.sample
    return simulation.changed_by_eps(layer.adapter, layer.module, layer.memory, new, sample, eps)


class Form(ABC):
    """A way to store a cut of a layer with a matrix state."""

    # The basis change that a layer must be able to store.
    needs: ClassVar[Basis]

    def needed(self) -> Basis:
        """The basis change that this choice needs."""
        return self.needs

    def require(self, name: str, module: nn.Module, adapter: MemoryAdapter[Any], memory: Memory) -> None:
        """Refuse by name a layer that cannot store the result."""
        stores = adapter.stores(module)
        if self.needed() not in stores:
            others = [kind.__name__ for kind in (Folded, Mapped, Fitted, Selected) if kind.needs in stores]
            raise CompressionError(
                f"{name}: a {type(module).__name__} cannot store {self.needed().value}, which {self} needs; expected"
                f" form={'() or '.join(others)}()"
            )
        if memory.key_map is not None and not isinstance(self, Mapped | Selected):
            raise CompressionError(
                f"{name}: an earlier Mapped cut gave the layer maps; {self} cannot change those; expected form=Mapped()"
                " or Selected()"
            )

    def spectrum(self, layer: ObservedMemory) -> Float[Tensor, "bank n"]:
        """The mean square of every state's part of the output, falling, in units of the layer's moments."""
        return _scores(layer)

    @abstractmethod
    def reduce(self, layer: ObservedMemory, kept: Int[Tensor, " r"]) -> MemoryReduction:
        """The reduction to the states at these places of the spectrum."""


class _Balanced(Form):
    """A form that takes any W and T: the balanced ones, with the smallest error; with gates, `galerkin`."""

    def spectrum(self, layer: ObservedMemory) -> Float[Tensor, "bank n"]:
        return matrix_states.memory_values(*layer.moments).square()

    def _basis(self, layer: ObservedMemory, kept: Int[Tensor, " r"]) -> MemoryBasis:
        P, Q = layer.moments
        states = kept.to(P.device)
        if layer.adapter.GATED:
            return matrix_states.galerkin(P, Q, layer.mean_gates, len(kept), states=states)
        return matrix_states.balanced(P, Q, len(kept), states=states)


@final
@dataclass(frozen=True)
class Folded(_Balanced):
    """The balanced projection, multiplied into the layer's own weights: an ordinary smaller layer.

    It needs keys and queries that are linear in the input: no convolution, activation or norm may follow their
    projections. The rows of every new state have equal norms in keys and queries, so weight decay treats both alike.
    Gates of key dimensions are averaged, and so are their rows: only near the averages of gates.
    """

    needs = Basis.ANY

    def reduce(self, layer: ObservedMemory, kept: Int[Tensor, " r"]) -> MemoryReduction:
        basis = self._basis(layer, kept)
        new = MemoryReduction(basis.W, basis.T, mixing=basis.mixing).applied(layer.memory)
        norms = [_norms(list(part.values())) for part in (new.keys, new.queries)]
        return replace(_evened(basis, *norms), mixing=basis.mixing)


@final
@dataclass(frozen=True)
class Mapped(_Balanced):
    """The balanced projection, kept as two matrices per group that follow convolution and activation.

    It has the smallest error of all forms where `Folded` is impossible. The layer becomes one of this package. With a
    delta rule the projection is orthogonal: a state must be erased in the basis in which it is written.
    """

    needs = Basis.MAPPED

    def reduce(self, layer: ObservedMemory, kept: Int[Tensor, " r"]) -> MemoryReduction:
        if layer.adapter.ERASES:
            P, Q = layer.moments
            basis = matrix_states.orthogonal(P, Q, len(kept), states=kept.to(P.device))
            return MemoryReduction(basis.W, basis.T, mapped=True)
        basis = self._basis(layer, kept)
        return _evened(basis, _norms([basis.W.mT]), _norms([basis.T.mT]), mapped=True)


@final
@dataclass(frozen=True)
class Selected(Form):
    """States with the largest E[S Sᵀ]ᵢᵢ E[q qᵀ]ᵢᵢ stay as they are: an ordinary smaller layer.

    With `read_out` they are chosen one by one, each the one that lowers the error most, and the queries of kept states
    also read an estimate of the dropped ones. That needs queries which are linear in the input.
    """

    needs = Basis.SELECTED

    read_out: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.read_out, bool):
            raise CompressionError(f"Selected: read_out is {self.read_out!r}, expected True or False")

    def needed(self) -> Basis:
        return Basis.ANY if self.read_out else Basis.SELECTED

    def reduce(self, layer: ObservedMemory, kept: Int[Tensor, " r"]) -> MemoryReduction:
        return _selection(layer, kept, read_out=self.read_out)


@final
@dataclass(frozen=True)
class Fitted(Form):
    """A selection whose rows are then fitted to the layer's output: an ordinary smaller layer.

    Two selections are tried, by score and greedily; with gates, and keys and queries that are linear in the input, also
    `Folded`. `steps` of Adam fit the rows of keys, queries and gates, convolutions included, on three quarters of the
    sample; on the rest the fit must be better than its start to count.
    """

    needs = Basis.SELECTED

    steps: int = 80

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", require_count("Fitted: steps", self.steps))

    def reduce(self, layer: ObservedMemory, kept: Int[Tensor, " r"]) -> MemoryReduction:
        starts = [_selection(layer, kept)]
        if kept.tolist() == list(range(len(kept))):
            greedy = _selection(layer, kept, read_out=True)
            starts.append(MemoryReduction(greedy.W, greedy.W))
        if layer.adapter.GATED and Basis.ANY in layer.adapter.stores(layer.module):
            starts.append(Folded().reduce(layer, kept))
        if not layer.observations.sample.sequences:
            return starts[0]
        fitting, judging = halves(layer.observations.sample)
        start = min(starts, key=lambda one: layer.error(one, judging))
        begun = start.applied(layer.memory)
        rows = fitted_rows(layer.adapter, layer.module, layer.memory, begun, fitting, self.steps)
        keys, queries, gates = (
            {name: new[name] - rows_before for name, rows_before in before.items()}
            for new, before in zip(rows.parts, begun.parts, strict=True)
        )
        found = replace(start, fitted=(keys, queries, gates))
        return min(start, found, key=lambda one: layer.error(one, judging))


def default_form(adapter: MemoryAdapter[Any], module: nn.Module, memory: Memory) -> Form:
    """The form with the smallest error that the layer can store as it is."""
    if memory.key_map is not None:
        return Mapped()
    return Folded() if Basis.ANY in adapter.stores(module) and not adapter.GATED else Fitted()


def compared_forms(layer: ObservedMemory, order: int) -> list[ComparedForm]:
    """All forms of a cut to this order that make sense for the layer, each with its error on the same sequences."""
    kept, stores = torch.arange(order), layer.adapter.stores(layer.module)
    judging = halves(layer.observations.sample)[1]
    best: list[Form] = [Folded(), Selected(read_out=True)] if Basis.ANY in stores else []
    best += [Mapped()] if Basis.MAPPED in stores else []
    forms = [Mapped(), Selected()] if layer.memory.key_map is not None else [*best, Fitted(), Selected()]
    found = []
    for form in forms:
        values, reduction = form.spectrum(layer), form.reduce(layer, kept)
        whole = float(values.sum())
        share = float(values[:, order:].sum()) / whole if whole > 0 else 0.0
        is_balanced = isinstance(form, _Balanced) and not layer.adapter.ERASES and not layer.adapter.GATED
        estimate = share**0.5 if is_balanced else None
        found.append(ComparedForm(form, layer.error(reduction, judging), estimate, form.needed() in stores))
    return found


def _scores(layer: ObservedMemory) -> Float[Tensor, "bank n"]:
    P, Q = (moment.diagonal(dim1=-2, dim2=-1) for moment in layer.moments)
    return (P * Q).clamp_min(0).sort(dim=-1, descending=True).values


def _selection(layer: ObservedMemory, kept: Int[Tensor, " r"], *, read_out: bool = False) -> MemoryReduction:
    P, Q = layer.moments
    places = kept.to(P.device)
    # A greedy choice has no ranking: other states than the first ones are those of the score.
    is_first = kept.tolist() == list(range(len(kept)))
    basis = matrix_states.selected(P, Q, len(kept), read_out=read_out, states=None if is_first else places)
    return MemoryReduction(basis.W, basis.T)


def _norms(parts: list[Tensor]) -> Float[Tensor, "bank r"]:
    return (
        torch.stack([part.flatten(2).square().sum(-1) if part.ndim > 2 else part.square() for part in parts])
        .sum(0)
        .sqrt()
    )


def _evened(basis: MemoryBasis, of_keys: Tensor, of_queries: Tensor, *, mapped: bool = False) -> MemoryReduction:
    """The basis, every state scaled so that these norms become equal."""
    usable = (of_keys > 0) & (of_queries > 0)
    ratio = torch.where(usable, torch.sqrt(of_queries / torch.where(usable, of_keys, 1)), 1)[:, None, :]
    return MemoryReduction(basis.W * ratio, basis.T / ratio, mapped)
