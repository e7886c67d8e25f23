"""How a selective scan on the CPU is cut into tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

# Numbers of a tile: of decays, states and gradients, half a megabyte each, a cache of two holds all.
TILE = 2**17
# States of a step of a tile, at most; more where there are not steps enough.
STEP = 2**13
# Numbers of a step up to which a call costs more than to walk through the same time twice.
FEW = 2**10


class Group(NamedTuple):
    """Some rows of the batch and some channels."""

    rows: slice
    channels: slice


class Run(NamedTuple):
    """Stretches of time of the same shape, one after the other: chunks side by side, each of so many steps."""

    start: int
    stretches: int
    chunks: int
    steps: int

    @property
    def stop(self) -> int:
        return self.start + self.stretches * self.chunks * self.steps

    def of(self, x: Tensor) -> Tensor:
        """(batch, length, …) as (stretches, steps, batch, chunks, …)."""
        return x[:, self.start : self.stop].unflatten(1, self[1:]).movedim((1, 3), (0, 1))


def groups(batch: int, length: int, channels: int, n: int) -> Iterator[Group]:
    """All of the batch and all channels of n states each, as many together as make a step of a tile."""
    most = max(STEP, TILE // length)
    for chosen in _evenly(channels, max(1, most // n)):
        for rows in _evenly(batch, max(1, most // ((chosen.stop - chosen.start) * n))):
            yield Group(rows, chosen)


def runs(length: int, numbers: int) -> list[Run]:
    """All of time, where a step has so many numbers: whole stretches, a shorter one, and what is left."""
    most = min(length, max(1, TILE // numbers))
    # A stretch of K chunks of T steps takes T calls to find their ends, K to join them and T for all states.
    steps = most if numbers > FEW else max(1, round((most / 2) ** 0.5))
    found = [Run(0, length // (most // steps * steps), most // steps, steps)]
    found.append(Run(found[-1].stop, 1, (length - found[-1].stop) // steps, steps))
    found.append(Run(found[-1].stop, 1, 1, length - found[-1].stop))
    return [run for run in found if run.start < run.stop]


def _evenly(count: int, most: int) -> Iterator[slice]:
    """Slices of about the same size, none larger than `most`."""
    size = -(-count // -(-count // most))
    return (slice(start, min(count, start + size)) for start in range(0, count, size))
