"""Runs to continue: their checkpoints, and whether they are of the same recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compressm_lab.runs.directory import RunDirectory
from compressm_lab.training.config import ConfigError, Recipe

_NAME = re.compile(r"step-(\d+)\.pt")


def is_finished(directory: RunDirectory, recipe: Recipe) -> bool:
    """Tell if the run in the folder is finished; a run of another recipe is refused."""
    if directory.finished:
        require_same_recipe(directory, recipe)
    return directory.finished


def require_same_recipe(directory: RunDirectory, recipe: Recipe) -> None:
    """Refuse to continue a run of another recipe."""
    mine = json.loads(json.dumps(recipe.as_dict()))
    if changed := "; ".join(differences(directory.config(), mine)):
        raise ConfigError(f"{directory.path} is a run of another recipe: {changed}")


def differences(stored: Any, mine: Any, key: str = "") -> Iterator[str]:
    """Describe each value that differs between two recipes, given as plain values."""
    if isinstance(stored, dict) and isinstance(mine, dict):
        for name in sorted({*stored, *mine}):
            yield from differences(stored.get(name), mine.get(name), f"{key}.{name}".strip("."))
    elif stored != mine:
        yield f"{key} was {stored!r:.200} and is {mine!r:.200}"


def checkpoints(directory: RunDirectory) -> list[Path]:
    """Checkpoints of a run, newest first."""
    return sorted((path for path in directory.checkpoints.glob("*.pt") if _NAME.fullmatch(path.name)), reverse=True)
