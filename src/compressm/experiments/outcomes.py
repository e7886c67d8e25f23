"""What studies that train several variants keep of every run, and how results of several days become one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from compressm.experiments.processes import Processes, heard_as_ctrl_c
from compressm.experiments.trainings import Training
from compressm.runs.directory import RunDirectory
from compressm.runs.measurement import Measurement, Row
from compressm.runs.run import Run, read_run


@dataclass(frozen=True)
class Job:
    """One training, in a process of its own; with its `order` where a variant is trained at several."""

    variant: str
    seed: int
    training: Training
    order: int | None = None

    def __str__(self) -> str:
        size = "" if self.order is None else f"n = {self.order}, "
        return f"{self.variant}, {size}seed {self.seed}"


def train(wanted: Sequence[Job], *, processes: int, data: Path | None) -> None:
    """What is not done yet, `processes` at a time; how each ended is printed.

    After Ctrl-C, or what ends a process politely, trainings save; exit 130.
    """
    executor = Processes(processes, data)
    try:
        with heard_as_ctrl_c():
            started = [None if job.training.finished else executor.submit(job.training) for job in wanted]
            for job, running in zip(wanted, started, strict=True):
                said = "was done" if running is None else running.result().message or "done"
                print(f"{job}: {said}", flush=True)
    except KeyboardInterrupt:
        executor.stop()
        print("stopped, and what was trained is saved: the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None


def collected(name: str, title: str, wanted: Sequence[Job], found: Callable[[RunDirectory], Row]) -> Measurement:
    """One row a training that is done: which it is, what is found in its folder, when, where and at which commit.

    The environment is that of the last of them.
    """
    rows: list[Row] = []
    environments = []
    for job in wanted:
        if job.training.finished:
            directory = RunDirectory(job.training.folder)
            named: Row = {"variant": job.variant, "seed": job.seed}
            named |= {} if job.order is None else {"order": job.order}
            here = directory.environment()
            said: Row = {"date": here.date, "commit": here.commit, "machine": here.machine}
            rows.append(named | found(directory) | said)
            environments.append(here)
    if not rows:
        raise SystemExit("no training was finished: there is nothing to collect")
    return Measurement(name, title, 1, rows, environments[-1])


def joined(found: Measurement, earlier: Iterable[Measurement]) -> Measurement:
    """With the rows of earlier results before those that are new, variant by variant.

    The environment is the last one on the machine that trained most of them.
    """
    results = [*earlier, found]
    rows = {(str(row["variant"]), row["seed"]): _dated(row, one) for one in results for row in one.rows}
    places = list(dict.fromkeys(variant for variant, _ in rows))
    machines = Counter(str(row["machine"]) for row in rows.values())
    most = max(reversed(results), key=lambda one: machines[one.environment.machine])
    keys = sorted(rows, key=lambda key: (places.index(key[0]), key[1]))
    return replace(found, rows=[rows[key] for key in keys], environment=most.environment)


def _dated(row: Row, found: Measurement) -> Row:
    """With what only the whole result says of it, in older ones."""
    here = found.environment
    said: Row = {"date": here.date, "commit": here.commit, "machine": here.machine}
    return row | {name: value for name, value in said.items() if name not in row}


def written(found: Measurement, path: Path, wanted: Sequence[Job]) -> Path:
    """The result in its file, named."""
    rows = {(job.variant, job.seed) for job in wanted}
    if others := sum((row["variant"], row["seed"]) not in rows for row in found.rows):
        print(f"{others} row{'s' if others > 1 else ''} of trainings that were not asked for here stay")
    path = found.write(path)
    print(f"result: {path}; `compressm bench table {path}` shows it")
    return path


def require_finished(wanted: Sequence[Job]) -> None:
    """An error that names trainings that were asked for and are not finished."""
    if missing := [str(job) for job in wanted if not job.training.finished]:
        named = "; ".join(missing[:3]) + ("; …" if len(missing) > 3 else "")
        raise SystemExit(f"{len(missing)} of {len(wanted)} trainings are not finished: {named}")


def kept(found: Measurement, path: Path, wanted: Sequence[Job]) -> Path:
    """The result in its file; then an error where trainings that were asked for are not in it."""
    path = written(found, path, wanted)
    require_finished(wanted)
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
        raise SystemExit(f"{directory.path} is finished, but has no accuracy on test: move it away to train it again")
    last, accuracy = tests[-1]
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
    alike = [timing for timing in whole if timing.orders == run.final_orders and "capture" not in timing.seconds]
    return median(timing.seconds["steps"] / timing.steps for timing in alike or whole)
