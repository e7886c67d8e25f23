"""Checks of a run before it goes on from a checkpoint: what it must have, and what should be as it was."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import torch

from compressm.compression.record import Decision, Event, orders_after
from compressm_lab.data.task import Task
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.records import (
    CutRecord,
    DecisionRecord,
    Evaluation,
    PenaltyRecord,
    Record,
    RestoredRecord,
    RunError,
    Spectrum,
    SplitName,
    Timing,
)
from compressm_lab.runs.run import require_readable
from compressm_lab.training.config import Recipe
from compressm_lab.training.plan import Plan


def require_records(
    directory: RunDirectory, recipe: Recipe, step: int, extra: Mapping[str, Any], history: Sequence[Event]
) -> None:
    """Refuse a run whose records up to the step of its checkpoint have holes, or are such as a report refuses.

    `extra` is that of the checkpoint: the last step whose time is recorded, and the digests of the files, which earlier
    versions did not write. `history` is what the compressor has done.
    """
    if missing := "; ".join(_missing(directory, recipe, step, extra["timed"], history)):
        raise RunError(
            f"{directory.path}: {missing}, which the checkpoint of step {step} counts on: put the file back, or delete "
            f"{directory.checkpoints}, and --resume trains the run from its beginning"
        )
    if step:  # everything is written again after step 0
        require_readable(directory, step, recipe.training.steps)
        directory.require_begun(extra.get("records", {}), step)


def require_same_files(directory: RunDirectory, task: Task) -> None:
    """Refuse to go on with other data: files of one's own may be written anew at any time."""
    stored = _files(directory)
    for which, file in task.about.get("files", {}).items():
        if which in stored and stored[which]["sha256"] != file["sha256"]:
            raise RunError(
                f"{directory.path} began with another {which} than {file['path']} is now: put the file back as it was,"
                " or train in another folder"
            )


def _files(directory: RunDirectory) -> dict[str, Any]:
    """The files of the data with which a run began, by split."""
    files = _mapping(directory, "about", directory.task().get("about", {})).get("files", {})
    stored = _mapping(directory, "about.files", files)
    for which, file in stored.items():
        if "sha256" not in _mapping(directory, f"about.files.{which}", file):
            raise RunError(f"{directory.path / 'task.json'}: about.files.{which} has no sha256: put the file back")
    return stored


def _mapping(directory: RunDirectory, key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RunError(f"{directory.path / 'task.json'}: {key} is {value!r:.80}, expected an object: put the file back")
    return value


def _missing(directory: RunDirectory, recipe: Recipe, step: int, timed: int, history: Sequence[Event]) -> Iterator[str]:
    """Yield what each file lacks."""
    if step == 0:  # everything is written again
        return
    plan = Plan.of(recipe)
    schedules: list[tuple[type[Record], Sequence[int]]] = [(Evaluation, plan.evaluations), (Spectrum, plan.spectra)]
    if recipe.regulariser is not None:
        schedules.append((PenaltyRecord, plan.evaluations))
    for kind, schedule in schedules:
        found = directory.records(kind, up_to=step)
        lines = Counter(record.step for record in found)
        least = len(get_args(SplitName)) if kind is Evaluation else 1
        if late := [due for due in schedule if due <= step and lines[due] < least]:
            yield f"{kind.file} lacks {len(late)} of its steps, the first {late[0]}"
    counted = sum(timing.steps for timing in directory.records(Timing, up_to=step))
    if counted != timed:
        yield f"{Timing.file} has the times of {counted} steps instead of {timed}"
    cuts, restored = directory.records(CutRecord, up_to=step), directory.records(RestoredRecord, up_to=step)
    events: list[CutRecord | RestoredRecord] = [*cuts, *restored]
    there = [(event.step, *pair) for event in events for pair in event.orders.items()]
    wanted = [(event.step, *pair) for event in history for pair in orders_after(event).items()]
    if lost := [change for change in wanted if change not in there]:
        yield f"{CutRecord.file} lacks {len(lost)} of {len(wanted)} changes of order, the first of step {lost[0][0]}"
    decided = Counter(record.step for record in directory.records(DecisionRecord, up_to=step))
    made = [event.step for event in history if isinstance(event, Decision)]
    if gone := [at for at in made if not decided[at]]:
        yield f"{DecisionRecord.file} lacks {len(gone)} of {len(made)} decisions, the first of step {gone[0]}"


def warn_if_moved(directory: RunDirectory, device: torch.device, processes: int, before: int | None) -> None:
    """Warn where the number of threads or of processes is another than before: the result has other bits.

    Runs of earlier versions do not say how many processes they had.
    """
    threads, now = threads_of(directory), torch.get_num_threads()
    if before is not None and before != processes:
        said, cure = f"{processes} instead of {_counted(before, 'process')}", "start it with as many as before"
    elif device.type == "cpu" and threads is not None and threads != now:
        said, cure = f"{now} instead of {_counted(threads, 'thread')}", f"--threads {threads} takes as many as before"
    else:
        return
    warnings.warn(
        f"{directory.path} goes on with {said}: sums are rounded otherwise, and the result is not that of a run which"
        f" was never stopped; {cure}",
        stacklevel=2,
    )


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}{'es' if thing.endswith('s') else 's'}"


def threads_of(directory: RunDirectory) -> int | None:
    """The number of threads a run began with; None if that is not known."""
    try:
        return directory.environment().threads
    except RunError:
        return None
