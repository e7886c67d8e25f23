"""From planned cuts to changed models: values, optimizer state and followers are prepared, then all is written."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from compressm.adapters import find
from compressm.compression.basis import Triple
from compressm.compression.carrying import ModuleChange
from compressm.compression.distributed import broadcast_from_first
from compressm.compression.errors import CompressionError
from compressm.compression.moments import Moments
from compressm.compression.optimizer_state import require_supported
from compressm.compression.planning import Options, PlannedCut, plan_cuts, read_layers
from compressm.compression.record import Cut
from compressm.compression.surgery import PreparedCut, apply_cuts, prepare_cut, require_plain_parameters
from compressm.control import DiagonalSystem


@dataclass(frozen=True)
class Plan:
    """The cuts of one moment, and how long it took to find them."""

    cuts: list[PlannedCut]
    seconds: float


@dataclass(frozen=True)
class Cutter:
    """A model, its optimizer, those that follow, and how cuts are planned."""

    model: nn.Module
    optimizer: Any | None
    options: Options
    moments: Moments
    follow: tuple[nn.Module, ...]

    def check(self) -> None:
        """Refuse now what would be refused at the first cut."""
        if not isinstance(self.moments, Moments):
            raise CompressionError(f"moments is {self.moments!r}, expected Transport(), Restart() or Slice()")
        found = find(self.model, self.options.filter_fn)
        if not found:
            raise CompressionError(
                f"{type(self.model).__name__} has no SSM layer that an adapter reads; see compressm.adapters"
            )
        for name, (module, _) in found.items():
            require_plain_parameters(name, module)
            if self.optimizer is not None:
                require_supported(self.optimizer, {f"{name}.{key}": p for key, p in module.named_parameters()})
        for model in self.follow:
            missing = [name for name in found if name not in find(model)]
            if missing:
                raise CompressionError(f"follow: {type(model).__name__} has no SSM layer {', '.join(missing)}")

    def plan(self, *, salt: int) -> Plan:
        """What the policy wants now; nothing is changed."""
        start = time.perf_counter()
        with torch.no_grad():
            cuts = plan_cuts(read_layers(self.model, self.options), self.options, salt=salt)
        return Plan(cuts, time.perf_counter() - start)

    def apply(self, plan: Plan, step: int) -> list[Cut]:
        """Make all cuts of a plan, or with an error none of them."""
        start = time.perf_counter()
        changes = {
            cut.layer.name: ModuleChange.to(
                cut.layer.module, cut.layer.adapter, cut.layer.system, cut.system, cut.change
            )
            for cut in plan.cuts
        }
        prepared = [prepare_cut(name, change, self.optimizer, self.moments) for name, change in changes.items()]
        prepared += [self._following(model, cut) for model in self.follow for cut in plan.cuts]
        apply_cuts([_as_first_process(cut) for cut in prepared], self.optimizer)
        return self.describe(replace(plan, seconds=plan.seconds + time.perf_counter() - start), step)

    def describe(self, plan: Plan, step: int) -> list[Cut]:
        """The records of a plan; each cut counts an equal share of the time."""
        return [
            Cut(
                step=step,
                module=cut.layer.name,
                order=cut.layer.system.order,
                rank=cut.system.order,
                error_bound=cut.error_bound,
                measured_error=cut.measured_error,
                energy_lost=cut.energy_lost,
                seconds=plan.seconds / len(plan.cuts),
            )
            for cut in plan.cuts
        ]

    def _following(self, model: nn.Module, cut: PlannedCut) -> PreparedCut:
        """The same change of basis for a model that follows: its layers stay in the coordinates of the first."""
        module, adapter = find(model)[cut.layer.name]
        with torch.no_grad():
            moved = cut.change.vector(Triple.of(adapter.read(module)))
            system = DiagonalSystem(moved.poles, moved.B, moved.C)
            return PreparedCut(cut.layer.name, module, adapter.encode(module, system))


def _as_first_process(cut: PreparedCut) -> PreparedCut:
    """Rounding may differ between processes; what they write may not."""
    states = {name: {key: _shared(entry) for key, entry in state.items()} for name, state in cut.states.items()}
    return replace(cut, values={name: _shared(value) for name, value in cut.values.items()}, states=states)


def _shared(value: Any) -> Any:
    return broadcast_from_first(value) if isinstance(value, Tensor) else value
