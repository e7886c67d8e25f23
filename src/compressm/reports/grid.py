"""A table before it is printed: heads and rows of text, for a terminal or for Markdown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """`title` says what it shows, `caption` the unit and how it was measured."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    def markdown(self) -> str:
        """Columns aligned to the right; title and caption are for the page around it to say."""
        cells = [tuple(cell.replace("|", "\\|") for cell in row) for row in self.rows]
        lines = [self.heads, ("---:",) * len(self.heads), *cells]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def duration(seconds: float) -> str:
    """Three digits, in milliseconds below a second: all times of a table compare at a glance."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def amount(count: float) -> str:
    """Bytes, in the largest unit that leaves a number of at least 1."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
