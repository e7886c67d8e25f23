"""The recipes that come with the package, by name, and whether a run on the disk is of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path

from compressm.errors import did_you_mean
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.training.config import ConfigError, Recipe
from compressm_lab.training.reading import make_recipe, read_recipe
from compressm_lab.training.resuming import differences

# What a baseline does without.
BASELINE = ("compression=null", "regulariser=null", "distillation=null", "truncation=null")
FOLDER = Path(str(resources.files("compressm_lab.experiments"))) / "recipes"


def recipe_names() -> list[str]:
    """All recipes in the folder."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_recipe(name: str, settings: tuple[str, ...] = (), *, spoken: Mapping[str, str] | None = None) -> Recipe:
    """A recipe by its name, or from a YAML file of your own; settings and their words as in `read_recipe`."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):  # the last: config.json of a run
        return read_recipe(path, settings, spoken=spoken)
    if name not in recipe_names():
        hint = did_you_mean(name, recipe_names())
        if (path / "config.json").is_file():
            hint = f"; to go on with the run in {path}, add --resume"
        raise ConfigError(
            f"{name!r} is not a recipe; expected one of {', '.join(recipe_names())}, or a .yaml file{hint}"
        )
    return read_recipe(FOLDER / f"{name}.yaml", settings, spoken=spoken)


def run_differs(run: RunDirectory, wanted: Recipe) -> str:
    """What differs between the recipe of a run and the one that is wanted, in words; empty where nothing does."""
    stored = make_recipe(run.config(), source=str(run.path / "config.json"))
    # A run that goes on asks the teacher that it began with, wherever that is now.
    named = _arm_and_seed if run.finished else _place
    then, now = (_taught(recipe, named).as_dict() for recipe in (stored, wanted))
    return "; ".join(differences(then, now))


def _arm_and_seed(teacher: Path) -> str:
    """The end of its path: the same wherever the folder of all runs lies."""
    return "/".join(teacher.parts[-2:])


def _place(teacher: Path) -> str:
    """The one path that all others lead to."""
    return str(teacher.resolve())


def _taught(recipe: Recipe, named: Callable[[Path], str]) -> Recipe:
    """The recipe with its teacher named so, where it has one."""
    if recipe.distillation is None:
        return recipe
    teacher = named(Path(recipe.distillation.teacher))
    return replace(recipe, distillation=replace(recipe.distillation, teacher=teacher))
