"""A clock that counts the seconds of a run by phase: on the wall, of the processors, and of the GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

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


class Spent(NamedTuple):
    """Seconds by phase: of the wall clock, of the processors in all threads, and of the GPU where there is one."""

    wall: dict[str, float]
    cpu: dict[str, float]
    gpu: dict[str, float] | None


@dataclass
class _Open:
    """A phase in progress: its name, and the seconds and names of the phases inside."""

    name: str
    inside: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    names: set[str] = field(default_factory=set)


class Clock:
    """Seconds by phase since `take`, and in `total` since training began; time in an inner phase counts once, there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spent = Spent({}, {}, {} if device.type == "cuda" else None)
        self._open: list[_Open] = []
        self.total = 0.0
        self.in_steps = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context whose time counts as phase `name`; a GPU finishes its work before it begins and ends.

        On the GPU a phase counts the time between two events. Of one inside a phase of the same name, as replays are
        inside steps, that alone counts: between replays the GPU only waits.
        """
        self._wait()
        begin, mark = (time.perf_counter(), time.process_time()), self._mark()
        self._open.append(_Open(name))
        try:
            yield
        finally:
            gpu = self._since(mark)
            spent = [time.perf_counter() - begin[0], time.process_time() - begin[1], gpu]
            done = self._open.pop()
            own = [whole - inside for whole, inside in zip(spent, done.inside, strict=True)]
            if name in done.names:
                own[2], spent[2] = 0.0, done.inside[2]
            if self._open:
                outer = self._open[-1]
                outer.inside = [a + b for a, b in zip(outer.inside, spent, strict=True)]
                outer.names |= {name, *done.names}
            else:
                self.total += spent[0]
            self.in_steps += own[0] if name in _STEPS else 0.0
            for kind, seconds in zip(self._spent, own, strict=True):
                if kind is not None:
                    kind[name] = kind.get(name, 0.0) + seconds

    def stages(self) -> AbstractContextManager[None]:
        """A context in which the stages of a cut count as phases."""
        return watching(lambda name: self.phase(_STAGES.get(name, "cut")))

    def peek(self) -> Spent:
        """Seconds by phase since the last `take`."""
        return Spent(*(None if kind is None else dict(kind) for kind in self._spent))  # type: ignore[arg-type]

    def take(self) -> Spent:
        """Seconds by phase since the last call."""
        taken = self.peek()
        for kind in self._spent:
            if kind is not None:
                kind.clear()
        return taken

    def restore(self, total: float, in_steps: float, spent: Mapping[str, Mapping[str, float] | None]) -> None:
        """Continue from the seconds of a checkpoint; `spent` has the fields of `Spent` that it knows."""
        self.total, self.in_steps = total, in_steps
        for name, kind in self._spent._asdict().items():
            if kind is not None:
                kind.clear()
                kind.update(spent.get(name) or {})

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _mark(self) -> torch.cuda.Event | None:
        """An event in the stream of the GPU, now; None without one."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _since(self, mark: torch.cuda.Event | None) -> float:
        """Seconds in the stream of the GPU since a mark, when it has finished; 0 without a GPU."""
        end = self._mark()
        self._wait()
        return 0.0 if mark is None or end is None else mark.elapsed_time(end) / 1e3


def load() -> float | None:
    """The number of processes that want a processor, the mean of the last minute; None where nobody counts."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
