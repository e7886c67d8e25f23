"""Runs of several folders read at once: those that cannot be read are named, and do not hold up the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from compressm.runs.directory import RunDirectory, find_runs
from compressm.runs.groups import group_runs
from compressm.runs.records import RunError
from compressm.runs.run import Run, read_run


@dataclass(frozen=True)
class Gathered:
    """The runs that can be reported, and why others cannot, each by its path."""

    runs: tuple[Run, ...]
    broken: tuple[str, ...]


def gather(paths: Iterable[Path | str]) -> Gathered:
    """Every run at or below the paths; refused where not one of them can be read."""
    folders, broken = _found(paths)
    runs: list[Run] = []
    for directory in folders.values():
        try:
            run = read_run(directory)
            _ = run.modules  # of a run that has only begun they come from its spectra
            _ = run.penalties, run.truncations  # a few lines, and every page asks for them
            runs.append(run)
        except RunError as error:
            broken.append(str(error))
    runs, unshown = _with_spectra(runs)
    broken += unshown
    if not runs:
        raise RunError("; ".join(broken) or "no runs given, expected at least one")
    return Gathered(tuple(runs), tuple(broken))


def _found(paths: Iterable[Path | str]) -> tuple[dict[Path, RunDirectory], list[str]]:
    folders: dict[Path, RunDirectory] = {}
    broken: list[str] = []
    for path in paths:
        try:
            folders |= {run.path: run for run in find_runs([path])}
        except RunError as error:
            broken.append(str(error))
    return folders, broken


def _with_spectra(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Without those whose spectra would be shown and cannot be read; the others' nobody looks at."""
    broken: dict[str, str] = {}
    while True:
        left = [run for run in runs if run.path not in broken]
        known = len(broken)
        for shown in (group.shown for group in group_runs(left)):
            try:
                _ = shown.spectra
            except RunError as error:
                broken[shown.path] = str(error)
        if len(broken) == known:
            return left, list(broken.values())
