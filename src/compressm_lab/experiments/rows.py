"""Trainings as rows of a result file: what is kept of each, and how results of several days become one.

`train_and_write` is what every command does that trains arms and writes such a file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from compressm.errors import SavingError
from compressm.files import replacing
from compressm_lab.experiments.arms import Training
from compressm_lab.experiments.engine import Campaign, conduct, require_ready, require_same_recipes
from compressm_lab.experiments.executors import LocalExecutor, heard_as_ctrl_c
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Environment, Measurement, MeasurementError, Row
from compressm_lab.runs.records import RunError
from compressm_lab.runs.run import Run, read_run
from compressm_lab.training.config import ConfigError

_CONCURRENCY = "together.json"  # in the folder of a run: how many were trained at a time
# What every row of `outcome` has, beside its variant.
_COLUMNS = ("seed", "steps", "initial_order", "order", "best", "last", "steps_s", "seconds", "cuts_s", "step_s")


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


def note_concurrency(trainings: Iterable[Training], processes: int) -> None:
    """Write down how many run at a time, before they begin; of one that goes on the most that there were."""
    new = [training.run for training in trainings if not training.finished]
    for run in new:
        before = concurrency(run).get("together", 1) if run.exists else 1
        run.path.mkdir(parents=True, exist_ok=True)
        with replacing(run.path / _CONCURRENCY) as scratch:
            scratch.write_text(json.dumps({"together": max(int(before), min(processes, len(new)))}))


def concurrency(directory: RunDirectory) -> Row:
    """How many trainings ran at a time with this one; nothing where that was not written down."""
    try:
        return {"together": int(json.loads((directory.path / _CONCURRENCY).read_text())["together"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


@dataclass(frozen=True)
class ResultFile:
    """A result named as its file: one row a training, of what `found` reads in the folder of its run.

    `steps` are those of every training where the file is joined with earlier ones, whose rows are those of `outcome`;
    0 where it is written anew each time.
    """

    path: Path
    title: str
    trainings: Sequence[Training]
    found: Callable[[RunDirectory], Row]
    steps: int = 0

    def collect(self) -> Measurement | None:
        """One row a training that is done: which it is, what is found, when, where and at which commit.

        Those that cannot be read are named and left out. The environment is the last on the machine that has most of
        them; None where there is no row.
        """
        rows: list[Row] = []
        environments: dict[str, Environment] = {}
        for training in (one for one in self.trainings if one.finished):
            try:
                here = training.run.environment()
                rows.append(training.names | self.found(training.run) | _origin(here))
            except (RunError, SavingError) as error:
                print(f"left out: {training}: {error}", file=sys.stderr)
            else:
                environments[here.machine] = here
        return Measurement(self.path.stem, self.title, 1, rows, environments[_most(rows)]) if rows else None

    def earlier(self, added: Sequence[Measurement] = ()) -> list[Measurement]:
        """The result that is at the path already, if any, before those `added`; refused where rows do not fit."""
        if not self.steps:
            return []
        added = [one for one in added if one.name == self.path.stem]
        if why := _why_not(added, self.path.stem, self.steps):
            raise MeasurementError(f"--add of {why}")
        if not self.path.exists():
            return added
        try:
            there = Measurement.read(self.path)
        except MeasurementError as error:
            raise MeasurementError(f"{error}; it would be lost: choose another --out") from None
        if why := _why_not([there], self.path.stem, self.steps):
            raise MeasurementError(f"{self.path} is there, of {why}; it would be lost: choose another --out")
        return [there, *added]

    def write(self, earlier: Sequence[Measurement], *, all_count: bool = False) -> list[Training]:
        """What is finished, beside `earlier` results; which trainings have no row: in all of it, or of those here."""
        new = self.collect()
        if new is None and not earlier:
            print(f"no training of {self.path.stem.removeprefix('results-')} was finished: there is nothing to write")
            return list(self.trainings)
        if new is not None:
            _keep_concurrency(new, earlier)
        found = joined([*earlier, new], by=[name for name in self.trainings[0].names if name != "seed"])
        if others := sum(not any(_is_of(row, training) for training in self.trainings) for row in found.rows):
            print(f"{others} row{'s' if others > 1 else ''} of trainings that were not asked for here stay")
        found.write(self.path)
        print(f"result: {self.path}; `compressm bench table {self.path}` shows it")
        return missing(found if all_count else new, self.trainings)


def missing(found: Measurement | None, trainings: Iterable[Training]) -> list[Training]:
    """The trainings that have no row."""
    rows = [] if found is None else found.rows
    return [training for training in trainings if not any(_is_of(row, training) for row in rows)]


def _is_of(row: Row, training: Training) -> bool:
    return all(row[name] == value for name, value in training.names.items())


def joined(found: Iterable[Measurement | None], by: Sequence[str] = ("variant",)) -> Measurement:
    """The rows of all that there are, variant by variant; where columns `by` and seed are the same, that of the last.

    Rows of older results that do not say where they are from are from where the whole is. The environment is the last
    on the machine that has most of the rows.
    """
    results = [one for one in found if one is not None]
    rows = {
        (tuple(row[name] for name in by), row["seed"]): _origin(one.environment) | row
        for one in results
        for row in one.rows
    }
    arms = list(dict.fromkeys(arm for arm, _ in rows))
    keys = sorted(rows, key=lambda key: (arms.index(key[0]), key[1]))
    machine = _most(rows.values())
    environments = [one.environment for one in results if one.environment.machine == machine]
    environment = environments[-1] if environments else results[-1].environment
    return replace(results[-1], rows=[rows[key] for key in keys], environment=environment)


def _origin(here: Environment) -> Row:
    """When, at which commit and where."""
    return {"date": here.date, "commit": here.commit, "machine": here.machine}


def _most(rows: Iterable[Row]) -> str:
    """The machine that trained most of them."""
    return Counter(str(row["machine"]) for row in rows).most_common(1)[0][0]


def _keep_concurrency(found: Measurement, earlier: Sequence[Measurement]) -> None:
    """A row that does not say how many were trained at a time takes that of an earlier result."""
    rows = (row for one in earlier for row in one.rows if "together" in row)
    known = {(str(row["variant"]), row["seed"]): row["together"] for row in rows}
    for row in found.rows:
        key = (str(row["variant"]), row["seed"])
        if "together" not in row and key in known:
            row["together"] = known[key]


def _why_not(earlier: Iterable[Measurement], name: str, steps: int) -> str | None:
    """What keeps earlier results from one table with new ones of this name, whose trainings have so many steps."""
    for one in earlier:
        try:
            one.require(name, needed=("variant", *_COLUMNS), words=("variant",), command="this study")
        except MeasurementError as error:
            return f"rows that cannot be read: {error}"
        if strange := [row for row in one.rows if not _possible(row)]:
            values = ", ".join(f"{name} {strange[0][name]!r}" for name in ("seed", "order", "best", "last"))
            return f"a row that cannot be: {strange[0]['variant']} with {values}"
        if other := [row["steps"] for row in one.rows if row["steps"] != steps]:
            return f"trainings with {other[0]} steps: expected {steps}, as of those beside them"
    return None


def _possible(row: Row) -> bool:
    """Whether numbers are finite and not below 0, accuracies in percent, seed and concurrency integers."""
    numbers = [value for value in row.values() if not isinstance(value, str)]
    if any(isinstance(value, bool) or not math.isfinite(value) or value < 0 for value in numbers):
        return False
    percent = all(float(row.get(name, 0)) <= 100 for name in ("best", "last", "validation"))
    whole = all(isinstance(row[name], int) for name in ("seed", "together") if name in row)
    return percent and whole and all(float(row[name]) > 0 for name in ("order", "initial_order"))


def options(parser: argparse.ArgumentParser, *, seeds: int, steps: str, processes: int = 1, joins: bool = True) -> None:
    """Add what all commands understand that train arms; `steps` says how many if nothing is said.

    `joins`: whether rows of an earlier result stay in the file.
    """
    parser.add_argument(
        "--out", type=Path, default=Path("out/studies"), help="folder of results and runs (%(default)s)"
    )
    parser.add_argument("--seeds", type=count, default=seeds, help="trainings of each (%(default)s)")
    parser.add_argument(
        "--processes",
        type=count,
        default=processes,
        help="trainings at a time; times compare only one by one (%(default)s)",
    )
    parser.add_argument("--data", type=Path, help="folder of data sets")
    parser.add_argument("--steps", type=count, help=f"of each training ({steps})")
    parser.add_argument("--only-collect", action="store_true", help="train nothing, write what is finished")
    parser.set_defaults(add=[])
    if joins:
        parser.add_argument("--add", type=result, nargs="+", help="results of other trainings, as of an earlier day")


def train_and_write(
    parser: argparse.ArgumentParser, given: argparse.Namespace, plan: Campaign, files: Sequence[ResultFile]
) -> list[Path]:
    """Train what is not done yet and write every file; then an error where trainings are missing in them."""
    try:
        names = [file.path.stem for file in files]
        if strange := [one.name for one in given.add if one.name not in names]:
            raise MeasurementError(f"--add of a result named {strange[0]}: expected {' or '.join(names)}")
        for file in files:
            file.earlier(given.add)  # what would be refused at the end is refused now
        require_same_recipes(plan.trainings())
        if not given.only_collect:
            train(plan, given.processes, given.data)
        # Another command may have written since.
        absent = [one for file in files for one in file.write(file.earlier(given.add), all_count=given.only_collect)]
    except (ConfigError, MeasurementError, RunError) as error:
        parser.error(str(error))
    if absent:
        asked = sum(len(file.trainings) for file in files)
        named = "; ".join(map(str, absent[:3])) + ("; …" if len(absent) > 3 else "")
        raise SystemExit(f"{len(absent)} of {asked} trainings are not finished, or not readable: {named}")
    return [file.path for file in files]


def train(plan: Campaign, processes: int, data: Path | None) -> None:
    """What is not done yet, `processes` at a time; how each ended is printed.

    After Ctrl-C, or what ends a process politely, trainings save; exit 130.
    """
    executor, wanted = LocalExecutor(processes, data), plan.trainings()
    require_ready(wanted, executor, data, _said)
    for training in wanted:
        if training.finished:
            _said(f"{training}: was done")
    note_concurrency(wanted, processes)
    with heard_as_ctrl_c():
        ended = conduct(plan, executor, _said)
    if ended.interrupted:
        print("stopped, and what was trained is saved: the same command goes on", file=sys.stderr)
        raise SystemExit(130)


def _said(line: str) -> None:
    print(line, flush=True)


def result(path: str) -> Measurement:
    """A result, read before anything is trained, so that a wrong one is not found out after it."""
    try:
        return Measurement.read(path)
    except MeasurementError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str, least: int = 1) -> int:
    """An integer of at least so much, or why it is none."""
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return int(text)
