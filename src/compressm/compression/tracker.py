"""Hankel singular values recorded during training, without cutting (the paper's sec:why)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from compressm.compression.planning import Options, read_layers, spectra
from compressm.compression.policies import KeepFraction
from compressm.control import DiagonalSystem, Trajectories, hankel_change, trajectories
from compressm.errors import CompressionError
from compressm.families import Layer
from compressm.families.choices import Gramian, require_count
from compressm.families.observing import Calibrate
from compressm.families.selective.methods import Baked, SelectiveMethod


class HankelTracker:
    """Call `step(step)` in the training loop; every `every`-th step the spectra of all SSM layers are kept.

    With `changes`, `bounds` has beside each spectrum max |eig δH| since the record before, which no σ can have moved
    further than (lem:hsv_cont); None for the first record, across a cut and of selective layers, of a bank the largest.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        calibrate: Calibrate | None = None,
        gramian: Gramian | None = None,
        fold: bool = True,
        filter_fn: Callable[[nn.Module, str], bool] | None = None,
        changes: bool = False,
        selective: SelectiveMethod = Baked(),
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise CompressionError(f"every is {every!r}, expected an integer of at least 1")
        self.model, self.every = model, every
        self.options = Options(
            keep=KeepFraction(1.0),
            calibrate=calibrate,
            gramian=gramian,
            fold=fold,
            filter_fn=filter_fn,
            selective=selective,
        )
        self.steps: list[int] = []
        self.spectra: list[dict[str, Tensor]] = []
        self.changes = changes
        self.bounds: list[dict[str, float | None]] = []
        self._before: dict[str, DiagonalSystem] = {}

    def step(self, step: SupportsIndex) -> dict[str, Tensor] | None:
        """The spectra, on the CPU, if this is a step to record."""
        now = require_count("step", step, low=0)
        if now % self.every or now in self.steps[-1:]:
            return None
        layers = read_layers(self.model, self.options)
        with torch.no_grad():
            found = {name: sigma.cpu() for name, sigma in spectra(layers, self.options).items()}
            bounds = self._compare(layers)
        self.steps.append(now)
        self.spectra.append(found)
        self.bounds.append(bounds)
        return found

    def _compare(self, layers: Mapping[str, Layer]) -> dict[str, float | None]:
        bounds: dict[str, float | None] = dict.fromkeys(layers)
        found = {name: layer.linear_system for name, layer in layers.items()}
        systems = {name: system for name, system in found.items() if system is not None}
        if self.changes:
            for name, system in systems.items():
                before = self._before.get(name)
                if before is not None and before.order == system.order:
                    bounds[name] = float(hankel_change(before, system).weyl_bound.max())
            self._before = systems
        return bounds

    def trajectories(self, name: str) -> Trajectories:
        """Every singular value of one layer followed through its crossings; of a bank, those of its mean spectrum."""
        records = [record[name] for record in self.spectra if name in record]
        if not records:
            known = ", ".join(repr(layer) for layer in self.spectra[-1]) if self.spectra else "nothing yet"
            raise CompressionError(f"no record of {name!r}; recorded: {known}")
        return trajectories([sigma.reshape(-1, sigma.shape[-1]).mean(0) for sigma in records])

    def state_dict(self) -> dict[str, Any]:
        """What was recorded."""
        return {
            "steps": list(self.steps),
            "spectra": [dict(record) for record in self.spectra],
            "bounds": [dict(record) for record in self.bounds],
            "before": {name: _parts(system) for name, system in self._before.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self.steps, self.spectra = list(state["steps"]), [dict(record) for record in state["spectra"]]
        self.bounds = [dict(record) for record in state["bounds"]]
        self._before = {name: _system(parts) for name, parts in state["before"].items()}


def _parts(system: DiagonalSystem) -> dict[str, Tensor]:
    poles = {"poles": system.poles} if system.log_poles is None else {"log_poles": system.log_poles}
    return {**poles, "B": system.B, "C": system.C}


def _system(parts: Mapping[str, Tensor]) -> DiagonalSystem:
    if "poles" in parts:
        return DiagonalSystem(parts["poles"], parts["B"], parts["C"])
    return DiagonalSystem.from_log_poles(parts["log_poles"], parts["B"], parts["C"])
