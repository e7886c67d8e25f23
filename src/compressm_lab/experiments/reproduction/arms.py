"""Trainings that differ in their seed alone, and what stands for them in the paper."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from compressm_lab.experiments.catalogue import find_recipe
from compressm_lab.training.config import Recipe

# Of runs on the disk, pictures that a report knows how to draw.
Picture = Literal["outcome", "curves", "spectra", "hankel", "timer", "seeds"]
ORDER, TOTAL, TEACHER = "ORDER", "TOTAL", "TEACHER"


@dataclass(frozen=True)
class FinalOrder:
    """What an arm ended with: the mean over its seeds of the mean over layers, and how many layers there are."""

    mean: float
    layers: int

    def filled(self, text: str) -> str:
        """With numbers in the place of ORDER, the rounded mean, and TOTAL, that of all layers together."""
        return text.replace(ORDER, str(round(self.mean))).replace(TOTAL, str(round(self.mean * self.layers)))


@dataclass(frozen=True)
class Arm:
    """One recipe with settings of its own; `task`, `method` and `column` name its cell in a table of the paper.

    `folder` is that of its runs: arms of several experiments with the same folder are the same trainings. `beside` is
    the arm whose final order takes the place of ORDER and TOTAL in settings and folder: as in the paper, a baseline has
    the mean order that compressed runs ended with (sec:setup). The run of `teacher` with the same seed takes the
    place of TEACHER: it is trained first. `truncated` is the order that the cell shows the runs at, cut once after they
    were trained.
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

    def filled(self, final: FinalOrder | None) -> Arm:
        """With the order of the arm beside it; the same where there is none."""
        if self.beside is None or final is None:
            return self
        settings = tuple(map(final.filled, self.settings))
        return replace(self, folder=final.filled(self.folder), settings=settings, beside=None)

    def taught_by(self, teacher: Path) -> Arm:
        """With the folder of a run to learn from."""
        return replace(self, settings=tuple(part.replace(TEACHER, teacher.as_posix()) for part in self.settings))

    @property
    def known(self) -> bool:
        """Nothing is left to be filled in."""
        return self.beside is None

    def read(self, seed: int) -> Recipe:
        """As it will be trained."""
        return find_recipe(self.recipe, (*self.settings, f"seed={seed}"))

    def __str__(self) -> str:
        return f"{self.task}, {self.method}, {self.column}"


@dataclass(frozen=True)
class Experiment:
    """A table or figure: the trainings it is made of, how many seeds of each, and the picture that shows them.

    `measures` names a benchmark instead of trainings. `head`: the share of training that pictures of spectra show.
    """

    label: str
    title: str
    arms: tuple[Arm, ...]
    seeds: int
    picture: Picture = "outcome"
    quantity: Literal["accuracy", "best"] = "accuracy"
    measures: str = ""
    head: float = 1.0
    note: str = ""
