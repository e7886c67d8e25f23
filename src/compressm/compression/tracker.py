"""Hankel singular values recorded during training, without cutting (the paper's sec:why)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from compressm.compression.calibration import Calibrate
from compressm.compression.checks import require_count
from compressm.compression.errors import CompressionError
from compressm.compression.gramian import Gramian
from compressm.compression.planning import Options, read_layers, spectra
from compressm.compression.policies import KeepFraction
from compressm.control import Trajectories, trajectories


class HankelTracker:
    """Call `step(step)` in the training loop; every `every`-th step the spectra of all SSM layers are kept."""

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        calibrate: Calibrate | None = None,
        gramian: Gramian | None = None,
        fold: bool = True,
        filter_fn: Callable[[nn.Module, str], bool] | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise CompressionError(f"every is {every!r}, expected an integer of at least 1")
        self.model, self.every = model, every
        self.options = Options(
            keep=KeepFraction(1.0), calibrate=calibrate, gramian=gramian, fold=fold, filter_fn=filter_fn
        )
        self.steps: list[int] = []
        self.spectra: list[dict[str, Tensor]] = []

    def step(self, step: SupportsIndex) -> dict[str, Tensor] | None:
        """The spectra, on the CPU, if this is a step to record."""
        now = require_count("step", step, low=0)
        if now % self.every or now in self.steps[-1:]:
            return None
        layers = read_layers(self.model, self.options)
        with torch.no_grad():
            found = {name: sigma.cpu() for name, sigma in spectra(layers, self.options).items()}
        self.steps.append(now)
        self.spectra.append(found)
        return found

    def trajectories(self, name: str) -> Trajectories:
        """Every singular value of one layer followed through its crossings; of a bank, those of its mean spectrum."""
        records = [record[name] for record in self.spectra if name in record]
        if not records:
            known = ", ".join(repr(layer) for layer in self.spectra[-1]) if self.spectra else "nothing yet"
            raise CompressionError(f"no record of {name!r}; recorded: {known}")
        return trajectories([sigma.reshape(-1, sigma.shape[-1]).mean(0) for sigma in records])

    def state_dict(self) -> dict[str, Any]:
        """What was recorded."""
        return {"steps": list(self.steps), "spectra": [dict(record) for record in self.spectra]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self.steps, self.spectra = list(state["steps"]), [dict(record) for record in state["spectra"]]
