"""The family of linear layers (LRU, S5, S4D): balanced truncation of systems that do not change over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters import SSMAdapter
from compressm.adapters.base import read_with
from compressm.control import ControlError, DiagonalSystem, fold, hankel_singular_values
from compressm.control.linear_algebra import each
from compressm.errors import CompressionError
from compressm.families.base import Family, Layer, PlannedCut, Total, Values, Writing, energy_lost, reads
from compressm.families.choices import Choices, Largest
from compressm.families.linear.observer import LinearObserver, scaled_gramian, squared_change
from compressm.families.linear.reduction import BasisChange, Triple, drop_modes, reduce_system, sorted_sizes
from compressm.families.linear.transport import ModuleChange
from compressm.families.observing import ZERO_INPUTS, Observations, ratio_of
from compressm.layers.parameters import StateMap

Result = TypeVar("Result")

# The least 1 − |λ|² of a mode: below it |λ| is 1 in float64, and a change of basis could make it unstable.
_LEAST_DECAY = torch.finfo(torch.float64).eps


@final
@dataclass(frozen=True)
class LinearLayer(Layer):
    """A module, its system as it is read and as it is balanced, and its observations if there is data."""

    name: str
    module: nn.Module
    adapter: SSMAdapter[Any]
    system: DiagonalSystem
    balanced: DiagonalSystem
    observations: Observations | None = None

    @property
    def order(self) -> int:
        return self.system.order

    @property
    def shape(self) -> tuple[object, ...]:
        return (*self.system.B.shape, self.system.outputs, self.system.device)

    @property
    def why_zero(self) -> str:
        for name, part in (("B", self.system.B), ("C", self.system.C)):
            if not bool(part.any()):
                return f"{name} is zero"
        return ZERO_INPUTS if self.observations is not None and self.observations.are_zeros else super().why_zero

    @property
    def linear_system(self) -> DiagonalSystem:
        return self.balanced

    def observer(self, choices: Choices) -> LinearObserver:
        return LinearObserver(Observations(self.name), self.module, self.balanced, choices.measurement)

    def with_observations(self, observer: LinearObserver) -> LinearLayer:
        return replace(self, observations=observer.observations)

    def imagined(self) -> LinearLayer:
        return self

    def over(self, total: Total) -> LinearLayer:
        return self if self.observations is None else replace(self, observations=self.observations.over(total))

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

    def change(self) -> ModuleChange:
        layer = self.layer
        writing = Writing.of(layer.module, layer.adapter, self.system, self.rank)
        return ModuleChange(layer.module, layer.adapter, layer.system, self.system, self.basis, writing)

    def following(self, module: nn.Module, adapter: SSMAdapter[Any]) -> Writing:
        moved = self.basis.vector(Triple.of(adapter.read(module)))
        return Writing.of(module, adapter, DiagonalSystem(moved.poles, moved.B, moved.C), self.rank)

    @torch.no_grad()
    def state_map(self, module: nn.Module, adapter: SSMAdapter[Any], values: Values) -> StateMap:
        moved = self.basis.vector(Triple.of(adapter.read(module)))
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
    uses = frozenset({"fold"})

    def read(self, name: str, module: nn.Module, adapter: SSMAdapter[Any], choices: Choices) -> LinearLayer:
        system = adapter.read(module).detach()
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
            sigma = _by_name(group, lambda part: _values(part, choices))
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
        return sorted_sizes(_stacked([layer.system for layer in group]))
    P, scale = _gramians(group, choices)
    sigma = hankel_singular_values(_stacked([layer.balanced for layer in group]), P=P)
    return sigma if scale is None else sigma * scale[..., None]


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
    systems, states = _stacked([layer.system for layer in group]), None
    if not isinstance(choices.select, Largest):
        # (layers, *bank, r).
        bank = group[0].system.bank
        states = torch.stack(kept).reshape(len(kept), *[1] * len(bank), -1).expand(-1, *bank, -1)
    if choices.is_modal:
        reduction = drop_modes(systems, rank, states)
    else:
        reduction = reduce_system(systems, rank, states=states, fold=choices.fold, P=_gramians(group, choices)[0])
    cuts = {}
    for k, layer in enumerate(group):
        bound = None if reduction.error_bound is None else float(reduction.error_bound[k].max())
        lost = energy_lost(spectra[layer.name], kept[k])
        cut = LinearCut(layer, reduction.system[k], reduction.change[k], bound, None, lost)
        squares = cut.squared_change()
        cuts[layer.name] = cut if squares is None else replace(cut, measured_error=ratio_of(squares))
    return cuts


def _gramians(group: list[LinearLayer], choices: Choices) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Measured Gramians over scale², and the scales, powers of two; None for exact Gramians."""
    if not choices.is_measured:
        return None, None
    found = [scaled_gramian(layer.observations) for layer in group if layer.observations is not None]
    P, scales = zip(*found, strict=True)
    return torch.stack(P), torch.stack(scales)


def _stacked(systems: list[DiagonalSystem]) -> DiagonalSystem:
    B, C = torch.stack([system.B for system in systems]), torch.stack([system.C for system in systems])
    logs = [system.log_poles for system in systems if system.log_poles is not None]
    if len(logs) == len(systems):
        return DiagonalSystem.from_log_poles(torch.stack(logs), B, C)
    return DiagonalSystem(torch.stack([system.poles for system in systems]), B, C)


def _grouped(layers: Sequence[LinearLayer], key: Callable[[LinearLayer], object]) -> list[list[LinearLayer]]:
    groups: dict[object, list[LinearLayer]] = {}
    for layer in layers:
        groups.setdefault(key(layer), []).append(layer)
    return list(groups.values())
