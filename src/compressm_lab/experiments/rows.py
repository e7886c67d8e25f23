"""Result files with one row a training: collecting, joining with earlier results, and the commands that write them."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from compressm.errors import SavingError
from compressm_lab.experiments.engine import Campaign, conduct, require_ready, require_same_recipes
from compressm_lab.experiments.executors import LocalExecutor, heard_as_ctrl_c
from compressm_lab.experiments.recipes import Training
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Environment, Measurement, MeasurementError, Row
from compressm_lab.runs.records import RunError
from compressm_lab.runs.run import Run, read_run
from compressm_lab.training.config import ConfigError

# The columns of every row of `outcome`, beside its variant.
_COLUMNS = ("seed", "steps", "initial_order", "order", "best", "last", "steps_s", "seconds", "cuts_s", "step_s")


def outcome(directory: RunDirectory) -> Row:
    """Summarise a run: orders, accuracies in percent, and seconds.

    `best` is the test accuracy where `validation` was best since the last cut; `step_s` is the time of one step at the
    end; `recording_s` that of recording CUDA graphs, with the first steps at each size, in which kernels are compiled.
    """
    run = read_run(directory)
    tests = [(one, one.accuracy) for one in run.evaluations if one.split == "test" and one.accuracy is not None]
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
    """The median time of a step at the final orders without recording; of all steps if there is no such span."""
    whole = [timing for timing in run.timings if timing.steps]
    if not whole:
        raise RunError(f"{run.path} has no times: move it away to train it again")
    alike = [timing for timing in whole if timing.orders == run.final_orders and "capture" not in timing.seconds]
    return median(timing.seconds["steps"] / timing.steps for timing in alike or whole)


def note_concurrency(trainings: Iterable[Training], processes: int) -> None:
    """Write the number of trainings at a time into each run; a run that is resumed keeps the largest."""
    new = [training.run for training in trainings if not training.finished]
    for run in new:
        run.note_together(min(processes, len(new)))


def concurrency(directory: RunDirectory) -> Row:
    """The number of trainings that ran at a time with this one, as a column; no column if it is not known."""
    return {} if directory.together is None else {"together": directory.together}


@dataclass(frozen=True)
class ResultFile:
    """A result with the name of its file and one row a training, which `found` reads from the folder of its run.

    `steps` is the number of steps of every training if rows are joined with earlier ones, those of `outcome`; 0 if the
    file is written anew each time.
    """

    path: Path
    title: str
    trainings: Sequence[Training]
    found: Callable[[RunDirectory], Row]
    steps: int = 0

    def collect(self) -> Measurement | None:
        """Collect the rows of finished trainings, with date, commit and machine; None without any.

        Trainings that cannot be read are named and left out. The environment is the last on the machine that has most
        rows.
        """
        rows: list[Row] = []
        environments: dict[str, Environment] = {}
        for training in (one for one in self.trainings if one.finished):
            try:
                here = training.run.environment()
                rows.append(training.names | self.found(training.run) | origin(here))
            except (RunError, SavingError) as error:
                print(f"left out: {training}: {error}", file=sys.stderr)
            else:
                environments[here.machine] = here
        return Measurement(self.path.stem, self.title, 1, rows, environments[_most(rows)]) if rows else None

    def earlier(self, added: Sequence[Measurement] = ()) -> list[Measurement]:
        """Earlier results to join with: the file on the disk and those `added`; rows that do not fit are refused."""
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
        """Write rows joined with `earlier` ones; returns trainings without a new row, or with `all_count` any row."""
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
    return [one for one in trainings if found is None or not any(_is_of(row, one) for row in found.rows)]


def _is_of(row: Row, training: Training) -> bool:
    return all(row[name] == value for name, value in training.names.items())


def joined(measured: Iterable[Measurement | None], by: Sequence[str] = ("variant",)) -> Measurement:
    """Join results, variant by variant; of rows with the same columns `by` and the same seed the last one stays.

    A row without date, commit and machine has those of its result. The environment is the last on the machine that has
    most rows.
    """
    results = [one for one in measured if one is not None]
    found = ((origin(one.environment) | row) for one in results for row in one.rows)
    rows = {(tuple(row[name] for name in by), row["seed"]): row for row in found}
    arms = list(dict.fromkeys(arm for arm, _ in rows))
    keys = sorted(rows, key=lambda key: (arms.index(key[0]), key[1]))
    machine = _most(rows.values())
    environments = [one.environment for one in results if one.environment.machine == machine]
    environment = environments[-1] if environments else results[-1].environment
    return replace(results[-1], rows=[rows[key] for key in keys], environment=environment)


def origin(here: Environment) -> Row:
    """Date, commit and machine of a training."""
    return {"date": here.date, "commit": here.commit, "machine": here.machine}


def _most(rows: Iterable[Row]) -> str:
    """The machine that trained most rows."""
    return Counter(str(row["machine"]) for row in rows).most_common(1)[0][0]


def _keep_concurrency(found: Measurement, earlier: Sequence[Measurement]) -> None:
    """Copy the number of trainings at a time from earlier results into rows without one."""
    rows = (row for one in earlier for row in one.rows if "together" in row)
    known = {(row["variant"], row["seed"]): row["together"] for row in rows}
    for row in found.rows:
        if "together" not in row and (key := (row["variant"], row["seed"])) in known:
            row["together"] = known[key]


def _why_not(earlier: Iterable[Measurement], name: str, steps: int) -> str | None:
    """Words for why earlier results do not fit into one table with new ones of this name and number of steps."""
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
    """Tell if numbers are finite and not below 0, accuracies in percent, seed and concurrency integers."""
    numbers = [value for value in row.values() if not isinstance(value, str)]
    if any(isinstance(value, bool) or not math.isfinite(value) or value < 0 for value in numbers):
        return False
    percent = all(float(row.get(name, 0)) <= 100 for name in ("best", "last", "validation"))
    whole = all(isinstance(row[name], int) for name in ("seed", "together") if name in row)
    return percent and whole and all(float(row[name]) > 0 for name in ("order", "initial_order"))


def options(parser: argparse.ArgumentParser, *, seeds: int, steps: str, processes: int = 1, joins: bool = True) -> None:
    """Add the options of all commands that train arms; `steps` names the default, `joins` adds --add."""
    parser.add_argument(
        "--out", type=Path, default=Path("out/studies"), help="folder of results and runs (%(default)s)"
    )
    parser.add_argument("--seeds", type=count, default=seeds, help="trainings of each (%(default)s)")
    at_a_time = "trainings at a time; times compare only one by one (%(default)s)"
    parser.add_argument("--processes", type=count, default=processes, help=at_a_time)
    parser.add_argument("--data", type=Path, help="folder of data sets")
    parser.add_argument("--steps", type=count, help=f"of each training ({steps})")
    parser.add_argument("--only-collect", action="store_true", help="train nothing, write what is finished")
    parser.set_defaults(add=[])
    if joins:
        parser.add_argument("--add", type=result, nargs="+", help="results of other trainings, as of an earlier day")


def train_and_write(
    parser: argparse.ArgumentParser, given: argparse.Namespace, plan: Campaign, files: Sequence[ResultFile]
) -> list[Path]:
    """Train what is not done yet and write every file; exit with an error if trainings are missing in them."""
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
    """Train what is not done yet, `processes` at a time; after a signal trainings save, and the exit code is 130."""
    say, executor, wanted = partial(print, flush=True), LocalExecutor(processes, data), plan.trainings()
    require_ready(wanted, executor, data, say)
    for training in wanted:
        if training.finished:
            say(f"{training}: was done")
    note_concurrency(wanted, processes)
    with heard_as_ctrl_c():
        ended = conduct(plan, executor, say)
    if ended.interrupted:
        print("stopped, and what was trained is saved: the same command goes on", file=sys.stderr)
        raise SystemExit(130)


def result(path: str) -> Measurement:
    """Read a result that --add names, before anything is trained."""
    try:
        return Measurement.read(path)
    except MeasurementError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str, least: int = 1) -> int:
    """Read an integer of at least `least` from the command line."""
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return int(text)
