"""What `python -m compressm_lab.experiments.NAME` understands, the same for every study."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from compressm_lab.runs.measurement import Measurement, MeasurementError, Row

Progress = Callable[[str], None]
# Called as study(seeds=…, quick=…, progress=…): seeds 0, 1, …; `quick` is a small version that takes seconds. A study
# that can do several things at a time takes processes=… too.
Study = Callable[..., Measurement]


def silent(line: str) -> None:
    """Progress that nobody reads."""


def result(path: str) -> Measurement:
    """Read before anything is trained, so that a wrong one is not found out after it."""
    try:
        return Measurement.read(path)
    except MeasurementError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# What every row of a study of trainings has, beside its variant.
_COLUMNS = ("seed", "steps", "initial_order", "order", "best", "last", "steps_s", "seconds", "cuts_s", "step_s")


def _why_not(earlier: Iterable[Measurement], name: str, steps: int) -> str | None:
    """What keeps earlier results from one table with new ones of this name, whose trainings have so many steps."""
    for one in earlier:
        if one.name != name:
            return f"a result named {one.name}: expected {name}"
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
    """Numbers that are finite and not below 0, accuracies in percent, a seed and a company that are integers."""
    numbers = [value for value in row.values() if not isinstance(value, str)]
    if any(isinstance(value, bool) or not math.isfinite(value) or value < 0 for value in numbers):
        return False
    percent = all(float(row.get(name, 0)) <= 100 for name in ("best", "last", "validation"))
    whole = all(isinstance(row[name], int) for name in ("seed", "together") if name in row)
    return percent and whole and all(float(row[name]) > 0 for name in ("order", "initial_order"))


def earlier_results(
    parser: argparse.ArgumentParser, path: Path, added: Sequence[Measurement], steps: int
) -> list[Measurement]:
    """The result that is at `path` already, if any, before those `added`; all of so many steps, or an error."""
    if why := _why_not(added, path.stem, steps):
        parser.error(f"--add of {why}")
    if not path.exists():
        return list(added)
    try:
        there = Measurement.read(path)
    except MeasurementError as error:
        parser.error(f"{error}; it would be lost: choose another --out")
    if why := _why_not([there], path.stem, steps):
        parser.error(f"{path} is there, of {why}; it would be lost: choose another --out")
    return [there, *added]


def spoken(line: str) -> None:
    """Progress at once, from any process."""
    print(line, flush=True)


def run(
    study: Study, *, seeds: int, description: str, arguments: Sequence[str] | None = None, parallel: bool = False
) -> Path:
    """Measure, with a line whenever something was done, and write OUT/NAME.json."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path("out/studies"), help="folder of the result (%(default)s)")
    parser.add_argument("--seeds", type=count, default=seeds, help="how often, each with its own seed (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small version, in seconds")
    if parallel:
        parser.add_argument(
            "--processes", type=count, default=1, help="models at a time, on one core each (%(default)s)"
        )
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the models are small: on several threads they are slower
    options = {"processes": given.processes} if parallel else {}
    measurement = study(seeds=given.seeds, quick=given.quick, progress=spoken, **options)
    path = measurement.write(given.out / f"{measurement.name}.json")
    print(f"result: {path}; `compressm bench table {path}` shows it")
    return path


def count(text: str) -> int:
    """An integer of at least 1, or why it is none."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def seed_number(text: str) -> int:
    """An integer of at least 0, or why it is none."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)
