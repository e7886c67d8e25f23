"""Trainings as jobs of a Slurm cluster, which write the same records as processes of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from compressm_lab.experiments.processes import Ended, Executor, Started, ending, start
from compressm_lab.experiments.trainings import Training
from compressm_lab.training.config import ConfigError


def run_here(training: Training, data: Path | None) -> Ended:
    """In the job of a cluster."""
    return ending(start(training, data))


@dataclass(frozen=True)
class SlurmOptions:
    """Of every job; `cluster` is for tests: "debug" runs jobs at once, in this process."""

    partition: str | None = None
    hours: float = 24.0
    gpus: int = 1
    cluster: str = "slurm"

    def __post_init__(self) -> None:
        if not self.hours > 0:
            raise ConfigError(f"hours is {self.hours:g}, expected a number above 0")


@final
class Slurm(Executor):
    """One job a training, by submitit."""

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
