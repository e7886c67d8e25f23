"""What studies keep of every training, and how results of several days become one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from compressm.compression import SavingError
from compressm_lab.experiments.jobs import Job
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Environment, Measurement, Row
from compressm_lab.runs.records import RunError
from compressm_lab.runs.run import Run, read_run


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
                rows.append(named | found(directory) | _origin(here))
            except (RunError, SavingError) as error:
                print(f"left out: {job}: {error}", file=sys.stderr)
            else:
                environments[here.machine] = here
    return Measurement(name, title, 1, rows, environments[_most(rows)]) if rows else None


def _most(rows: Iterable[Row]) -> str:
    """The machine that trained most of them."""
    return Counter(str(row["machine"]) for row in rows).most_common(1)[0][0]


def joined(found: Iterable[Measurement | None]) -> Measurement:
    """The rows of all that there are, variant by variant; of the same variant and seed that of the last.

    Rows of older results that do not say where they are from are from where the whole is. The environment is the last
    on the machine that has most of the rows.
    """
    results = [one for one in found if one is not None]
    rows = {(str(row["variant"]), row["seed"]): _origin(one.environment) | row for one in results for row in one.rows}
    places = list(dict.fromkeys(variant for variant, _ in rows))
    keys = sorted(rows, key=lambda key: (places.index(key[0]), key[1]))
    machine = _most(rows.values())
    environments = [one.environment for one in results if one.environment.machine == machine]
    environment = environments[-1] if environments else results[-1].environment
    return replace(results[-1], rows=[rows[key] for key in keys], environment=environment)


def _origin(here: Environment) -> Row:
    """When, at which commit and where."""
    return {"date": here.date, "commit": here.commit, "machine": here.machine}


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
    # By variant and seed alone rows of one variant at several orders would be one: such a study has no earlier result.
    path = written(new if new is not None and not earlier else joined([*earlier, new]), path, wanted)
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
