"""Numbers that a user chose, refused by name where they enter."""

from __future__ import annotations

import math
from numbers import Real

from compressm.control import validation
from compressm.errors import CompressionError


def require_number(
    what: str, value: object, low: int, high: int | None = None, *, above: bool = False, below: bool = False
) -> float:
    """A finite number from `low` to `high`; `above` and `below` say that the end itself is not allowed."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    within = number > low if above else number >= low
    if high is not None:
        within = within and (number < high if below else number <= high)
    if within and math.isfinite(number):
        return number
    end = "" if high is None else f" {'<' if below else '<='} {high}"
    raise CompressionError(f"{what} is {value!r}, expected a finite number, {low} {'<' if above else '<='} it{end}")


def require_count(what: str, value: object, low: int = 1, high: int | None = None) -> int:
    """An integer from `low` to `high`, of Python, NumPy or a tensor."""
    number = validation.as_integer(value)
    if number is None or number < low or (high is not None and number > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise CompressionError(f"{what} is {value!r}, expected an integer {allowed}")
    return number
