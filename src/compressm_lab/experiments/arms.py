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
# "begun": a process was stopped, or is at it; "waits": for the order of other runs, or for its teacher.
TrainingState = Literal["done", "begun", "new", "waits"]


@dataclass(frozen=True)
class FinalOrder:
    """What an arm ended with: the mean over its seeds of the mean over layers, and how many layers there are."""

    mean: float
    layers: int

    def filled(self, text: str) -> str:
        """The text with numbers in the place of ORDER, the rounded mean, and TOTAL, that of all layers together."""
        return text.replace(ORDER, str(round(self.mean))).replace(TOTAL, str(round(self.mean * self.layers)))


@dataclass(frozen=True)
class Arm:
    """One recipe with settings of its own; `task`, `method` and `column` say what it stands for.

    They name its cell in a table of the paper, or its row in a result file, where `method` is the variant and `order`
    is kept where a variant is trained at several.

    `folder` is that of its runs: arms of several experiments with the same folder are the same trainings. `beside` is
    the arm whose final order takes the place of ORDER and TOTAL in settings and folder: as in the paper, a baseline has
    the mean order that compressed runs ended with (sec:setup). The run of `teacher` with the same seed takes the
    place of TEACHER: it is trained first. `truncated` is the order that the cell shows the runs at, cut once after they
    were trained. `once`: trained with the first seed alone.
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
        """The arm with the order of the one beside it; the same where there is none."""
        if self.beside is None or final is None:
            return self
        settings = tuple(map(final.filled, self.settings))
        return replace(self, folder=final.filled(self.folder), settings=settings, beside=None)

    def taught_by(self, teacher: Path) -> Arm:
        """The arm with the folder of a run to learn from."""
        return replace(self, settings=tuple(part.replace(TEACHER, teacher.as_posix()) for part in self.settings))

    @property
    def known(self) -> bool:
        """Nothing is left to be filled in."""
        return self.beside is None

    def read(self, seed: int) -> Recipe:
        """The recipe as it will be trained."""
        return find_recipe(self.recipe, (*self.settings, f"seed={seed}"))

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.task, self.method, self.column)))


@dataclass(frozen=True)
class Training:
    """One seed of an arm: a `compressm train` as a person would type it, and the folder of its run.

    `teacher` is the folder of the run that it learns from.
    """

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
        """As the disk has it now."""
        if not self.arm.known:
            return "waits"
        if self.finished:
            return "done"
        if self.teacher is not None and not RunDirectory(self.teacher).finished:
            return "waits"
        return "begun" if self.run.exists else "new"

    @property
    def waits_for(self) -> str:
        """What it waits for, in words; empty where it does not."""
        if self.state != "waits":
            return ""
        order = [f"takes the mean final order of {self.arm.beside}"] if self.arm.beside else []
        teacher = [f"learns from {self.arm.teacher}, seed {self.seed}"] if self.arm.teacher else []
        return ", and ".join(order + teacher)

    @property
    def key(self) -> tuple[str, int]:
        """The same for the same training, whichever arm asks for it."""
        beside = "" if self.arm.beside is None else f" beside {self.arm.beside.folder}"
        return f"{self.arm.folder}{beside}", self.seed

    @property
    def names(self) -> Row:
        """The columns that tell its row from all others."""
        names: Row = {"variant": self.arm.method, "seed": self.seed}
        return names if self.arm.order is None else names | {"order": self.arm.order}

    def command(self, data: Path | None) -> list[str]:
        """To begin, or to go on with what a stopped process left; `data` is the folder of data sets."""
        place = [] if data is None else ["--data", str(data), "--offline"]
        train = [sys.executable, "-m", "compressm.cli", "train"]
        if self.run.exists:
            return [*train, str(self.folder), "--resume", *place]
        chosen = [part for setting in self.arm.settings for part in ("--set", setting)]
        return [*train, self.arm.recipe, "--seed", str(self.seed), "--out", str(self.folder), *place, *chosen]

    @property
    def differs(self) -> str:
        """What differs from this in a run that is in the folder, in words; empty where nothing does."""
        return run_differs(self.run, self.arm.read(self.seed)) if self.arm.known and self.run.exists else ""

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}"
