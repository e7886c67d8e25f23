"""What data sets refuse."""

from __future__ import annotations


class DataError(ValueError):
    """A file that is missing or broken, or an option that is not allowed: which, what was expected, how to get it."""


def require_counts(at_least: int = 1, **counts: int) -> None:
    """Options that count something."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < at_least:
            raise DataError(f"{name} is {count!r}, expected an integer of at least {at_least}")
