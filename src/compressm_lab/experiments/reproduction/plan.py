"""What an experiment needs, what of it is done, and what can be trained now: read from the disk each time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compressm_lab.experiments.reproduction.arms import Arm, Experiment, FinalOrder
from compressm_lab.experiments.trainings import Training, different
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.records import RunError
from compressm_lab.runs.run import Run, read_run

# "begun": a process was stopped, or is at it; "waits": for the order of other runs, or for its teacher.
JobState = Literal["done", "begun", "new", "waits"]


@dataclass(frozen=True)
class Job:
    """One training of an arm; None where its order is not known yet, or its teacher not trained."""

    arm: Arm
    seed: int
    state: JobState
    training: Training | None = None

    @property
    def key(self) -> tuple[str, int]:
        """The same for the same training, whichever arm asks for it."""
        beside = "" if self.arm.beside is None else f" beside {self.arm.beside.folder}"
        return f"{self.arm.folder}{beside}", self.seed

    @property
    def waits_for(self) -> str:
        """In words; empty where it does not."""
        if self.state != "waits":
            return ""
        order = [f"takes the mean final order of {self.arm.beside}"] if self.arm.beside else []
        teacher = [f"learns from {self.arm.teacher}, seed {self.seed}"] if self.arm.teacher else []
        return ", and ".join(order + teacher)

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """The trainings of an experiment below one folder; others may share them."""

    experiment: Experiment
    seeds: int
    runs: Path

    def jobs(self, failed: Collection[tuple[str, int]] = ()) -> list[Job]:
        """Every training once, arm by arm; those that wait for an arm go on without its seeds that `failed`."""
        finals: dict[str, FinalOrder | None] = {}
        found: dict[tuple[str, int], Job] = {}
        for arm in self.experiment.arms:
            if arm.beside is not None and arm.beside.folder not in finals:
                finals[arm.beside.folder] = self.final_order(arm.beside, failed)
            resolved = arm.filled(finals[arm.beside.folder] if arm.beside else None)
            for job in (self._job(resolved, seed) for seed in range(self.seeds)):
                found.setdefault(job.key, job)
        return list(found.values())

    def resolved(self) -> Iterator[tuple[Arm, Arm | None]]:
        """Every arm as it was written, and with its order where that is known."""
        for arm in self.experiment.arms:
            if arm.beside is None:
                yield arm, arm
            else:
                final = self._mean([run for seed in range(self.seeds) if (run := self.finished_run(arm.beside, seed))])
                yield arm, None if final is None else arm.filled(final)

    def final_order(self, arm: Arm, failed: Collection[tuple[str, int]] = ()) -> FinalOrder | None:
        """None until every seed is finished or has failed, and at least one is finished."""
        runs = [self.finished_run(arm, seed) for seed in range(self.seeds) if (arm.folder, seed) not in failed]
        return None if None in runs else self._mean([run for run in runs if run])

    def finished_run(self, arm: Arm, seed: int) -> Run | None:
        """None where it is not trained to its end."""
        directory = RunDirectory(self.folder(arm, seed))
        return read_run(directory) if directory.finished else None

    def folder(self, arm: Arm, seed: int) -> Path:
        return self.runs / arm.folder / f"seed-{seed}"

    def _job(self, arm: Arm, seed: int) -> Job:
        if not arm.known:
            return Job(arm, seed, "waits")
        folder = self.folder(arm, seed)
        if arm.teacher is not None:
            teacher = RunDirectory(self.folder(arm.teacher, seed))
            if not (teacher.finished or RunDirectory(folder).finished):
                return Job(arm, seed, "waits")
            arm = arm.taught_by(teacher.path)
        training = Training(arm.recipe, folder, ("--seed", str(seed)), arm.settings)
        if training.finished:
            return Job(arm, seed, "done", training)
        return Job(arm, seed, "begun" if RunDirectory(folder).exists else "new", training)

    @staticmethod
    def _mean(runs: list[Run]) -> FinalOrder | None:
        if not runs:
            return None
        return FinalOrder(sum(run.mean_order for run in runs) / len(runs), max(len(run.modules) for run in runs))


def require_same_recipes(jobs: list[Job]) -> None:
    """Of runs that are there already; a folder of an older definition of an experiment is refused by name."""
    if why := different(jobs):
        raise RunError(why)
