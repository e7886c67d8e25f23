"""The family of linear layers (LRU, S5, S4D): balanced truncation of systems that do not change over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters import SSMAdapter
from compressm.adapters.base import encode_with, read_with, stacked_parameters, stacking_key
from compressm.control import ControlError, DiagonalSystem, fold
from compressm.control.balancing import GramianPair, hankel_values
from compressm.control.hankel import gramian_pair
from compressm.control.linear_algebra import each
from compressm.control.norms import distance_bound
from compressm.control.system import LinearSystem
from compressm.errors import CompressionError
from compressm.families.base import Change, Family, Layer, PlannedCut, Total, Values, Writing, energy_lost, reads
from compressm.families.choices import Choices, Largest
from compressm.families.linear.observer import LinearObserver, SequenceObserver, scaled_gramian, squared_change
from compressm.families.linear.reduction import BasisChange, Triple, drop_modes, reduce_system, sorted_sizes
from compressm.families.linear.transport import ModuleChange
from compressm.families.observing import ZERO_INPUTS, Observations, ratio_of
from compressm.layers.base import StateMap

Item = TypeVar("Item")
Result = TypeVar("Result")

# The least 1 − |λ|² of a mode: below it |λ| is 1 in float64, and a change of basis could make it unstable.
_LEAST_DECAY = torch.finfo(torch.float64).eps


class SystemLayer(Layer):
    """A layer with a fixed system, observed or not; subclasses are dataclasses with `observations`."""

    system: LinearSystem
    observations: Observations | None

    @property
    def order(self) -> int:
        return self.system.order

    @property
    def why_zero(self) -> str:
        for name, part in (("B", self.system.B), ("C", self.system.C)):
            if not bool(part.any()):
                return f"{name} is zero"
        return ZERO_INPUTS if self.observations is not None and self.observations.are_zeros else super().why_zero

    @cached_property
    def measured(self) -> tuple[Tensor, Tensor]:
        """The measured P over scale², and the scale, a power of two."""
        assert self.observations is not None
        return scaled_gramian(self.observations)

    def with_observations(self, observer: SequenceObserver) -> Any:
        return self._observed(observer.observations)

    def imagined(self) -> Any:
        return self

    def over(self, total: Total) -> Any:
        return self if self.observations is None else self._observed(self.observations.over(total))

    def _observed(self, observations: Observations) -> Any:
        return replace(self, observations=observations)  # type: ignore[type-var]  # every layer is a dataclass


@final
@dataclass(frozen=True)
class LinearLayer(SystemLayer):
    """A module, its system as it is read and as it is balanced, and its observations if there is data."""

    name: str
    module: nn.Module
    adapter: SSMAdapter[Any]
    system: DiagonalSystem
    balanced: DiagonalSystem
    observations: Observations | None = None
    # The Gramians of all layers whose spectra were computed together, if they were kept, and the place of this layer.
    kept: list[tuple[GramianPair, int]] = field(default_factory=list, compare=False, repr=False)

    @property
    def shape(self) -> tuple[object, ...]:
        return (*self.system.B.shape, self.system.outputs, self.system.device)

    @property
    def linear_system(self) -> DiagonalSystem:
        return self.balanced

    def observer(self, choices: Choices) -> LinearObserver:
        return LinearObserver(Observations(self.name), self.module, self.balanced, choices.measurement)

    def observing_noise(self, choices: Choices) -> LinearLayer:
        observer, device = self.observer(choices), self.system.device
        channels = self.system.bank[0] if self.system.bank else self.system.inputs
        # As many steps as are sampled at the default stride, as with real data; the generator is its own.
        shape = (8, max(64, 4 * self.order), channels)
        noise = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(0))
        observer.add(noise, None)
        found: LinearLayer = self.with_observations(observer)
        return found

    def stored(self, reduced: DiagonalSystem, bound: float | None) -> tuple[DiagonalSystem, float | None]:
        """The system that the module stores in place of a reduced one, and the bound of both errors together."""
        with torch.no_grad():
            stored = self.adapter.nearest(self.module, reduced)
        if stored is reduced or bound is None:
            return stored, bound
        return stored, bound + float(distance_bound(reduced, stored).max())

    def received(self, sent: Any) -> LinearCut:
        system, change, bound, lost = sent
        device = self.system.device
        return LinearCut(self, system.to(device), change.to(device), bound, None, lost)


@final
@dataclass(frozen=True)
class LinearCut(PlannedCut):
    """A layer's reduced system, the change of basis that leads to it, and its error."""

    layer: LinearLayer
    system: DiagonalSystem
    basis: BasisChange
    error_bound: float | None
    measured_error: float | None
    energy_lost: float

    @property
    def rank(self) -> int:
        return self.system.order

    def change(self, values: Values | None = None) -> ModuleChange:
        layer = self.layer
        writing = Writing.of(layer.module, layer.adapter, self.system, self.rank, values)
        return ModuleChange(layer.module, layer.adapter, layer.system, self.system, self.basis, writing)

    @classmethod
    def changes(cls, cuts: Sequence[LinearCut]) -> list[Change]:
        """The changes of all cuts; modules that can be stacked are encoded together."""
        found: dict[str, Change] = {}
        for group in _grouped(
            cuts, lambda cut: (stacking_key(cut.layer.module, cut.layer.adapter) or id(cut), cut.rank)
        ):
            first = group[0].layer
            if len(group) == 1:
                found[first.name] = group[0].change()
                continue
            systems = DiagonalSystem.stack([cut.system for cut in group])
            with torch.no_grad():
                present = stacked_parameters([cut.layer.module for cut in group])
                values = encode_with(first.adapter, first.module, present, systems)
            for k, cut in enumerate(group):
                found[cut.layer.name] = cut.change({name: value[k].clone() for name, value in values.items()})
        return [found[cut.layer.name] for cut in cuts]

    def following(self, module: nn.Module, adapter: SSMAdapter[Any]) -> Writing:
        moved = self.basis.vector(Triple.of(read_with(adapter, module)))
        stored = adapter.nearest(module, DiagonalSystem(moved.poles, moved.B, moved.C))
        return Writing.of(module, adapter, stored, self.rank)

    @torch.no_grad()
    def state_map(self, module: nn.Module, adapter: SSMAdapter[Any], values: Values) -> StateMap:
        moved = self.basis.vector(Triple.of(read_with(adapter, module)))
        basis = self.basis.onto(moved, Triple.of(read_with(adapter, module, values)))

        def carried(state: Float[Tensor, "batch 2 *bank n"]) -> Float[Tensor, "batch 2 *bank r"]:
            h = basis.state(torch.complex(*state.double().unbind(1)))
            return torch.stack([h.real, h.imag], dim=1).to(state.dtype)

        return carried

    def sent(self) -> Any:
        return self.system.to("cpu"), self.basis.to("cpu"), self.error_bound, self.energy_lost

    def squared_change(self) -> Float[Tensor, "2"] | None:
        observations = self.layer.observations
        return None if observations is None else squared_change(self.layer.system, self.system, observations)


@reads(SSMAdapter)
@final
class LinearFamily(Family):
    """Balanced truncation of fixed systems; layers of equal shape go through one batched call."""

    called = "linear layers"
    has_poles = True
    uses = frozenset({"fold"})

    def read(self, name: str, module: nn.Module, adapter: SSMAdapter[Any], choices: Choices) -> LinearLayer:
        system = read_with(adapter, module).detach()
        least = float(system.decay.min())
        if not least >= _LEAST_DECAY:
            raise CompressionError(
                f"{name or 'the model'}: the largest pole modulus is 1 up to rounding, 1 - |λ|² = {least:.3g}, expected"
                f" < 1 by at least {_LEAST_DECAY:.3g}"
            )
        return LinearLayer(name, module, adapter, system, fold(system) if choices.fold else system)

    def is_bounded(self, choices: Choices) -> bool:
        return not choices.is_measured

    def spectra(self, layers: Sequence[LinearLayer], choices: Choices) -> dict[str, Float[Tensor, "*bank n"]]:
        """Hankel singular values, or, with `Modal`, sizes of modes."""
        found: dict[str, Tensor] = {}
        for group in _grouped(layers, lambda layer: layer.shape):
            sigma = _by_name(group, lambda part: _values(part, choices)).cpu()
            found |= {layer.name: values for layer, values in zip(group, sigma, strict=True)}
        return found

    def plan(
        self,
        layers: Sequence[LinearLayer],
        orders: Mapping[str, Any],
        spectra: Mapping[str, Tensor],
        choices: Choices,
        salt: int,
    ) -> dict[str, PlannedCut]:
        groups = _grouped(layers, lambda layer: (*layer.shape, orders[layer.name]))
        parts = each(
            lambda group: _by_name(group, lambda part: _plan_group(part, orders[part[0].name], spectra, choices, salt)),
            groups,
        )
        return {name: cut for part in parts for name, cut in part.items()}


def _values(group: list[LinearLayer], choices: Choices) -> Tensor:
    if choices.is_modal:
        return sorted_sizes(DiagonalSystem.stack([layer.system for layer in group]))
    pair = _pair(group, choices)
    for k, layer in enumerate(group):
        layer.kept[:] = [(pair, k)] if choices.cutting else []
    sigma = (pair.values if choices.cutting else hankel_values(pair)) * pair.sigma_scale
    sigma = sigma.reshape(len(group), *group[0].balanced.poles.shape)
    return sigma * torch.stack([layer.measured[1] for layer in group])[..., None] if choices.is_measured else sigma


def _pair(group: list[LinearLayer], choices: Choices) -> GramianPair:
    """The exact Q of every layer, and its exact or measured P, over scale²."""
    P = torch.stack([layer.measured[0] for layer in group]) if choices.is_measured else None
    return gramian_pair(DiagonalSystem.stack([layer.balanced for layer in group]), P)


def _known_pair(group: list[LinearLayer], choices: Choices) -> GramianPair:
    """The same, by the spectra of these layers if they were kept: most of the work is done already."""
    pairs = {id(pair): pair for layer in group for pair, _ in layer.kept}
    if len(pairs) != 1 or not all(layer.kept for layer in group):
        return _pair(group, choices)
    (pair,), size = pairs.values(), group[0].system.bank.numel()
    members = [place * size + k for layer in group for _, place in layer.kept for k in range(size)]
    everything = members == list(range(len(pair.P)))
    return pair if everything else pair[torch.tensor(members, device=pair.P.device)]


def _by_name(group: list[LinearLayer], work: Callable[[list[LinearLayer]], Result]) -> Result:
    """The result of `work` on the group; if it fails, the error names the layer for which it fails alone."""
    try:
        return work(group)
    except ControlError as error:
        for layer in group if len(group) > 1 else ():
            _by_name([layer], work)
        raise CompressionError(f"{', '.join(layer.said for layer in group)}: {error}") from error


def _plan_group(
    group: list[LinearLayer], rank: int, spectra: Mapping[str, Tensor], choices: Choices, salt: int
) -> dict[str, LinearCut]:
    kept = [choices.select(spectra[layer.name], rank, salt=f"{layer.name}@{salt}") for layer in group]
    systems, states = DiagonalSystem.stack([layer.system for layer in group]), None
    if not isinstance(choices.select, Largest):
        # (layers, *bank, r).
        bank = group[0].system.bank
        states = torch.stack(kept).reshape(len(kept), *[1] * len(bank), -1).expand(-1, *bank, -1)
    if choices.is_modal:
        reduction = drop_modes(systems, rank, states)
    else:
        pair = _known_pair(group, choices)
        reduction = reduce_system(systems, rank, states=states, fold=choices.fold, pair=pair)
    bounds: list[float | None] = [None] * len(group)
    if reduction.error_bound is not None:
        bounds = reduction.error_bound.reshape(len(group), -1).amax(-1).tolist()
    cuts = []
    for k, layer in enumerate(group):
        lost = energy_lost(spectra[layer.name], kept[k])
        system, bound = layer.stored(reduction.system[k], bounds[k])
        cuts.append(LinearCut(layer, system, reduction.change[k], bound, None, lost))
    squares = [square for cut in cuts if (square := cut.squared_change()) is not None]
    if squares:  # of all layers, or of none
        ratios = map(ratio_of, torch.stack(squares).cpu())
        cuts = [replace(cut, measured_error=ratio) for cut, ratio in zip(cuts, ratios, strict=True)]
    return {cut.layer.name: cut for cut in cuts}


def _grouped(items: Sequence[Item], key: Callable[[Item], object]) -> list[list[Item]]:
    groups: dict[object, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
