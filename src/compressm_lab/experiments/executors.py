"""Where trainings run: as processes of this machine, so many at a time, or as jobs of a Slurm cluster."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, final

import torch

from compressm_lab.experiments.arms import Training
from compressm_lab.training.config import ConfigError

_SAID = 600  # of the last words of a training that failed


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
        """How it ended."""


class Executor(ABC):
    """Begins trainings; `patience` is how many seconds lie between two looks at them."""

    patience = 0.1

    def trouble(self) -> str:
        """Why no training could run here, as far as that is known beforehand; empty where all could."""
        return ""

    @abstractmethod
    def submit(self, training: Training) -> Started:
        """Begin, as soon as there is room for it."""

    @abstractmethod
    def stop(self) -> None:
        """Have every training save what it has and end."""


@final
class LocalExecutor(Executor):
    """So many at a time on this machine. A signal reaches a training once: a second would keep it from saving."""

    def __init__(self, count: int, data: Path | None = None) -> None:
        self._pool = ThreadPoolExecutor(count)
        self._data = data
        self._lock, self._stopped = threading.Lock(), False
        self._running: set[subprocess.Popen[str]] = set()

    def trouble(self) -> str:
        """A GPU that is seen but cannot be used; without one, trainings run on the CPU."""
        if not torch.cuda.is_available():
            return ""
        # In a process of its own: a GPU that takes one process alone stays free for the trainings.
        code = "import torch; torch.zeros(1, device='cuda')"
        tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if tried.returncode == 0:
            return ""
        return (
            f"the GPU of this machine cannot be used: {last_words(tried.stderr)}; free it, or set"
            " CUDA_VISIBLE_DEVICES='' to train on the CPU"
        )

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
            process = _start(training, self._data)
            self._running.add(process)
        try:
            return _ending(process)
        finally:
            with self._lock:
                self._running.discard(process)


def _start(training: Training, data: Path | None) -> subprocess.Popen[str]:
    """In a session of its own, which Ctrl-C on a terminal does not reach."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        training.command(data), stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _ending(process: subprocess.Popen[str]) -> Ended:
    """Wait for it; what it said last where it failed."""
    said, _ = process.communicate()
    if process.returncode == 0:
        return Ended()
    # 130 is a training that saved; a negative number one that a signal ended before it could.
    return Ended(f"exit {process.returncode}: {last_words(said)}", interrupted=process.returncode in (130, -15, -2))


def last_words(said: str) -> str:
    """The end of what a training said, on one line; refusals come in a box, after what else could have been typed."""
    plain = " ".join("".join(" " if sign in "│╭╮╰╯─" else sign for sign in said).split())
    return plain.rpartition("for help. Error ")[2][-_SAID:]


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


def run_here(training: Training, data: Path | None) -> Ended:
    """One training, in the job of a cluster."""
    return _ending(_start(training, data))


@dataclass(frozen=True)
class SlurmOptions:
    """Options of every job; `cluster` is for tests: "debug" runs jobs at once, in this process."""

    partition: str | None = None
    hours: float = 24.0
    gpus: int = 1
    cluster: str = "slurm"

    def __post_init__(self) -> None:
        if not self.hours > 0:
            raise ConfigError(f"hours is {self.hours:g}, expected a number above 0")


@final
class SlurmExecutor(Executor):
    """One job a training, by submitit; it writes the same records as a process of this machine."""

    patience = 10.0

    def __init__(self, folder: Path, options: SlurmOptions, data: Path | None = None) -> None:
        submitit = _submitit()
        self._data, self._jobs = data, []  # type: tuple[Path | None, list[Any]]
        try:
            self._executor = submitit.AutoExecutor(folder=str(folder / "%j"), cluster=options.cluster)
        except RuntimeError as error:
            raise ConfigError(f"--executor slurm: {error} Expected local here, or a machine that has srun") from None
        if options.cluster != "slurm":
            self.patience = Executor.patience
        chosen: dict[str, Any] = {"timeout_min": round(60 * options.hours), "gpus_per_node": options.gpus}
        if options.partition:
            chosen["slurm_partition"] = options.partition
        self._executor.update_parameters(name="compressm", tasks_per_node=1, **chosen)

    def submit(self, training: Training) -> Started:
        """To the queue."""
        job = self._executor.submit(run_here, training, self._data)
        self._jobs.append(job)
        return _Job(job)

    def stop(self) -> None:
        """Slurm signals the trainings, which save."""
        for job in self._jobs:
            if not job.done():
                job.cancel()


class _Job:
    def __init__(self, job: Any) -> None:
        self._job = job

    def done(self) -> bool:
        return bool(self._job.done())

    def result(self) -> Ended:
        error = self._job.exception()
        return self._job.result() if error is None else Ended(f"job {self._job.job_id}: {error!r:.300}")


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise ConfigError(
            "--executor slurm needs submitit, which is not installed: pip install 'compressm[slurm]'"
        ) from None
    return submitit
