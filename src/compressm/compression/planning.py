"""What a cut would do, computed before anything is changed; layers of equal shape go through one batched call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters import SSMAdapter, find
from compressm.compression.basis import BasisChange, reduce_system
from compressm.compression.calibration import Calibrate, Seen, listen, relative_change
from compressm.compression.errors import CompressionError
from compressm.compression.gramian import Gramian, Measured, WhiteNoise
from compressm.compression.orders import choose_orders
from compressm.compression.policies import ErrorBound, Policy
from compressm.compression.selection import Largest, Selection
from compressm.compression.stages import stage
from compressm.compression.surgery import require_plain_parameters
from compressm.compression.wrapping import unwrapped
from compressm.control import ControlError, DiagonalSystem, fold, hankel_singular_values, numerical_rank
from compressm.control.side_by_side import each

Item = TypeVar("Item")
Result = TypeVar("Result")

# 1 − |λ|² of the slowest mode: below it |λ| is 1 in float64, and after a change of basis nothing tells it from 1.
_LEAST_DECAY = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Layer:
    """A module with the system it is now, as read and as it is balanced, and what it saw where that was asked for."""

    name: str
    module: nn.Module
    adapter: SSMAdapter[Any]
    system: DiagonalSystem
    balanced: DiagonalSystem
    seen: Seen | None

    @property
    def shape(self) -> tuple[object, ...]:
        return (*self.system.B.shape, self.system.outputs, self.system.device)


@dataclass(frozen=True)
class PlannedCut:
    """One layer's next system, how its coordinates come from the old ones, and what that costs."""

    layer: Layer
    system: DiagonalSystem
    change: BasisChange
    error_bound: float | None
    measured_error: float | None
    energy_lost: float


@dataclass(frozen=True)
class Options:
    """How cuts are planned: the keywords of `Compressor` and `compress_`."""

    keep: Policy
    calibrate: Calibrate | None = None
    gramian: Gramian | None = None
    fold: bool = True
    select: Selection = Largest()
    gate: float = 0.95
    round_to: int = 1
    filter_fn: Callable[[nn.Module, str], bool] | None = None
    overrides: Mapping[str, Policy] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.gramian, Measured) and self.calibrate is None:
            raise CompressionError(f"gramian is {self.gramian} without calibrate: there is no data to measure on")
        if self.gramian is not None and not isinstance(self.gramian, Gramian):
            raise CompressionError(f"gramian is {self.gramian!r}, expected WhiteNoise() or Measured(...)")
        if self.calibrate is not None and not callable(self.calibrate):
            raise CompressionError(f"calibrate is {self.calibrate!r}, expected a function of the model")
        if self.filter_fn is not None and not callable(self.filter_fn):
            raise CompressionError(f"filter_fn is {self.filter_fn!r}, expected a function of a module and its name")
        if not isinstance(self.fold, bool):
            raise CompressionError(f"fold is {self.fold!r}, expected True or False")
        if not isinstance(self.select, Selection):
            raise CompressionError(f"select is {self.select!r}, expected Largest(), Smallest() or Random(seed)")
        self._require_bounds()

    def _require_bounds(self) -> None:
        """With measured Gramians 2 Σ of the dropped σ bounds nothing, so that a policy by it would promise too much."""
        others = self.overrides.values() if isinstance(self.overrides, Mapping) else ()
        bound = next((policy for policy in (self.keep, *others) if isinstance(policy, ErrorBound)), None)
        if self.measure and bound is not None:
            raise CompressionError(
                f"{bound} with Gramians that are measured, which have no error bound: expected gramian=WhiteNoise(),"
                " for which calibrate still gives measured_error, or another policy, such as EnergyTolerance(0.05)"
            )

    @property
    def measure(self) -> bool:
        """Whether P is that of real data: said, or the default where there is data."""
        return isinstance(self.gramian or (Measured() if self.calibrate else WhiteNoise()), Measured)


def read_system(name: str, module: nn.Module, adapter: SSMAdapter[Any]) -> DiagonalSystem:
    """A layer as it is now; what is wrong with it is said with its name."""
    said = name or "the model"
    absent = [entry for entry, parameter in module.named_parameters() if parameter.is_meta]
    if absent:
        raise CompressionError(
            f"{said}: {', '.join(absent)} are on the meta device, expected values: use to_empty and load them first"
        )
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


def find_layers(model: nn.Module, options: Options) -> dict[str, tuple[nn.Module, SSMAdapter[Any]]]:
    """The layers to look at, with their adapters; there is at least one."""
    found = find(model, options.filter_fn)
    if found:
        return found
    kind = type(model).__name__
    if options.filter_fn is not None and (all_of_them := find(model)):
        raise CompressionError(
            f"filter_fn takes no SSM layer of {kind}; expected at least one of {', '.join(map(repr, all_of_them))}"
        )
    raise CompressionError(f"{kind} has no SSM layer that an adapter reads; see compressm.adapters")


def read_layers(model: nn.Module, options: Options) -> dict[str, Layer]:
    """Every SSM layer of the model as a system; with `calibrate`, after it ran."""
    if not isinstance(model, nn.Module):
        raise CompressionError(f"model is a {type(model).__name__}, expected an nn.Module")
    # Inside DistributedDataParallel a forward pass waits for the other processes, which may not be looking.
    model = unwrapped(model)
    found = find_layers(model, options)
    for name, (module, _) in found.items():
        require_plain_parameters(name, module)
    with stage("read"), torch.no_grad():
        systems = {name: read_system(name, module, adapter) for name, (module, adapter) in found.items()}
        balanced = {name: fold(system) if options.fold else system for name, system in systems.items()}
    seen: Mapping[str, Seen] = {}
    if options.calibrate is not None:
        choice = options.gramian if isinstance(options.gramian, Measured) else Measured()
        listened = {name: (module, balanced[name]) for name, (module, _) in found.items()}
        with stage("calibrate"):
            seen = listen(model, options.calibrate, listened, choice)
    return {
        name: Layer(name, module, adapter, systems[name], balanced[name], seen.get(name))
        for name, (module, adapter) in found.items()
    }


def spectra(layers: Mapping[str, Layer], options: Options) -> dict[str, Float[Tensor, "*bank n"]]:
    """The Hankel singular values of every layer, one batched call a shape."""
    found: dict[str, Tensor] = {}
    for group in _grouped(layers.values(), lambda layer: layer.shape):
        sigma = _by_name(group, lambda part: _values(part, options))
        found |= {layer.name: values for layer, values in zip(group, sigma, strict=True)}
    return {name: found[name] for name in layers}


def _values(group: list[Layer], options: Options) -> Tensor:
    return hankel_singular_values(_stacked([layer.balanced for layer in group]), P=_gramians(group, options))


def _by_name(group: list[Layer], work: Callable[[list[Layer]], Result]) -> Result:
    """What `work` makes of the group; where it cannot, the layer that it fails for alone is named."""
    try:
        return work(group)
    except ControlError as error:
        for layer in group if len(group) > 1 else ():
            _by_name([layer], work)
        names = ", ".join(layer.name or "the model" for layer in group)
        raise CompressionError(f"{names}: {error}") from error


def plan_cuts(layers: Mapping[str, Layer], options: Options, *, salt: int = 0) -> list[PlannedCut]:
    """The cuts that the policy wants, in the order of the layers; those the gate holds back are left out."""
    with stage("spectra"):
        values = spectra(layers, options)
    orders = choose_orders(
        values, options.keep, overrides=options.overrides, gate=options.gate, round_to=options.round_to
    )
    wanted = {name: rank for name, rank in orders.items() if rank < layers[name].system.order}
    if isinstance(options.select, Largest):
        # Each layer by its own rank: in a group those of lower rank would be filled up with modes that do nothing.
        wanted = {name: min(rank, int(numerical_rank(values[name]).amax())) for name, rank in wanted.items()}
    groups = _grouped((layers[name] for name in wanted), lambda layer: (*layer.shape, wanted[layer.name]))
    with stage("reduce"):
        parts = each(
            lambda group: _by_name(group, lambda part: _plan_group(part, wanted[part[0].name], values, options, salt)),
            groups,
        )
    planned = {name: cut for part in parts for name, cut in part.items()}
    return [planned[name] for name in layers if name in planned]


def _plan_group(
    group: list[Layer], rank: int, values: Mapping[str, Tensor], options: Options, salt: int
) -> dict[str, PlannedCut]:
    kept = [options.select(values[layer.name], rank, salt=f"{layer.name}@{salt}") for layer in group]
    reduction = reduce_system(
        _stacked([layer.system for layer in group]),
        states=None if isinstance(options.select, Largest) else _state_numbers(kept, group[0].system),
        order=rank,
        fold=options.fold,
        P=_gramians(group, options),
    )
    cuts = {}
    for k, layer in enumerate(group):
        bound = None if reduction.error_bound is None else float(reduction.error_bound[k].max())
        system, sigma = reduction.system[k], values[layer.name]
        change = None if layer.seen is None else relative_change(layer.system, system, layer.seen)
        cuts[layer.name] = PlannedCut(layer, system, reduction.change[k], bound, change, _lost(sigma, kept[k]))
    return cuts


def _lost(sigma: Tensor, kept: Tensor) -> float:
    """The share of Σσ that goes with the states that are not kept."""
    dropped = torch.ones(sigma.shape[-1], dtype=torch.bool)
    dropped[kept] = False
    whole = float(sigma.sum())
    return float(sigma.cpu()[..., dropped].sum()) / whole if whole > 0 else 0.0


def _state_numbers(kept: list[Tensor], system: DiagonalSystem) -> Tensor:
    """(layers, *bank, r)."""
    numbers = torch.stack(kept)
    return numbers.reshape(len(kept), *[1] * len(system.bank), -1).expand(-1, *system.bank, -1)


def _gramians(group: list[Layer], options: Options) -> Tensor | None:
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
