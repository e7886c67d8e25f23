"""A table before it is printed: heads and rows of text, for a terminal or for Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from compressm_lab.runs.groups import Statistic
from compressm_lab.runs.measurement import Row

_Entry = TypeVar("_Entry")
NOTHING = "–"
# From how many seconds on, the size of the unit, its name.
_UNITS = ((2 * 3600.0, 3600.0, "h"), (120.0, 60.0, "min"), (1.0, 1.0, "s"), (0.0, 1e-3, "ms"))


@dataclass(frozen=True)
class Grid:
    """A table of text; `title` says what it shows, `caption` the unit and how it was measured."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    @classmethod
    def of(
        cls, title: str, entries: Iterable[_Entry], columns: Sequence[tuple[str, Callable[[_Entry], str]]], caption=""
    ) -> Grid:
        """Make a table with one row an entry; each column is its head and what it says of an entry."""
        rows = tuple(tuple(cell(entry) for _, cell in columns) for entry in entries)
        return cls(title, tuple(head for head, _ in columns), rows, caption)

    def without_empty(self, *heads: str) -> Grid:
        """The table without those columns of `heads` that say nothing in any row."""
        empty = ("", NOTHING)
        kept = [k for k, h in enumerate(self.heads) if h not in heads or any(row[k] not in empty for row in self.rows)]
        rows = tuple(tuple(row[k] for k in kept) for row in self.rows)
        return Grid(self.title, tuple(self.heads[k] for k in kept), rows, self.caption)

    def markdown(self) -> str:
        """The table in Markdown, aligned to the right; the page around it says title and caption."""
        cells = [tuple(cell.replace("|", "\\|") for cell in row) for row in self.rows]
        lines = [self.heads, ("---:",) * len(self.heads), *cells]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def column(head: str, name: str = "", show: Callable[[Any], str] = str) -> tuple[str, Callable[[Row], str]]:
    """A column of a `Grid` for the column `name` of a result, by default `head`; empty where a row has none."""
    return head, lambda row: show(row[name or head]) if (name or head) in row else ""


def duration(seconds: float) -> str:
    """A time with three digits, in milliseconds below a second: all times of a table compare at a glance.

    Only what takes less than a microsecond is in nanoseconds.
    """
    if 0 < seconds < 1e-6:
        return f"{1e9 * seconds:.3g} ns"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def amount(count: float) -> str:
    """Bytes, in the largest unit that leaves a number of at least 1."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def plus_minus(sample: Statistic | None, *, factor: float = 1.0, digits: int = 2) -> str:
    """Mean ± standard deviation with `digits` after the point; no ± for one seed."""
    if sample is None:
        return NOTHING
    centre = f"{factor * sample.centre:.{digits}f}"
    return centre if sample.spread is None else f"{centre} ± {factor * sample.spread:.{digits}f}"


def rounded(sample: Statistic | None, *, figures: int = 3) -> str:
    """Mean ± standard deviation; the mean has `figures` digits."""
    if sample is None or not sample.centre or not math.isfinite(sample.centre):
        return NOTHING if sample is None else number(sample.centre)
    size = math.floor(math.log10(abs(sample.centre)))
    if size < -3:
        spread = "" if sample.spread is None else f" ± {sample.spread:.1e}"
        return f"{sample.centre:.{figures - 1}e}{spread}"
    digits = max(0, figures - 1 - size)
    # One more where the spread would read as 0.
    fine = sample.spread is not None and 0 < sample.spread < 0.5 * 10**-digits
    return plus_minus(sample, digits=digits + fine)


def order(sample: Statistic | None) -> str:
    """An order: a whole number where it is one in every seed."""
    if sample is not None and not sample.spread and sample.centre == round(sample.centre):
        return f"{sample.centre:.0f}"
    return plus_minus(sample, digits=1)


def clock(sample: Statistic | None) -> str:
    """A time in the unit that suits it, from milliseconds to hours."""
    if sample is None:
        return NOTHING
    _, size, unit = next(entry for entry in _UNITS if sample.centre >= entry[0])
    spread = None if sample.spread is None else sample.spread / size
    return f"{rounded(Statistic(sample.centre / size, spread, sample.count))} {unit}"


def number(value: float | None, *, figures: int = 3) -> str:
    """A number with `figures` significant digits."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "no number"
    return f"{value:.{figures}g}"


def percent(value: float | None, *, digits: int = 2) -> str:
    """A share of 1, in percent."""
    return NOTHING if value is None else f"{100 * value:.{digits}f} %" if math.isfinite(value) else "no number"


def steps(count: int) -> str:
    """Thousands apart by thin spaces that do not break: 200 000."""
    return f"{count:,}".replace(",", "\u202f")


def listed(words: list[str]) -> str:
    """Words as a list in a sentence: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def file_name(*words: str) -> str:
    """A name of letters and digits with hyphens between, not too long for any disk."""
    parts = "".join(letter if letter.isalnum() else " " for letter in " ".join(words).lower()).split()
    return "-".join(parts)[:100]
