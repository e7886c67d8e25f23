"""The paper's numbers: one JSON file for each of its tables and figures, by label."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Literal

from compressm.errors import did_you_mean
from compressm_lab.runs.groups import Group, Statistic, group_runs, speed_up, time_kind
from compressm_lab.runs.measurement import Row
from compressm_lab.runs.records import RunError
from compressm_lab.runs.run import Run

BASELINE, UNCUT = "baseline", "τ = 0"  # the method and the column of models that are never cut
FOLDER = Path(str(resources.files("compressm_lab.runs"))) / "paper"
Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class PaperItem:
    """A table or a figure: `origin` is its label in the paper's source, `says` what the paper reads from it.

    `values` is by task, method, column and quantity: order, accuracy (of the three best seeds), best, speed-up. Those
    of a table whose heads are final orders stand in the columns of the tolerances that led to them.
    """

    label: str
    origin: str
    title: str
    says: str
    values: Mapping[Key, Statistic]

    @property
    def kind(self) -> str:
        return "table" if self.origin.startswith("tab:") else "figure"

    def value(self, task: str, method: str, column: str, quantity: str) -> Statistic | None:
        """A number of the paper, None where it has no such."""
        return self.values.get((task, method, column, quantity))


def paper_labels() -> list[str]:
    """The labels of all tables and figures."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def read_paper(label: str) -> PaperItem:
    """The numbers of a table or figure, by its label without `tab:` or `fig:`."""
    if label not in paper_labels():
        hint = did_you_mean(label, paper_labels())
        raise RunError(f"{label!r} is not a label of the paper; expected one of {', '.join(paper_labels())}{hint}")
    stored = json.loads((FOLDER / f"{label}.json").read_text(encoding="utf-8"))
    values: dict[Key, Statistic] = {}
    for row in stored.pop("rows"):
        spreads = row.get("spreads", [None] * len(row["means"]))
        for column, mean, spread in zip(row["columns"], row["means"], spreads, strict=True):
            # How many seeds a mean is of is not always said.
            values[row["task"], row["method"], column, row["quantity"]] = Statistic(float(mean), spread, 0)
    return PaperItem(**stored, values=values)


# "accuracy" is of the three seeds that are best by test, as the paper counts, and "mean" of all.
Quantity = Literal["order", "accuracy", "mean", "best", "speed-up"]
_TOP = {"accuracy": 3, "best": 1}


@dataclass(frozen=True)
class Compared:
    """The seeds of one cell of a table; none where they are not trained yet, and then `missing` says why.

    `truncated` is the order that they are shown at, cut once after training; `before` are runs that had to be trained
    first, as teachers, whose time counts too. `kept` are rows of a result file, of seeds without a finished run here.
    """

    task: str
    method: str
    column: str
    runs: tuple[Run, ...] = ()
    missing: str = ""
    truncated: int | None = None
    before: tuple[Run, ...] = ()
    kept: tuple[Row, ...] = ()

    @cached_property
    def group(self) -> Group | None:
        return Group(self.column, self.runs, self.truncated) if self.runs else None

    @property
    def seconds(self) -> Statistic | None:
        """Seconds of a run, with what had to be trained before it."""
        own, before = (self.group.seconds if self.group else None), Statistic.of(run.seconds for run in self.before)
        if own is None:
            return Statistic.of(_seconds(row) for row in self.kept)
        return own if before is None else Statistic(own.centre + before.centre, own.spread, own.count)

    @property
    def orders(self) -> Statistic | None:
        """The final order of each seed."""
        ours = [] if self.group is None else [self.group.order_of(run) for run in self.group.finished]
        return Statistic.of([*ours, *(float(row["order"]) for row in self.kept)])

    @property
    def tests(self) -> list[float]:
        """The test value of each seed where its validation was best, the best first; accuracies in per cent."""
        found = [float(row["best"]) for row in self.kept]
        accurate = self.group is None or self.group.metric == "accuracy"
        if self.group is not None:
            found += [(100.0 if accurate else 1.0) * test for test in self.group.tests]
        return sorted(found, reverse=accurate)

    @property
    def steps(self) -> int:
        """The steps of a training."""
        return self.group.shown.steps if self.group else int(self.kept[0]["steps"])

    @property
    def commits(self) -> list[str]:
        """The commits of all seeds, each once."""
        every = [*(run.environment.commit for run in self.runs), *(str(row["commit"]) for row in self.kept)]
        return list(dict.fromkeys(every))

    @property
    def together(self) -> int:
        """The most trainings that ran at a time, those that had to be trained before among them; 1 if not known."""
        known = [run.together for run in (*self.runs, *self.before)] + [row.get("together") for row in self.kept]
        return max((int(count) for count in known if count is not None), default=1)

    @property
    def title(self) -> str:
        """The name in a legend of one task."""
        return self.column if self.method == "CompreSSM" else f"{self.method}, {self.column}"


@dataclass(frozen=True)
class Exhibit:
    """All that a report on a table or figure shows; `paper` is None for those of our own.

    `quick` says how it differs from the paper's where it is smaller; `head` is the share of training that pictures of
    spectra show.
    """

    label: str
    title: str
    picture: str
    quantity: Quantity
    cells: tuple[Compared, ...]
    paper: PaperItem | None = None
    quick: str = ""
    head: float = 1.0

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Every run once: cells may share them."""
        return tuple({run.path: run for cell in self.cells for run in cell.runs}.values())

    @cached_property
    def names(self) -> dict[str, str]:
        """Names of compressed runs here, by path: trainings that several exhibits share have one label for all."""
        compressed = (cell for cell in self.cells if cell.method == "CompreSSM")
        return {run.path: cell.column for cell in compressed for run in cell.runs}

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.task for cell in self.cells))

    def named(self, task: str) -> str:
        """The name of a task; quick versions train digits in its place."""
        return f"digits for {task}" if self.quick else task

    def of_task(self, task: str) -> list[Compared]:
        return [cell for cell in self.cells if cell.task == task]

    def ours(self, cell: Compared, quantity: Quantity) -> Statistic | None:
        """Our number; accuracies in per cent, and as the paper counts: of the three best seeds by test, or of fewer."""
        if quantity == "order":
            return cell.orders
        if quantity == "speed-up":
            if cell.group is None:
                return self._kept_speed_up(cell)
            found, kind = speed_up(cell.group, self._groups), time_kind(cell.group, self._groups)
            if kind != "CPU time" and max(one.together for one in (cell, *self._uncut(cell.task))) > 1:
                return None
            own, before = cell.group.time(kind), [run.time(kind) for run in cell.before]
            if found is None or own is None or not before or None in before:
                return found
            # As if the training of teachers had been part of each run.
            return _scaled(found, own.centre / (own.centre + fmean(filter(None, before))))
        return Statistic.of(cell.tests[: _TOP.get(quantity)])

    def _uncut(self, task: str) -> list[Compared]:
        """The cell that is never cut, if there is one."""
        return [cell for cell in self.of_task(task) if (cell.method, cell.column) == (BASELINE, UNCUT)]

    def _kept_speed_up(self, cell: Compared) -> Statistic | None:
        """The same of kept rows, by the model that is never cut; None unless all were trained alone on one machine."""
        uncut = self._uncut(cell.task)
        whole = uncut[0].kept if uncut else ()
        conditions = {(row.get("together"), row["machine"]) for row in (*cell.kept, *whole)}
        base, own = (Statistic.of(map(_seconds, rows)) for rows in (whole, cell.kept))
        if base is None or own is None or len(conditions) > 1 or next(iter(conditions))[0] != 1:
            return None
        ratios = Statistic.of(base.centre / _seconds(row) for row in cell.kept)
        return ratios and Statistic(base.centre / own.centre, ratios.spread, ratios.count)

    def theirs(self, cell: Compared, quantity: Quantity) -> Statistic | None:
        """The paper's number, in its own units."""
        return None if self.paper is None else self.paper.value(cell.task, cell.method, cell.column, quantity)

    @cached_property
    def _groups(self) -> Sequence[Group]:
        return group_runs(self.runs)


def _seconds(row: Row) -> float:
    """Seconds of a kept training, with what had to be trained before it."""
    return float(row["seconds"]) + float(row.get("before_s", 0))


def _scaled(sample: Statistic, factor: float) -> Statistic:
    return Statistic(factor * sample.centre, sample.spread and factor * sample.spread, sample.count)
