"""The recipes that come with the package, by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from compressm.errors import did_you_mean
from compressm_lab.training.config import ConfigError, Recipe
from compressm_lab.training.reading import read_recipe

# What a baseline does without.
BASELINE = ("compression=null", "regulariser=null", "distillation=null", "truncation=null")
FOLDER = Path(str(resources.files("compressm_lab.experiments"))) / "recipes"


def recipe_names() -> list[str]:
    """Of all files in the folder."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_recipe(name: str, settings: tuple[str, ...] = (), *, spoken: Mapping[str, str] | None = None) -> Recipe:
    """By its name, or from a YAML file of your own; settings and their words as in `read_recipe`."""
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
