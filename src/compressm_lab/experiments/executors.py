"""Executors of trainings: processes of this machine, a few at a time, or jobs of a Slurm cluster."""

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

from compressm_lab.experiments.recipes import Training
from compressm_lab.training.config import ConfigError

_SHOWN = 600  # characters of the last output of a training that failed


@dataclass(frozen=True)
class Ended:
    """The end of a training: the message is empty if it finished; `interrupted` if it was stopped and saved."""

    message: str = ""
    interrupted: bool = False


class Started(Protocol):
    """A submitted training, as a `concurrent.futures.Future`."""

    def done(self) -> bool: ...

    def result(self) -> Ended: ...


class Executor(ABC):
    """A place where trainings run; `patience` is the time in seconds between two checks of them."""

    patience = 0.1

    def trouble(self) -> str:
        """Words for why no training can run here, as far as that is known beforehand; empty if all can."""
        return ""

    @abstractmethod
    def submit(self, training: Training) -> Started:
        """Begin a training as soon as a place is free."""

    @abstractmethod
    def stop(self) -> None:
        """Make every training save and end."""


@final
class LocalExecutor(Executor):
    """Processes of this machine, `count` at a time; each gets one signal, as a second would keep it from saving."""

    def __init__(self, count: int, data: Path | None = None) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count)
        self._data = data
        self._lock, self._stopped = threading.Lock(), False
        self._running: set[subprocess.Popen[str]] = set()

    def trouble(self) -> str:
        """Words for why the GPU of this machine cannot be used; without a GPU trainings run on the CPU."""
        if not torch.cuda.is_available():
            return ""
        # A process of its own: a GPU that takes only one process stays free for the trainings.
        code = "import torch; torch.zeros(1, device='cuda')"
        tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        cure = "free it, or set CUDA_VISIBLE_DEVICES='' to train on the CPU"
        why = f"the GPU of this machine cannot be used: {last_words(tried.stderr)}; {cure}"
        return why if tried.returncode else ""

    def submit(self, training: Training) -> Future[Ended]:
        return self._pool.submit(self._run, training)

    def stop(self) -> None:
        """Signal those that run, forget those that wait, and return when all have ended."""
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
    """Start a training in a session of its own, which Ctrl-C on a terminal does not reach."""
    command, pipe = training.command(data), subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def _ending(process: subprocess.Popen[str]) -> Ended:
    """Wait for a process; the message is the end of its output if it failed."""
    output, _ = process.communicate()
    if process.returncode == 0:
        return Ended()
    # 130 is a training that saved; a negative number one that a signal ended before it could.
    return Ended(f"exit {process.returncode}: {last_words(output)}", interrupted=process.returncode in (130, -15, -2))


def last_words(output: str) -> str:
    """Shorten output to its end, on one line; the command line frames its errors, after a hint to --help."""
    plain = " ".join("".join(" " if sign in "│╭╮╰╯─" else sign for sign in output).split())
    return plain.rpartition("for help. Error ")[2][-_SHOWN:]


@contextmanager
def heard_as_ctrl_c() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP do what Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {which: signal.signal(which, interrupt) for which in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def run_here(training: Training, data: Path | None) -> Ended:
    """Run one training, in the job of a cluster."""
    return _ending(_start(training, data))


@dataclass(frozen=True)
class SlurmOptions:
    """Options of every Slurm job; tests set `cluster` to "debug", which runs jobs at once, in this process."""

    partition: str | None = None
    hours: float = 24.0
    gpus: int = 1
    cluster: str = "slurm"

    def __post_init__(self) -> None:
        if not self.hours > 0:
            raise ConfigError(f"hours is {self.hours:g}, expected a number above 0")


@final
class SlurmExecutor(Executor):
    """Jobs of a Slurm cluster, one a training, by submitit; they write the same records as local processes."""

    patience = 10.0

    def __init__(self, folder: Path, options: SlurmOptions, data: Path | None = None) -> None:
        try:
            import submitit
        except ImportError:
            raise ConfigError(
                "--executor slurm needs submitit, which is not installed: pip install 'compressm[slurm]'"
            ) from None
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
        job = self._executor.submit(run_here, training, self._data)
        self._jobs.append(job)
        return _Job(job)

    def stop(self) -> None:
        """Cancel all jobs: Slurm signals the trainings, which save."""
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
