"""The recipes that come with the package, by name."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from compressm.training.config import ConfigError, Recipe
from compressm.training.reading import read_recipe

FOLDER = Path(str(resources.files("compressm.experiments"))) / "recipes"


def recipe_names() -> list[str]:
    """Of all files in the folder."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_recipe(name: str, settings: tuple[str, ...] = ()) -> Recipe:
    """By its name, or from a YAML file of your own."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):  # the last: config.json of a run
        return read_recipe(path, settings)
    if name not in recipe_names():
        hint = f"; to go on with the run in {path}, add --resume" if (path / "config.json").is_file() else ""
        raise ConfigError(
            f"{name!r} is not a recipe; expected one of {', '.join(recipe_names())}, or a .yaml file{hint}"
        )
    return read_recipe(FOLDER / f"{name}.yaml", settings)
