"""Trainings as commands: those that are done are left alone, those that were stopped go on."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from compressm.runs.directory import RunDirectory

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


def last_words(said: str) -> str:
    """The end of what a training said, on one line; refusals come in a box."""
    return " ".join("".join(" " if sign in "│╭╮╰╯─" else sign for sign in said).split())[-_SAID:]
