"""Linear layers: read as systems, batched by shape, balanced and truncated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters import Adapter, SSMAdapter
from compressm.compression.distributed import Processes
from compressm.compression.options import Options
from compressm.control import ControlError, DiagonalSystem, hankel_singular_values
from compressm.control.linear_algebra import each
from compressm.errors import CompressionError
from compressm.families.base import Layer, PlannedCut, Writing
from compressm.families.choices import Largest
from compressm.families.linear.observer import Seen, relative_change, squared_change
from compressm.families.linear.reduction import (
    BasisChange,
    Reduction,
    Triple,
    drop_modes,
    reduce_system,
    sorted_sizes,
)
from compressm.families.linear.transport import ModuleChange

Item = TypeVar("Item")
Result = TypeVar("Result")

# 1 − |λ|² of the slowest mode: below it |λ| is 1 in float64, and after a change of basis nothing tells it from 1.
_LEAST_DECAY = torch.finfo(torch.float64).eps


@final
@dataclass(frozen=True)
class LinearLayer(Layer):
    """A module with the system it is now, as read and as it is balanced, and what it saw where that was asked for."""

    name: str
    module: nn.Module
    adapter: SSMAdapter[Any]
    system: DiagonalSystem
    balanced: DiagonalSystem
    seen: Seen | None

    @property
    def order(self) -> int:
        return self.system.order

    @property
    def shape(self) -> tuple[object, ...]:
        return (*self.system.B.shape, self.system.outputs, self.system.device)

    def over(self, processes: Processes) -> LinearLayer:
        return self if self.seen is None else replace(self, seen=self.seen.over(processes))

    def received(self, sent: Any) -> LinearCut:
        system, change, bound, lost = sent
        device = self.system.device
        return LinearCut(self, system.to(device), change.to(device), bound, None, lost)


@final
@dataclass(frozen=True)
class LinearCut(PlannedCut):
    """One layer's next system, how its coordinates come from the old ones, and what that costs."""

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
        return ModuleChange.to(layer.module, layer.adapter, layer.system, self.system, self.basis)

    def following(self, module: nn.Module, adapter: Adapter[Any, Any]) -> Writing:
        assert isinstance(adapter, SSMAdapter)
        moved = self.basis.vector(Triple.of(adapter.read(module)))
        return Writing(adapter.encode(module, DiagonalSystem(moved.poles, moved.B, moved.C)))

    def sent(self) -> Any:
        return self.system.to("cpu"), self.basis.to("cpu"), self.error_bound, self.energy_lost

    def squared_change(self) -> Float[Tensor, "2"] | None:
        seen = self.layer.seen
        return None if seen is None else squared_change(self.layer.system, self.system, seen)

    def measured(self, error: float) -> LinearCut:
        return replace(self, measured_error=error)


def read_system(name: str, module: nn.Module, adapter: SSMAdapter[Any]) -> DiagonalSystem:
    """A layer as it is now; what is wrong with it is said with its name."""
    said = name or "the model"
    try:
        system = adapter.read(module).detach()
    except ControlError as error:
        raise CompressionError(f"{said}: {error}") from error
    least = float(system.decay.min())
    if not least >= _LEAST_DECAY:
        raise CompressionError(
            f"{said}: the largest pole modulus is 1 up to rounding, 1 - |λ|² = {least:.3g}, expected < 1 by at least"
            f" {_LEAST_DECAY:.3g}"
        )
    return system


def linear_spectra(layers: Iterable[LinearLayer], options: Options) -> dict[str, Float[Tensor, "*bank n"]]:
    """The Hankel singular values of every layer, one batched call a shape."""
    found: dict[str, Tensor] = {}
    for group in _grouped(layers, lambda layer: layer.shape):
        sigma = _by_name(group, lambda part: _values(part, options))
        found |= {layer.name: values for layer, values in zip(group, sigma, strict=True)}
    return found


def _values(group: list[LinearLayer], options: Options) -> Tensor:
    if options.modal:
        return sorted_sizes(_stacked([layer.system for layer in group]))
    return hankel_singular_values(_stacked([layer.balanced for layer in group]), P=_gramians(group, options))


def _by_name(group: list[LinearLayer], work: Callable[[list[LinearLayer]], Result]) -> Result:
    """What `work` makes of the group; where it cannot, the layer that it fails for alone is named."""
    try:
        return work(group)
    except ControlError as error:
        for layer in group if len(group) > 1 else ():
            _by_name([layer], work)
        names = ", ".join(layer.name or "the model" for layer in group)
        raise CompressionError(f"{names}: {error}") from error


def plan_linear(
    layers: Iterable[LinearLayer], wanted: Mapping[str, int], values: Mapping[str, Tensor], options: Options, salt: int
) -> dict[str, LinearCut]:
    """Cuts to these orders; layers of equal shape and order go through one batched call."""
    groups = _grouped(layers, lambda layer: (*layer.shape, wanted[layer.name]))
    parts = each(
        lambda group: _by_name(group, lambda part: _plan_group(part, wanted[part[0].name], values, options, salt)),
        groups,
    )
    return {name: cut for part in parts for name, cut in part.items()}


def _plan_group(
    group: list[LinearLayer], rank: int, values: Mapping[str, Tensor], options: Options, salt: int
) -> dict[str, LinearCut]:
    kept = [options.select(values[layer.name], rank, salt=f"{layer.name}@{salt}") for layer in group]
    states = None if isinstance(options.select, Largest) else _state_numbers(kept, group[0].system)
    reduction = _reduced(group, rank, states, options)
    cuts = {}
    for k, layer in enumerate(group):
        bound = None if reduction.error_bound is None else float(reduction.error_bound[k].max())
        system, sigma = reduction.system[k], values[layer.name]
        change = None if layer.seen is None else relative_change(layer.system, system, layer.seen)
        cuts[layer.name] = LinearCut(layer, system, reduction.change[k], bound, change, energy_lost(sigma, kept[k]))
    return cuts


def _reduced(group: list[LinearLayer], rank: int, states: Tensor | None, options: Options) -> Reduction:
    systems = _stacked([layer.system for layer in group])
    if options.modal:
        return drop_modes(systems, rank, states)
    return reduce_system(systems, rank, states=states, fold=options.fold, P=_gramians(group, options))


def energy_lost(sigma: Float[Tensor, "*channels n"], kept: Tensor) -> float:
    """The share of Σσ that goes with the states that are not kept."""
    dropped = torch.ones(sigma.shape[-1], dtype=torch.bool)
    dropped[kept] = False
    whole = float(sigma.sum())
    return float(sigma.cpu()[..., dropped].sum()) / whole if whole > 0 else 0.0


def _state_numbers(kept: list[Tensor], system: DiagonalSystem) -> Tensor:
    """(layers, *bank, r)."""
    numbers = torch.stack(kept)
    return numbers.reshape(len(kept), *[1] * len(system.bank), -1).expand(-1, *system.bank, -1)


def _gramians(group: list[LinearLayer], options: Options) -> Tensor | None:
    if not options.measure:
        return None
    seen = [layer.seen.gramian() for layer in group if layer.seen is not None]
    return torch.stack(seen)


def _stacked(systems: list[DiagonalSystem]) -> DiagonalSystem:
    B, C = torch.stack([system.B for system in systems]), torch.stack([system.C for system in systems])
    logs = [system.log_poles for system in systems if system.log_poles is not None]
    if len(logs) == len(systems):
        return DiagonalSystem.from_log_poles(torch.stack(logs), B, C)
    return DiagonalSystem(torch.stack([system.poles for system in systems]), B, C)


def _grouped(items: Iterable[Item], key: Callable[[Item], object]) -> list[list[Item]]:
    groups: dict[object, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
