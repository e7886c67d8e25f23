"""The spectra of one layer over training, thinned to what a picture can show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from compressm.control import bottom_shares, trajectories
from compressm.runs.records import Spectrum
from compressm.runs.run import Run

# Following 384 states through one snapshot takes 30 ms; more than this many could not be told apart anyway.
SNAPSHOTS = 150


@dataclass(frozen=True)
class Stretch:
    """Snapshots between two restorations, over which orders only fall; values[k, j] is state j at steps[k].

    `resolved`: snapshots are close enough to follow states through crossings; otherwise none cross.
    """

    steps: list[int]
    values: Float[Tensor, "steps n"]
    margins: list[float]
    crossings: int
    resolved: bool


@dataclass(frozen=True)
class History:
    """Of one layer; `skipped` snapshots held something other than finite numbers."""

    module: str
    snapshots: tuple[Spectrum, ...]
    recorded: int
    skipped: int

    @property
    def steps(self) -> list[int]:
        return [found.step for found in self.snapshots]

    @property
    def bounds(self) -> list[tuple[int, float]]:
        """(step, max |eig δH|) where it was recorded and is finite."""
        known = ((found.step, found.weyl_bound) for found in self.snapshots)
        return [(step, float(bound)) for step, bound in known if bound is not None and math.isfinite(bound)]

    def shares(self, part: float) -> list[float]:
        """Of every snapshot the share of Σσ that the smallest `part` of its states hold."""
        found = []
        for spectrum in self.snapshots:
            sigma = torch.tensor(spectrum.sigma, dtype=torch.float64)
            found.append(float(bottom_shares(sigma)[math.floor(part * len(sigma))]))
        return found

    def stretches(self) -> list[Stretch]:
        """States followed by linear assignment, or by rank, anew after every restoration."""
        parts: list[list[Spectrum]] = []
        for found in self.snapshots:
            if not parts or len(found.sigma) > len(parts[-1][-1].sigma):
                parts.append([])
            parts[-1].append(found)
        return [_followed(part) for part in parts]


def histories(run: Run) -> list[History]:
    """Of every layer with a spectrum."""
    return [found for module in run.modules if (found := _history(run, module)).snapshots]


def _history(run: Run, module: str) -> History:
    recorded = [found for found in run.spectra if found.module == module]
    usable = [found for found in recorded if found.sigma and all(map(math.isfinite, found.sigma))]
    return History(module, tuple(_thinned(usable)), len(recorded), len(recorded) - len(usable))


def _thinned(spectra: Sequence[Spectrum]) -> list[Spectrum]:
    """Evenly spaced, the first and the last among them, and those on both sides of a change of order."""
    stride = max(1, math.ceil(len(spectra) / SNAPSHOTS))
    orders = [len(found.sigma) for found in spectra]
    kept = {k for k in range(len(spectra)) if k % stride == 0} | {len(spectra) - 1}
    for k in range(1, len(spectra)):
        if orders[k] != orders[k - 1]:
            kept |= {k - 1, k}
    return [found for k, found in enumerate(spectra) if k in kept]


def _followed(part: Sequence[Spectrum]) -> Stretch:
    spectra = [torch.tensor(found.sigma, dtype=torch.float64) for found in part]
    margins = [math.nan if found.weyl_bound is None else float(found.weyl_bound) for found in part]
    steps = [found.step for found in part]
    paths = trajectories(spectra)
    return Stretch(steps, paths.values, margins, int(paths.crossings.sum()), paths.resolved)
