"""Runs beside the paper's numbers: a table in the paper's form for every task, and one with all that was trained."""

from __future__ import annotations

from collections.abc import Callable

from compressm.reports.grid import Grid
from compressm.reports.wording import NOTHING, clock, order, plus_minus, steps
from compressm.runs.comparison import Compared, Exhibit, Quantity
from compressm.runs.groups import Sample

_NAMES: dict[Quantity, str] = {
    "order": "order",
    "accuracy": "test, %",
    "best": "best seed, test, %",
    "speed-up": "speed-up",
}
_CAPTION = (
    "Test is at the best validation since the last cut: mean ± standard deviation of the three best seeds by "
    "validation, or of all where there are fewer. Orders are means over layers and seeds. Speed-up is the time of the "
    "model that is never cut over the run's own, and compares only runs that were trained alone on one machine. A "
    "student's time counts its teacher. What was cut once after training is the final model, tested after the cut."
)


def paper_form_grids(exhibit: Exhibit) -> list[Grid]:
    """A row a method and quantity, a column each: ours, and below it the paper's in brackets."""
    return [_paper_form(exhibit, task) for task in exhibit.tasks if len(exhibit.of_task(task)) > 1]


def trained_grid(exhibit: Exhibit) -> Grid:
    """A row a cell: numbers of both, and what they were measured by."""
    heads = ["task", "method", "column", "order", "paper", _NAMES[exhibit.quantity], "paper", "speed-up", "paper"]
    heads += ["seeds", "steps", "time", "commit"]
    rows = [_row(exhibit, cell) for cell in exhibit.cells]
    # What the paper does not give, and a speed-up over nothing, would be columns of dashes.
    optional = ("paper", "speed-up")
    kept = [k for k, head in enumerate(heads) if head not in optional or any(row[k] != NOTHING for row in rows)]
    shown_rows = tuple(tuple(row[k] for k in kept) for row in rows)
    return Grid("Every cell", tuple(heads[k] for k in kept), shown_rows, _CAPTION)


def _paper_form(exhibit: Exhibit, task: str) -> Grid:
    cells = exhibit.of_task(task)
    columns = list(dict.fromkeys(cell.column for cell in cells))
    quantities: tuple[Quantity, ...] = ("order", exhibit.quantity, "speed-up")
    rows = []
    for method in dict.fromkeys(cell.method for cell in cells):
        by_column = {cell.column: cell for cell in cells if cell.method == method}
        for quantity in quantities:
            found = [_both(exhibit, by_column.get(column), quantity) for column in columns]
            if any(text != NOTHING for text in found):
                rows.append((f"{method}: {_NAMES[quantity]}", *found))
        spent = [clock(cell.seconds) if (cell := by_column.get(column)) else NOTHING for column in columns]
        if any(text != NOTHING for text in spent):
            rows.append((f"{method}: time", *spent))
    caption = "Ours, and below it the paper's in brackets." if exhibit.paper and exhibit.paper.values else ""
    return Grid(exhibit.named(task), ("", *columns), tuple(rows), caption)


def _both(exhibit: Exhibit, cell: Compared | None, quantity: Quantity) -> str:
    if cell is None:
        return NOTHING
    show, theirs = shown(quantity), exhibit.theirs(cell, quantity)
    ours = show(exhibit.ours(cell, quantity))
    return ours if theirs is None else f"{ours}\n({show(theirs)})"


def shown(quantity: Quantity) -> Callable[[Sample | None], str]:
    """As many digits as the paper gives."""
    if quantity == "order":
        return order
    digits = 2 if quantity == "speed-up" else 1
    return lambda sample: plus_minus(sample, digits=digits)


def _row(exhibit: Exhibit, cell: Compared) -> tuple[str, ...]:
    numbers: list[str] = []
    quantities: tuple[Quantity, ...] = ("order", exhibit.quantity, "speed-up")
    for quantity in quantities:
        both = exhibit.ours(cell, quantity), exhibit.theirs(cell, quantity)
        numbers += [shown(quantity)(sample) for sample in both]
    return (exhibit.named(cell.task), cell.method, cell.column, *numbers, *_training(cell))


def _training(cell: Compared) -> tuple[str, ...]:
    if cell.group is None:
        return (cell.missing or NOTHING, NOTHING, NOTHING, NOTHING)
    done, every = len(cell.group.finished), len(cell.runs)
    commits = dict.fromkeys(run.environment.commit for run in cell.runs)
    return (
        str(every) if done == every else f"{done} of {every}",
        steps(cell.group.shown.steps),
        clock(cell.seconds),
        ", ".join(commits),
    )
