"""The trainings of a study, each in a process of its own, so many at a time; a run notes how many there were."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compressm.files import replacing
from compressm_lab.experiments.processes import Processes, heard_as_ctrl_c
from compressm_lab.experiments.trainings import Training
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Row

_COMPANY = "together.json"  # in the folder of a run: how many were trained at a time


@dataclass(frozen=True)
class Job:
    """One training, in a process of its own; with its `order` where a variant is trained at several.

    `task` is named where a command has several.
    """

    variant: str
    seed: int
    training: Training
    order: int | None = None
    task: str = ""

    def __str__(self) -> str:
        task = f"{self.task}: " if self.task else ""
        size = "" if self.order is None else f"n = {self.order}, "
        return f"{task}{self.variant}, {size}seed {self.seed}"

    def is_of(self, row: Row) -> bool:
        """Whether a row is of this training."""
        alike = (row["variant"], row["seed"]) == (self.variant, self.seed)
        return alike and (self.order is None or row["order"] == self.order)


def train(wanted: Sequence[Job], *, processes: int, data: Path | None) -> None:
    """What is not done yet, `processes` at a time; how each ended is printed.

    After Ctrl-C, or what ends a process politely, trainings save; exit 130.
    """
    executor = Processes(processes, data)
    new = [job for job in wanted if not job.training.finished]
    for job in new:
        _note_company(RunDirectory(job.training.folder), min(processes, len(new)))
    try:
        with heard_as_ctrl_c():
            started = [executor.submit(job.training) if job in new else None for job in wanted]
            for job, running in zip(wanted, started, strict=True):
                said = "was done" if running is None else running.result().message or "done"
                print(f"{job}: {said}", flush=True)
    except KeyboardInterrupt:
        executor.stop()
        print("stopped, and what was trained is saved: the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None


def _note_company(directory: RunDirectory, together: int) -> None:
    """Before a training begins; of one that goes on the most that there were."""
    before = company(directory).get("together", 1) if directory.exists else 1
    directory.path.mkdir(parents=True, exist_ok=True)
    with replacing(directory.path / _COMPANY) as scratch:
        scratch.write_text(json.dumps({"together": max(int(before), together)}))


def company(directory: RunDirectory) -> Row:
    """How many trainings ran at a time with this one, as `train` noted; nothing where that is not known."""
    try:
        return {"together": int(json.loads((directory.path / _COMPANY).read_text())["together"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
