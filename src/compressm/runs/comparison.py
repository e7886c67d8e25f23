"""Runs beside the numbers of the paper that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from compressm.runs.groups import Group, Sample, group_runs, speed_up
from compressm.runs.paper import PaperItem
from compressm.runs.run import Run

Quantity = Literal["order", "accuracy", "best", "speed-up"]


@dataclass(frozen=True)
class Compared:
    """The seeds of one cell of a table; none where they are not trained yet, and then `missing` says why.

    `truncated` is the order that they are shown at, cut once after training; `before` are runs that had to be trained
    first, as teachers, whose time counts too.
    """

    task: str
    method: str
    column: str
    runs: tuple[Run, ...] = ()
    missing: str = ""
    truncated: int | None = None
    before: tuple[Run, ...] = ()

    @cached_property
    def group(self) -> Group | None:
        return Group(self.column, self.runs, self.truncated) if self.runs else None

    @property
    def seconds(self) -> Sample | None:
        """Of a run, with what had to be trained before it."""
        own, before = (self.group.seconds if self.group else None), Sample.of(run.seconds for run in self.before)
        return own if own is None or before is None else Sample(own.centre + before.centre, own.spread, own.count)

    @property
    def title(self) -> str:
        """In a legend of one task."""
        return self.column if self.method == "CompreSSM" else f"{self.method}, {self.column}"


@dataclass(frozen=True)
class Exhibit:
    """What a report on a table or figure is made of; `paper` is None for those of our own.

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
        """Each once: cells may share them."""
        return tuple({run.path: run for cell in self.cells for run in cell.runs}.values())

    @cached_property
    def names(self) -> dict[str, str]:
        """By path, what a compressed run is called here: trainings that several exhibits share have a label for all."""
        compressed = (cell for cell in self.cells if cell.method == "CompreSSM")
        return {run.path: cell.column for cell in compressed for run in cell.runs}

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.task for cell in self.cells))

    def named(self, task: str) -> str:
        """Quick versions train digits in its place."""
        return f"digits for {task}" if self.quick else task

    def of_task(self, task: str) -> list[Compared]:
        return [cell for cell in self.cells if cell.task == task]

    def ours(self, cell: Compared, quantity: Quantity) -> Sample | None:
        """Accuracies in per cent: of the three best seeds by validation, or of all where there are fewer."""
        if cell.group is None:
            return None
        if quantity == "order":
            return cell.group.order
        if quantity == "speed-up":
            return self._speed_up(cell, cell.group)
        found = cell.group.top(1) if quantity == "best" else cell.group.top(3) or cell.group.top()
        return None if found is None else _scaled(found, 100.0 if cell.group.metric == "accuracy" else 1.0)

    def theirs(self, cell: Compared, quantity: Quantity) -> Sample | None:
        """Of the paper, in its own units."""
        return None if self.paper is None else self.paper.value(cell.task, cell.method, cell.column, quantity)

    def _speed_up(self, cell: Compared, group: Group) -> Sample | None:
        """With the time of teachers; as if their training had been part of each run."""
        found = speed_up(group, self._groups)
        if found is None or not cell.before or cell.seconds is None or group.seconds is None:
            return found
        return _scaled(found, group.seconds.centre / cell.seconds.centre)

    @cached_property
    def _groups(self) -> Sequence[Group]:
        return group_runs(self.runs)


def _scaled(sample: Sample, factor: float) -> Sample:
    return Sample(factor * sample.centre, sample.spread and factor * sample.spread, sample.count)
