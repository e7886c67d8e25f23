"""A clock that counts the seconds of a run by phase."""

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
# The phases that a gradient step is made of.
_STEPS = ("steps", "regulariser")
# The phases of a cut's stages, in the paper's words.
_STAGES = {"spectra": "spectrum", "optimizer": "optimizer"}


class Clock:
    """Seconds by phase since `take`, and in `total` since training began; time in an inner phase counts once, there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._open: list[float] = []  # seconds of the phases inside each open one
        self.total = 0.0
        self.in_steps = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context whose time counts as phase `name`; a GPU finishes its work before it begins and ends."""
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
        """A context in which the stages of a cut count as phases."""
        return watching(lambda name: self.phase(_STAGES.get(name, "cut")))

    def peek(self) -> dict[str, float]:
        return dict(self._seconds)

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken

    def restore(self, total: float, in_steps: float, seconds: dict[str, float]) -> None:
        """Continue from the seconds of a checkpoint."""
        self.total, self.in_steps, self._seconds = total, in_steps, dict(seconds)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
