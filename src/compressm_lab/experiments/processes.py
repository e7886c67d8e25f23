"""Where trainings run, and as processes of this machine, so many at a time; what ends them politely lets them save."""

from __future__ import annotations

import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol, final

from compressm_lab.experiments.trainings import Training, last_words


@dataclass(frozen=True)
class Ended:
    """`message` is empty where the training came to its end; `interrupted` where it was stopped and saved."""

    message: str = ""
    interrupted: bool = False


class Started(Protocol):
    """What `submit` gives back, as `concurrent.futures.Future` and the jobs of submitit do."""

    def done(self) -> bool:
        """Whether it has ended."""

    def result(self) -> Ended:
        """How."""


class Executor(ABC):
    """Begins trainings; `patience` is how many seconds lie between two looks at them."""

    patience = 0.1

    @abstractmethod
    def submit(self, training: Training) -> Started:
        """Begin, as soon as there is room for it."""

    @abstractmethod
    def stop(self) -> None:
        """Have every training save what it has and end."""


@final
class Processes(Executor):
    """So many at a time on this machine. A signal reaches a training once: a second would keep it from saving."""

    def __init__(self, count: int, data: Path | None = None) -> None:
        self._pool = ThreadPoolExecutor(count)
        self._data = data
        self._lock, self._stopped = threading.Lock(), False
        self._running: set[subprocess.Popen[str]] = set()

    def submit(self, training: Training) -> Future[Ended]:
        """In a thread that waits for it."""
        return self._pool.submit(self._run, training)

    def stop(self) -> None:
        """Ask those that run, forget those that wait, and be back when all have ended."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, training: Training) -> Ended:
        with self._lock:
            if self._stopped:
                return Ended("stopped before it began", interrupted=True)
            process = start(training, self._data)
            self._running.add(process)
        try:
            return ending(process)
        finally:
            with self._lock:
                self._running.discard(process)


def start(training: Training, data: Path | None) -> subprocess.Popen[str]:
    """In a session of its own, which Ctrl-C on a terminal does not reach."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        training.command(data), stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def ending(process: subprocess.Popen[str]) -> Ended:
    """Wait for it; what it said last where it failed."""
    said, _ = process.communicate()
    if process.returncode == 0:
        return Ended()
    # 130 is a training that saved; a negative number one that a signal ended before it could.
    return Ended(f"exit {process.returncode}: {last_words(said)}", interrupted=process.returncode in (130, -15, -2))


@contextmanager
def heard_as_ctrl_c() -> Iterator[None]:
    """What ends a process politely is heard as Ctrl-C is."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {which: signal.signal(which, interrupt) for which in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
