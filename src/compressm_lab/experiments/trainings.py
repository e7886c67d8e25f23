"""Trainings as commands: those that are done are left alone, those that were stopped go on, others are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from compressm_lab.experiments.catalogue import BASELINE, find_recipe
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.records import RunError
from compressm_lab.training.config import ConfigError, Recipe
from compressm_lab.training.reading import make_recipe
from compressm_lab.training.resuming import differences

_SAID = 600  # of the last words of a training that failed


@dataclass(frozen=True)
class Training:
    """One `compressm train`, as a person would type it: the recipe, its options, and the folder of the run."""

    recipe: str
    folder: Path
    options: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def command(self, data: Path | None) -> list[str]:
        """To begin, or to go on with what a stopped process left; `data` is the folder of data sets."""
        place = [] if data is None else ["--data", str(data), "--offline"]
        train = [sys.executable, "-m", "compressm.cli", "train"]
        if RunDirectory(self.folder).exists:
            return [*train, str(self.folder), "--resume", *place]
        chosen = [part for setting in self.settings for part in ("--set", setting)]
        return [*train, self.recipe, *self.options, "--out", str(self.folder), *place, *chosen]

    @property
    def finished(self) -> bool:
        return RunDirectory(self.folder).finished

    @property
    def wanted(self) -> Recipe:
        """What the command would train."""
        uncut = BASELINE if "--baseline" in self.options else ()
        named = {"--order": "model.order", "--seed": "seed"}
        pairs = zip(self.options, self.options[1:], strict=False)
        chosen = tuple(f"{named[option]}={value}" for option, value in pairs if option in named)
        return find_recipe(self.recipe, (*self.settings, *uncut, *chosen))

    @property
    def differs(self) -> str:
        """In what a run that is in the folder is of another recipe, in words; empty where it is not."""
        run = RunDirectory(self.folder)
        if not run.exists:
            return ""
        stored = make_recipe(run.config(), source=str(self.folder / "config.json"))
        # One that goes on asks the teacher that it began with, wherever that is now.
        named = _arm_and_seed if run.finished else _place
        then, now = (_taught(recipe, named).as_dict() for recipe in (stored, self.wanted))
        return "; ".join(differences(then, now))


class Trained(Protocol):
    """What has a training, and a name for people."""

    @property
    def training(self) -> Training | None: ...


def different(wanted: Iterable[Trained]) -> str | None:
    """Why a run that is in the folder of a training cannot be gone on with, nor collected."""
    for job in wanted:
        if job.training is None:
            continue
        try:
            said = job.training.differs
        except (ConfigError, RunError) as error:
            return f"{error}; expected the recipe of {job}: move it, or choose --out"
        if said:
            return f"{job.training.folder} holds a run of another recipe than {job}: {said}; move it, or choose --out"
    return None


def _arm_and_seed(teacher: Path) -> str:
    """Wherever the folder of all runs lies and is seen from."""
    return "/".join(teacher.parts[-2:])


def _place(teacher: Path) -> str:
    """The one path that all others lead to."""
    return str(teacher.resolve())


def _taught(recipe: Recipe, named: Callable[[Path], str]) -> Recipe:
    """With its teacher named so, where it has one."""
    if recipe.distillation is None:
        return recipe
    teacher = named(Path(recipe.distillation.teacher))
    return replace(recipe, distillation=replace(recipe.distillation, teacher=teacher))


def last_words(said: str) -> str:
    """The end of what a training said, on one line; refusals come in a box, after what else could have been typed."""
    plain = " ".join("".join(" " if sign in "│╭╮╰╯─" else sign for sign in said).split())
    return plain.rpartition("for help. Error ")[2][-_SAID:]
