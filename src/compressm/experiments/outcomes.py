"""What studies that train several variants keep of every run, and how results of several days become one."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from compressm.compression import SavingError
from compressm.experiments.processes import Processes, heard_as_ctrl_c
from compressm.experiments.trainings import Training
from compressm.runs.atomic import replacing
from compressm.runs.directory import RunDirectory
from compressm.runs.environment import Environment
from compressm.runs.measurement import Measurement, Row
from compressm.runs.records import RunError
from compressm.runs.run import Run, read_run
from compressm.training.config import ConfigError

_COMPANY = "together.json"  # in the folder of a run: how many were trained at a time


@dataclass(frozen=True)
class Job:
    """One training, in a process of its own; with its `order` where a variant is trained at several.

    `task` is named where a command has several.
    """

    variant: str
    seed: int
    training: Training
    order: int | None = None
    task: str = ""

    def __str__(self) -> str:
        size = "" if self.order is None else f"n = {self.order}, "
        return f"{self.task}{': ' * bool(self.task)}{self.variant}, {size}seed {self.seed}"

    def is_of(self, row: Row) -> bool:
        """Whether a row is of this training."""
        alike = (row["variant"], row["seed"]) == (self.variant, self.seed)
        return alike and (self.order is None or row["order"] == self.order)


def train(wanted: Sequence[Job], *, processes: int, data: Path | None) -> None:
    """What is not done yet, `processes` at a time; how each ended is printed.

    After Ctrl-C, or what ends a process politely, trainings save; exit 130.
    """
    executor = Processes(processes, data)
    new = [job for job in wanted if not job.training.finished]
    for job in new:
        _note_company(RunDirectory(job.training.folder), min(processes, len(new)))
    try:
        with heard_as_ctrl_c():
            started = [executor.submit(job.training) if job in new else None for job in wanted]
            for job, running in zip(wanted, started, strict=True):
                said = "was done" if running is None else running.result().message or "done"
                print(f"{job}: {said}", flush=True)
    except KeyboardInterrupt:
        executor.stop()
        print("stopped, and what was trained is saved: the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None


def _note_company(directory: RunDirectory, together: int) -> None:
    """Before a training begins; of one that goes on the most that there were."""
    before = company(directory).get("together", 1) if directory.exists else 1
    directory.path.mkdir(parents=True, exist_ok=True)
    with replacing(directory.path / _COMPANY) as scratch:
        scratch.write_text(json.dumps({"together": max(int(before), together)}))


def company(directory: RunDirectory) -> Row:
    """How many trainings ran at a time with this one, as `train` noted; nothing where that is not known."""
    try:
        return {"together": int(json.loads((directory.path / _COMPANY).read_text())["together"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def different(wanted: Sequence[Job]) -> str | None:
    """Why a run that is in the folder of a training cannot be gone on with, nor collected."""
    for job in wanted:
        try:
            if said := job.training.differs:
                return (
                    f"{job.training.folder} holds a run of another recipe than {job}: {said}; move it, or choose --out"
                )
        except (ConfigError, RunError) as error:
            return f"{error}; expected the recipe of {job}: move it, or choose --out"
    return None


def collected(name: str, title: str, wanted: Sequence[Job], found: Callable[[RunDirectory], Row]) -> Measurement | None:
    """One row a training that is done: which it is, what is found in its folder, when, where and at which commit.

    Those that cannot be read are named and left out. The environment is the last on the machine that has most of them;
    None where there is no row.
    """
    rows: list[Row] = []
    environments: dict[str, Environment] = {}
    for job in wanted:
        if job.training.finished:
            directory = RunDirectory(job.training.folder)
            named: Row = {"variant": job.variant, "seed": job.seed}
            named |= {} if job.order is None else {"order": job.order}
            try:
                here = directory.environment()
                said: Row = {"date": here.date, "commit": here.commit, "machine": here.machine}
                rows.append(named | found(directory) | said)
            except (RunError, SavingError) as error:
                print(f"left out: {job}: {error}", file=sys.stderr)
            else:
                environments[here.machine] = here
    return Measurement(name, title, 1, rows, environments[_most(rows)]) if rows else None


def _most(rows: Iterable[Row]) -> str:
    """The machine that trained most of them."""
    return Counter(str(row["machine"]) for row in rows).most_common(1)[0][0]


def joined(results: Sequence[Measurement]) -> Measurement:
    """The rows of all of them, variant by variant; of the same variant and seed that of the last.

    The environment is the last on the machine that has most of the rows.
    """
    rows = {(str(row["variant"]), row["seed"]): _dated(row, one) for one in results for row in one.rows}
    places = list(dict.fromkeys(variant for variant, _ in rows))
    keys = sorted(rows, key=lambda key: (places.index(key[0]), key[1]))
    machine = _most(rows.values())
    environments = [one.environment for one in results if one.environment.machine == machine]
    environment = environments[-1] if environments else results[-1].environment
    return replace(results[-1], rows=[rows[key] for key in keys], environment=environment)


def _dated(row: Row, found: Measurement) -> Row:
    """With what only the whole result says of it, in older ones."""
    here = found.environment
    said: Row = {"date": here.date, "commit": here.commit, "machine": here.machine}
    return row | {name: value for name, value in said.items() if name not in row}


def written(found: Measurement, path: Path, wanted: Sequence[Job]) -> Path:
    """The result in its file, named."""
    if others := sum(not any(job.is_of(row) for job in wanted) for row in found.rows):
        print(f"{others} row{'s' if others > 1 else ''} of trainings that were not asked for here stay")
    path = found.write(path)
    print(f"result: {path}; `compressm bench table {path}` shows it")
    return path


def missing(new: Measurement | None, wanted: Sequence[Job]) -> list[Job]:
    """The trainings that were asked for and have no row among the new ones."""
    rows = [] if new is None else new.rows
    return [job for job in wanted if not any(job.is_of(row) for row in rows)]


def require_none(absent: Sequence[Job], wanted: Sequence[Job]) -> None:
    """An error that names some of the trainings that are missing."""
    if absent:
        named = "; ".join(map(str, absent[:3])) + ("; …" if len(absent) > 3 else "")
        raise SystemExit(f"{len(absent)} of {len(wanted)} trainings are not finished, or not readable: {named}")


def kept(new: Measurement | None, earlier: Sequence[Measurement], path: Path, wanted: Sequence[Job]) -> Path:
    """The result in its file, beside the rows that were there; then an error where trainings are not in it."""
    if new is None and not earlier:
        raise SystemExit("no training was finished: there is nothing to collect")
    found = [*earlier, *([] if new is None else [new])]
    path = written(joined(found) if earlier else found[0], path, wanted)
    require_none(missing(new, wanted), wanted)
    return path


def outcome(directory: RunDirectory) -> Row:
    """Orders, accuracies in percent, and seconds.

    `best` is the test accuracy where `validation` was best since the last cut; `step_s` of one step at the end;
    `recording_s` is what CUDA graphs took, with the first steps at each size, in which kernels are compiled.
    """
    run = read_run(directory)
    tests = [
        (found, found.accuracy) for found in run.evaluations if found.split == "test" and found.accuracy is not None
    ]
    if not tests or run.score is None or run.score.test is None:
        raise RunError(f"{directory.path} is finished, but has no accuracy on test: move it away to train it again")
    last, accuracy = tests[-1]
    if last.step < run.steps:
        raise RunError(f"{directory.path} is finished, but its last test is at step {last.step} of {run.steps}")
    validation = {} if run.score.validation is None else {"validation": 100 * run.score.validation}
    return {
        "steps": run.steps,
        "initial_order": run.mean_initial_order,
        "order": run.mean_order,
        "best": 100 * run.score.test,
        "last": 100 * accuracy,
        "steps_s": last.step_seconds,
        "seconds": last.seconds,
        "cuts_s": sum(cut.seconds or 0.0 for cut in run.cut_records),
        "step_s": _step_seconds(run),
        "recording_s": sum(timing.seconds.get("capture", 0.0) for timing in run.timings),
        **validation,
    }


def _step_seconds(run: Run) -> float:
    """At the orders of the end, where no graph was recorded; all steps where there is no such stretch."""
    whole = [timing for timing in run.timings if timing.steps]
    if not whole:
        raise RunError(f"{run.path} has no times: move it away to train it again")
    alike = [timing for timing in whole if timing.orders == run.final_orders and "capture" not in timing.seconds]
    return median(timing.seconds["steps"] / timing.steps for timing in alike or whole)
