"""Where the time of a run goes, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from compressm.compression.planning import watching

PHASES = (
    *("steps", "data", "evaluation", "spectrum", "cut", "optimizer", "capture", "checkpoint"),
    *("regulariser", "teacher", "truncation"),
)
# What a gradient step is made of.
_STEPS = ("steps", "regulariser")
# The stages of a cut, in words of the paper's analysis.
_STAGES = {"spectra": "spectrum", "optimizer": "optimizer"}


class Clock:
    """Seconds by phase since `take`, and of all phases since training began; a phase inside another is its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._open: list[float] = []  # what phases inside the open ones have taken
        self.total = 0.0
        self.in_steps = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """On a GPU the work before and inside is waited for."""
        self._wait()
        begin = time.perf_counter()
        self._open.append(0.0)
        try:
            yield
        finally:
            self._wait()
            spent = time.perf_counter() - begin
            own = spent - self._open.pop()
            if self._open:
                self._open[-1] += spent
            else:
                self.total += spent
            self.in_steps += own if name in _STEPS else 0.0
            self._seconds[name] = self._seconds.get(name, 0.0) + own

    def stages(self) -> AbstractContextManager[None]:
        """Within it the stages of a cut count as phases."""
        return watching(lambda name: self.phase(_STAGES.get(name, "cut")))

    def peek(self) -> dict[str, float]:
        return dict(self._seconds)

    def take(self) -> dict[str, float]:
        """What the phases took since the last time."""
        taken, self._seconds = self._seconds, {}
        return taken

    def restore(self, total: float, in_steps: float, seconds: dict[str, float]) -> None:
        """Go on from what a checkpoint remembers."""
        self.total, self.in_steps, self._seconds = total, in_steps, dict(seconds)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
