"""Recipes that come with the package, arms (recipes with settings of their own), and trainings (arms with a seed)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from compressm.errors import did_you_mean
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Row
from compressm_lab.training.config import POLICIES, ConfigError, Recipe
from compressm_lab.training.loop import differences
from compressm_lab.training.reading import Importing, make_recipe, read_recipe

# Settings that make a baseline of a recipe.
RECIPE_FILES = (".yaml", ".yml", ".json")  # the last: config.json of a run
BASELINE = ("compression=null", "regulariser=null", "distillation=null", "truncation=null")
# Settings that let cuts find their steps and their orders by the loss on validation data.
AUTOMATIC = (
    "label=automatic",
    *(f"compression.{name}=null" for name in POLICIES),
    *("compression.when=automatic", "compression.loss_tolerance=0.01", "compression.gramian=measured"),
)
ORDER, TOTAL, TEACHER = "ORDER", "TOTAL", "TEACHER"
# "begun": it was stopped, or is running; "waits": for the order of other runs, or for its teacher.
TrainingState = Literal["done", "begun", "new", "waits"]
FOLDER = Path(str(resources.files("compressm_lab.experiments"))) / "recipes"


def recipe_names() -> list[str]:
    """Names of all recipes of the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_recipe(
    name: str,
    settings: tuple[str, ...] = (),
    *,
    spoken: Mapping[str, str] | None = None,
    importing: Importing | None = None,
) -> Recipe:
    """Read a recipe by its name, or from a YAML file of your own; the other arguments are those of `read_recipe`."""
    path = Path(name)
    if path.suffix in RECIPE_FILES:
        return read_recipe(path, settings, spoken=spoken, importing=importing)
    if name not in recipe_names():
        hint = did_you_mean(name, recipe_names())
        if (path / "config.json").is_file():
            hint = f"; to go on with the run in {path}, add --resume"
        raise ConfigError(
            f"{name!r} is not a recipe; expected one of {', '.join(recipe_names())}, or a .yaml file{hint}"
        )
    return read_recipe(FOLDER / f"{name}.yaml", settings, spoken=spoken, importing=importing)


def run_differs(run: RunDirectory, wanted: Recipe) -> str:
    """Describe how the recipe of a run differs from the wanted one; empty if it does not."""
    stored = make_recipe(run.config(), source=str(run.path / "config.json"))

    def values(recipe: Recipe) -> dict[str, Any]:
        if recipe.distillation is None:
            return recipe.as_dict()
        teacher = Path(recipe.distillation.teacher)
        # A resumed run needs the very teacher that it began with. A finished one may have been moved with all others:
        # only arm and seed of its teacher, the end of the path, are compared.
        name = "/".join(teacher.parts[-2:]) if run.finished else str(teacher.resolve())
        return replace(recipe, distillation=replace(recipe.distillation, teacher=name)).as_dict()

    return "; ".join(differences(values(stored), values(wanted)))


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
    first. `truncated` is the order that the cell shows, of runs cut once after training. `seeds` is the most of its
    seeds that are trained, None for all.
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
    seeds: int | None = None

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
