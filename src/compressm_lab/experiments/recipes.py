"""Recipes that come with the package, by name, and a comparison of a run on the disk with a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from compressm.errors import did_you_mean
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.training.config import ConfigError, Recipe
from compressm_lab.training.reading import make_recipe, read_recipe
from compressm_lab.training.resuming import differences

# Settings that make a baseline of a recipe.
BASELINE = ("compression=null", "regulariser=null", "distillation=null", "truncation=null")
FOLDER = Path(str(resources.files("compressm_lab.experiments"))) / "recipes"


def recipe_names() -> list[str]:
    """Names of all recipes of the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_recipe(name: str, settings: tuple[str, ...] = (), *, spoken: Mapping[str, str] | None = None) -> Recipe:
    """Read a recipe by its name, or from a YAML file of your own; settings and `spoken` as in `read_recipe`."""
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
    """Describe how the recipe of a run differs from the wanted one; empty if it does not."""
    stored = make_recipe(run.config(), source=str(run.path / "config.json"))

    def values(recipe: Recipe) -> dict[str, Any]:
        if recipe.distillation is None:
            return recipe.as_dict()
        teacher = Path(recipe.distillation.teacher)
        # A run that goes on needs the teacher that it began with, wherever that is now; of a finished one arm and seed,
        # the end of the path, are compared: the same wherever the folder of all runs lies.
        name = "/".join(teacher.parts[-2:]) if run.finished else str(teacher.resolve())
        return replace(recipe, distillation=replace(recipe.distillation, teacher=name)).as_dict()

    return "; ".join(differences(values(stored), values(wanted)))
