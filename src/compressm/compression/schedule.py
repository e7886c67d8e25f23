"""Schedules of cuts: finite collections of training steps, counted from 1."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import SupportsIndex

from compressm.control import validation
from compressm.errors import CompressionError
from compressm.families.choices import require_count, require_number

# More steps than any training has; a longer range is a mistake.
_MOST_STEPS = 10_000_000
# The most steps that a text lists.
_NAMED = 8


def during_warmup(total_steps: int, cuts: int = 4, fraction: float = 0.1) -> list[int]:
    """`cuts` equidistant steps in the warm-up, which is the first `fraction` of all steps (sec:setup).

    The last is at its end. The paper's default is four cuts in the first 10 %: 4500, 9000, 13 500 and 18 000 of
    180 000 steps.
    """
    total_steps, cuts = require_count("total_steps", total_steps), require_count("cuts", cuts)
    fraction = require_number("fraction", fraction, 0, 1, above=True)
    # A product such as 0.29 * 100 = 28.999999999999996 means 29 steps.
    warmup = math.floor(fraction * total_steps + 1e-9)
    if warmup < cuts:
        raise CompressionError(
            f"cuts is {cuts}, but a warm-up of {fraction:g} of {total_steps} steps has {warmup}: too few"
        )
    return [warmup * cut // cuts for cut in range(1, cuts + 1)]


def every(k: int, *, until: int, start: int | None = None) -> range:
    """Every k-th step from `start`, by default k, to at most `until`.

    The paper's other schedules (sec:setup, app:reduction-details): sMNIST, cut through all of training,
    `every(5_000, until=200_000)`; IMDB, which waits 1000 steps and then cuts twice until step 3000,
    `every(1_000, start=2_000, until=3_000)`.
    """
    k, until = require_count("k", k), require_count("until", until)
    start = k if start is None else require_count("start", start)
    if start > until:
        raise CompressionError(f"the first cut is at step {start}, after until = {until}: it would never fire")
    return range(start, until + 1, k)


def as_schedule(when: Iterable[SupportsIndex]) -> list[int]:
    """The steps of a finite, non-empty collection of different integers >= 1, sorted."""
    expected = "expected a finite collection of step numbers, such as [1000, 2000] or every(1000, until=4000)"
    if isinstance(when, Mapping):
        raise CompressionError(f"when is {when!r:.100}, {expected}; a mapping has values that nothing would use")
    if isinstance(when, str | bytes) or not isinstance(when, Collection):
        raise CompressionError(f"when is {when!r:.100}, {expected}; a generator may have no end")
    try:
        size = len(when)
    except (TypeError, OverflowError):
        raise CompressionError(f"when is {when!r:.100}, {expected}") from None
    if size > _MOST_STEPS:
        raise CompressionError(f"when has {size} steps, {expected}, of at most {_MOST_STEPS}")
    steps = list(when)
    for step in steps:
        if validation.as_integer(step) is None or int(step) < 1:
            raise CompressionError(f"when holds {step!r}, expected step numbers: integers of at least 1")
    if not steps:
        raise CompressionError(f"when is {when!r:.100}: a schedule without a step would never fire")
    ordered = sorted(map(int, steps))
    again = next((step for step, later in pairwise(ordered) if step == later), None)
    if again is not None:
        raise CompressionError(
            f"when holds step {again} twice, expected each step once: a step makes one cut; {{*first, *second}} joins"
            " two schedules"
        )
    return ordered


def require_same_past(saved: Sequence[int], here: Sequence[int], until: int) -> None:
    """Refuse two schedules that differ in past steps; future steps may differ."""
    then, now = ({step for step in steps if step <= until} for steps in (saved, here))
    if then != now:
        raise CompressionError(
            f"the saved schedule is {list(saved)!r:.80}, this one's {list(here)!r:.80}: expected the same steps up to"
            f" step {until}, which was reached, but {sorted(then ^ now)!r:.80} are in one of them only;"
            " later steps may differ"
        )


def plan_text(schedule: Sequence[int]) -> str:
    """A schedule in one line: "4 cuts, at steps 4500, 9000, 13500, 18000"."""
    count = f"{len(schedule)} cut{'s' if len(schedule) > 1 else ''}"
    if len(schedule) <= _NAMED:
        return f"{count}, at step{'s' if len(schedule) > 1 else ''} {', '.join(map(str, schedule))}"
    gaps = {later - step for step, later in pairwise(schedule)}
    if len(gaps) == 1:
        return f"{count}, every {gaps.pop()} steps from step {schedule[0]} to {schedule[-1]}"
    first = ", ".join(map(str, schedule[: _NAMED - 2]))
    return f"{count}, at steps {first}, ..., {schedule[-1]}"
