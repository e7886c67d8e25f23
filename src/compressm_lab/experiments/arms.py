"""An arm is a recipe with settings of its own; with a seed it is a training, which has a folder and a command."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from compressm_lab.experiments.recipes import find_recipe, run_differs
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Row
from compressm_lab.training.config import Recipe

ORDER, TOTAL, TEACHER = "ORDER", "TOTAL", "TEACHER"
# "begun": it was stopped, or is running; "waits": for the order of other runs, or for its teacher.
TrainingState = Literal["done", "begun", "new", "waits"]


@dataclass(frozen=True)
class FinalOrder:
    """The final order of an arm: the mean over seeds and layers, and the number of layers."""

    mean: float
    layers: int

    def filled(self, text: str) -> str:
        """Replace ORDER by the rounded mean and TOTAL by that of all layers together."""
        return text.replace(ORDER, str(round(self.mean))).replace(TOTAL, str(round(self.mean * self.layers)))


@dataclass(frozen=True)
class Arm:
    """One recipe with settings of its own; `task`, `method` and `column` name its cell in a table of the paper.

    In a result file `method` is the variant, and `order` a column for variants that are trained at several. `folder`
    is that of its runs: arms of several experiments with the same folder are the same trainings. `beside` is the arm
    whose final order replaces ORDER and TOTAL in settings and folder: as in the paper, a baseline has the mean order
    that compressed runs ended with (sec:setup). The run of `teacher` with the same seed replaces TEACHER and is trained
    first. `truncated` is the order that the cell shows, of runs cut once after training. `once`: only the first seed
    is trained.
    """

    task: str
    method: str
    column: str
    recipe: str
    folder: str
    settings: tuple[str, ...] = ()
    beside: Arm | None = None
    teacher: Arm | None = None
    truncated: int | None = None
    order: int | None = None
    once: bool = False

    def filled(self, final: FinalOrder | None) -> Arm:
        """Fill in the final order of the arm beside it; without one the arm stays as it is."""
        if self.beside is None or final is None:
            return self
        settings = tuple(map(final.filled, self.settings))
        return replace(self, folder=final.filled(self.folder), settings=settings, beside=None)

    def taught_by(self, teacher: Path) -> Arm:
        """Fill in the folder of the teacher's run."""
        return replace(self, settings=tuple(part.replace(TEACHER, teacher.as_posix()) for part in self.settings))

    @property
    def known(self) -> bool:
        """Tell if no order is left to fill in."""
        return self.beside is None

    def read(self, seed: int) -> Recipe:
        """Read the recipe of one seed."""
        return find_recipe(self.recipe, (*self.settings, f"seed={seed}"))

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.task, self.method, self.column)))


@dataclass(frozen=True)
class Training:
    """One seed of an arm: its `compressm train` command, the folder of its run, and that of its teacher's run."""

    arm: Arm
    seed: int
    folder: Path
    teacher: Path | None = None

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.folder)

    @property
    def finished(self) -> bool:
        return self.run.finished

    @property
    def state(self) -> TrainingState:
        """The state on the disk now."""
        if not self.arm.known:
            return "waits"
        if self.finished:
            return "done"
        if self.teacher is not None and not RunDirectory(self.teacher).finished:
            return "waits"
        return "begun" if self.run.exists else "new"

    @property
    def waits_for(self) -> str:
        """Words for what it waits for; empty if it does not wait."""
        if self.state != "waits":
            return ""
        order = [f"takes the mean final order of {self.arm.beside}"] if self.arm.beside else []
        teacher = [f"learns from {self.arm.teacher}, seed {self.seed}"] if self.arm.teacher else []
        return ", and ".join(order + teacher)

    @property
    def key(self) -> tuple[str, int]:
        """A key that arms which share a training have in common."""
        beside = "" if self.arm.beside is None else f" beside {self.arm.beside.folder}"
        return f"{self.arm.folder}{beside}", self.seed

    @property
    def names(self) -> Row:
        """Columns that identify its row in a result file."""
        names: Row = {"variant": self.arm.method, "seed": self.seed}
        return names if self.arm.order is None else names | {"order": self.arm.order}

    def command(self, data: Path | None) -> list[str]:
        """Make the command that begins the training, or resumes it; `data` is the folder of data sets."""
        place = [] if data is None else ["--data", str(data), "--offline"]
        train = [sys.executable, "-m", "compressm.cli", "train"]
        if self.run.exists:
            return [*train, str(self.folder), "--resume", *place]
        chosen = [part for setting in self.arm.settings for part in ("--set", setting)]
        return [*train, self.arm.recipe, "--seed", str(self.seed), "--out", str(self.folder), *place, *chosen]

    @property
    def differs(self) -> str:
        """Words for how a run in the folder differs from this training; empty if it does not."""
        return run_differs(self.run, self.arm.read(self.seed)) if self.arm.known and self.run.exists else ""

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}"
