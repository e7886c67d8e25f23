"""What a benchmark says while it measures and when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compressm.reports.grid import Grid
from compressm.reports.tables import grids
from compressm.runs.measurement import Measurement

console = Console()
_LONG = 20  # cells that may be broken into lines


@contextmanager
def measuring() -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, plain lines elsewhere."""
    with console.status("measuring") as status:

        def say(line: str) -> None:
            if console.is_terminal:
                status.update(f"measuring {line}")
            else:
                console.print(line)

        yield say


def report(measurement: Measurement, result: Path, *, tables: list[Table] | None = None) -> None:
    """Show its tables and write its file."""
    for table in tables or [_rich(grid) for grid in grids(measurement)]:
        # Wider than the terminal rather than with numbers cut off.
        console.print(table, crop=False)
    console.print(f"result: {measurement.write(result)}", soft_wrap=True)


def draw_picture(measurement: Measurement, path: Path) -> None:
    """Draw it and say where it is."""
    from compressm.reports.pictures import draw  # matplotlib takes a second to import

    console.print(f"picture: {draw(measurement, path)}", soft_wrap=True)


def _rich(grid: Grid) -> Table:
    table = Table(title=escape(grid.title), caption=escape(grid.caption))
    for k, head in enumerate(grid.heads):
        longest = max((len(row[k]) for row in grid.rows), default=0)
        if head == "note" or longest > _LONG:
            table.add_column(head, min_width=min(12, max(len(head), longest)))
        else:
            # Heads may be broken between words, numbers never.
            words = max(map(len, head.split()), default=0)
            table.add_column(head, justify="right", min_width=max(longest, words))
    for row in grid.rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
