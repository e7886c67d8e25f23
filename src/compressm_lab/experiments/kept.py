"""Our results beside the paper's that are kept in the package: one row a seed and cell, for tables without the runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path

from compressm_lab.experiments.engine import Campaign
from compressm_lab.experiments.recipes import Arm, FinalOrder
from compressm_lab.experiments.rows import concurrency, joined, origin, outcome
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.runs.records import RunError
from compressm_lab.runs.run import Run

FILE = Path(str(resources.files("compressm_lab.runs"))) / "ours.json"
NAME, _TITLE = "reproduce", "Our trainings in the paper's own setting"


@dataclass(frozen=True)
class Kept:
    """The rows of a result file.

    `variant` is the folder of an arm's runs, `truncated` the order of a copy that was cut after training, or 0.
    """

    rows: tuple[Row, ...] = ()

    @classmethod
    def read(cls, path: Path | None = None) -> Kept:
        """Read the rows of a file, by default those of the package; none if there is no file."""
        path = path or FILE
        if not path.exists():
            return cls()
        found = Measurement.read(path)
        needed = ("variant", "seed", "truncated", "steps", "order", "best", "seconds", "commit", "machine")
        found.require(NAME, needed=needed, words=("variant",), command="compressm reproduce")
        return cls(tuple(found.rows))

    def of(self, arm: Arm, seeds: Iterable[int]) -> tuple[Row, ...]:
        """The rows of these seeds of an arm."""
        found = self._by_cell.get((arm.folder, arm.truncated or 0), {})
        return tuple(found[seed] for seed in seeds if seed in found)

    def filled(self, arm: Arm, seeds: range) -> Arm | None:
        """Fill in the mean final order of the arm beside this one; None without rows of that."""
        rows = self.of(arm.beside, seeds) if arm.beside else ()
        if not rows or arm.beside is None:
            return None
        mean = sum(float(row["order"]) for row in rows) / len(rows)
        return arm.filled(FinalOrder(mean, arm.beside.read(0).model.depth))

    @cached_property
    def _by_cell(self) -> dict[tuple[object, object], dict[object, Row]]:
        found: dict[tuple[object, object], dict[object, Row]] = {}
        for row in self.rows:
            found.setdefault((row["variant"], row["truncated"]), {})[row["seed"]] = row
        return found


def collected(plan: Campaign) -> Measurement | None:
    """The rows of all finished trainings of a plan; None without any.

    Runs that cannot be read are named and left out.
    """
    rows: list[Row] = []
    last: Run | None = None
    for arm, resolved in plan.resolved():
        for seed in plan.seeds_of(arm) if resolved else ():
            assert resolved is not None
            try:
                run = plan.finished_run(resolved, seed)
                found = None if run is None else _row(plan, resolved, run)
            except RunError as error:
                print(f"left out: {resolved}, seed {seed}: {error}", file=sys.stderr)
                continue
            if found is not None:
                rows.append(found)
                last = run
    if last is None:
        return None
    unique = {(row["variant"], row["truncated"], row["seed"]): row for row in rows}
    return Measurement(NAME, _TITLE, 1, list(unique.values()), last.environment)


def write(plan: Campaign, path: Path) -> Path | None:
    """Write the rows of a plan, joined with those that are kept; None if nothing is finished."""
    found = collected(plan)
    if found is None:
        return None
    before = Measurement.read(FILE) if FILE.exists() else None
    return joined([before, found], by=("variant", "truncated")).write(path)


def _row(plan: Campaign, arm: Arm, run: Run) -> Row | None:
    """One row: the run itself, or its copy that was cut after training to the order of the arm."""
    directory = RunDirectory(Path(run.path))
    found: Row = {"variant": arm.folder, "seed": run.seed, "truncated": arm.truncated or 0}
    found |= outcome(directory) | concurrency(directory)
    if arm.truncated is not None:
        copies = (copy for copy in run.truncations if copy.order == arm.truncated and copy.split == "test")
        copy = next(copies, None)
        if copy is None or copy.accuracy is None:
            return None
        found |= {"order": copy.mean_order, "best": 100 * copy.accuracy}
    teacher = plan.finished_run(arm.teacher, run.seed) if arm.teacher else None
    return found | ({"before_s": teacher.seconds} if teacher and teacher.seconds else {}) | origin(run.environment)
