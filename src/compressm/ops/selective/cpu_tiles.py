"""How a selective scan on the CPU is cut into tiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

# Numbers of a tile: of decays, states and gradients, half a megabyte each, a cache of two holds all.
TILE = 2**17
# States of a step of a tile, at most; more where there are not steps enough.
STEP = 2**13
# Numbers of a step up to which a call costs more than to walk through the same time twice.
FEW = 2**10


class Slab(NamedTuple):
    """Some rows of the batch and some channels."""

    rows: slice
    channels: slice


class Span(NamedTuple):
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


def groups(batch: int, length: int, channels: int, n: int) -> Iterator[Slab]:
    """All of the batch and all channels of n states each, as many together as make a step of a tile."""
    most = max(STEP, TILE // length)
    for chosen in _evenly(channels, max(1, most // n)):
        for rows in _evenly(batch, max(1, most // ((chosen.stop - chosen.start) * n))):
            yield Slab(rows, chosen)


def runs(length: int, numbers: int) -> list[Span]:
    """All of time, where a step has so many numbers: whole stretches, a shorter one, and what is left."""
    most = min(length, max(1, TILE // numbers))
    # A stretch of K chunks of T steps takes T calls to find their ends, K to join them and T for all states.
    steps = most if numbers > FEW else max(1, round((most / 2) ** 0.5))
    found = [Span(0, length // (most // steps * steps), most // steps, steps)]
    found.append(Span(found[-1].stop, 1, (length - found[-1].stop) // steps, steps))
    found.append(Span(found[-1].stop, 1, 1, length - found[-1].stop))
    return [run for run in found if run.start < run.stop]


def _evenly(count: int, most: int) -> Iterator[slice]:
    """Slices of about the same size, none larger than `most`."""
    size = -(-count // -(-count // most))
    return (slice(start, min(count, start + size)) for start in range(0, count, size))


Parts = tuple[Tensor, ...]


def of_pairs(M: Tensor, axis: int | None) -> Parts:
    """Both parts of pairs on an axis; the tensor itself where there is no such axis."""
    return (M,) if axis is None else M.unbind(axis)


def along(parts: Parts, axis: int) -> list[Parts]:
    """One after the other along an axis."""
    return list(zip(*(part.unbind(axis) for part in parts), strict=True))


def copy_(target: Parts, source: Parts) -> None:
    """Part by part."""
    for part, value in zip(target, source, strict=True):
        part.copy_(value)


def hand_on_(target: Parts, source: Parts) -> None:
    """A copy without numbers so small that soon they would be below 1e-38, where a product takes ten times as long."""
    floor = torch.finfo(source[0].dtype).tiny ** 0.75  # 4e-29 in float32
    copy_(target, tuple(hardshrink(part, floor) for part in source))


def add_(target: Parts, source: Parts) -> None:
    """Part by part."""
    for part, value in zip(target, source, strict=True):
        part.add_(value)


def conjugate_(z: Parts) -> Parts:
    """What torch calls the gradient of a complex number is the conjugate of the derivative."""
    for im in z[1:]:
        im.neg_()
    return z


def exponential_(target: Parts, step: Tensor, rates: Parts, room: Tensor) -> None:
    """exp(Δ a)."""
    torch.mul(step, rates[0], out=target[0]).exp_()
    if len(target) == 2:
        # torch's exp of complex numbers takes 45 ns each, of real ones 0.2, its sin and cos 0.5.
        torch.mul(step, rates[1], out=room)
        torch.sin(room, out=target[1]).mul_(target[0])
        target[0].mul_(room.cos_())


def add_product_(z: Parts, a: Parts, h: Parts) -> None:
    """z + a h."""
    z[0].addcmul_(a[0], h[0])
    if len(z) == 2:
        z[0].addcmul_(a[1], h[1], value=-1)
        z[1].addcmul_(a[0], h[1]).addcmul_(a[1], h[0])


def multiply_(z: Parts, a: Parts, room: Tensor) -> None:
    """z a."""
    if len(z) == 1:
        z[0].mul_(a[0])
        return
    torch.mul(z[1], a[1], out=room)
    z[1].mul_(a[0]).addcmul_(z[0], a[1])
    z[0].mul_(a[0]).sub_(room)


def real_product(a: Parts, h: Parts, room: Tensor) -> Tensor:
    """Re(a h)."""
    torch.mul(a[0], h[0], out=room)
    return room if len(a) == 1 else room.addcmul_(a[1], h[1], value=-1)


def walk_(states: Iterable[Parts], decays: Sequence[Parts]) -> None:
    """h[t] + a[t] h[t−1], one step after the other, from the first state on."""
    for decay, (before, after) in zip(decays, pairwise(states), strict=True):
        add_product_(after, decay, before)


def end_of_walk(states: Sequence[Parts], decays: Sequence[Parts]) -> Parts:
    """Where that walk ends; nothing else is changed."""
    end, room = tuple(part.clone() for part in states[0]), torch.empty_like(states[0][0])
    for decay, drive in zip(decays, states[1:], strict=True):
        multiply_(end, decay, room)
        add_(end, drive)
    return end


def starts_of_chunks(ends: Parts, left: Parts, first: Parts, *, back: bool) -> Parts:
    """What each chunk, on axis 1, begins with: the end of the one before it, and what is left of its beginning."""
    starts = tuple(torch.empty_like(part) for part in ends)
    way = slice(None, None, -1 if back else 1)
    begin, end, stays = (along(parts, 1)[way] for parts in (starts, ends, left))
    copy_(begin[0], along(first, 1)[0])
    for k in range(len(begin) - 1):
        copy_(begin[k + 1], end[k])
        add_product_(begin[k + 1], stays[k], begin[k])
    return starts


@final
class Tile:
    """Memory for a stretch: decays, states from the one before the first step on, and, `back`, gradients of states."""

    def __init__(self, like: Tensor, parts: int, shape: tuple[int, ...], *, back: bool) -> None:
        def fresh(steps: int) -> Parts:
            return tuple(like.new_empty(steps, *shape[1:]) for _ in range(parts))

        self.decay, self.h, self.g = fresh(shape[0]), fresh(shape[0] + 1), fresh(shape[0] if back else 0)
        self.room = fresh(shape[0])[0]
        self.before, self.after = (tuple(part[when] for part in self.h) for when in (slice(-1), slice(1, None)))
        self.decays, self.states, self.gradients = (along(parts, 0) for parts in (self.decay, self.h, self.g))
        self.end = tuple(part[-1, :, -1:] for part in self.h)
        self.begin = tuple(part[0, :, :1] for part in self.decay)


@final
class Signal:
    """(…, channels) in a run: all, and of every stretch."""

    def __init__(self, x: Tensor, *, own: bool) -> None:
        self.all, self.own = x.contiguous(), own

    @cached_property
    def tiles(self) -> Parts:
        """As it meets states."""
        return self.all.unsqueeze(-1 if self.own else -2).unbind(0)

    @cached_property
    def rows(self) -> Parts:
        """As rows before matrices."""
        return self.all.flatten(1, 3).unsqueeze(2).unbind(0)

    @cached_property
    def sums(self) -> Parts:
        """As what is left when states are summed."""
        return self.all.unbind(0)


class Matrix(ABC):
    """B or C in a run, and, where it is wanted, its gradient."""

    tiles: list[Parts]

    def drive_(self, k: int, x: Signal, target: Parts) -> None:
        """M x of the k-th stretch."""
        for part, m in zip(target, self.tiles[k], strict=True):
            torch.mul(x.tiles[k], m, out=part)

    @abstractmethod
    def hear_(self, k: int, h: Parts, room: Tensor, y: Signal) -> None:
        """Re Σ M h over states."""

    @abstractmethod
    def collect_(self, k: int, x: Signal, h: Parts) -> None:
        """The conjugate of x h goes to the gradient."""

    @abstractmethod
    def finish_(self) -> None:
        """All stretches are collected."""


@final
class Shared(Matrix):
    """(…, n), the same for all channels."""

    def __init__(self, M: Parts, gradient: Parts) -> None:
        whole, self.gradient = tuple(part.contiguous() for part in M), gradient
        self.found = tuple(torch.empty_like(part) for part in whole[: len(gradient)])
        self.tiles = along(tuple(part.unsqueeze(-1) for part in whole), 0)
        self.rows, self.into = (
            along(tuple(part.flatten(1, 3).unsqueeze(2) for part in parts), 0) if parts else []
            for parts in (whole, self.found)
        )

    def hear_(self, k: int, h: Parts, room: Tensor, y: Signal) -> None:
        (row, *im), target = self.rows[k], y.rows[k]
        torch.bmm(row, h[0].flatten(0, 2), out=target)
        if im:
            target.baddbmm_(im[0], h[1].flatten(0, 2), alpha=-1)

    def collect_(self, k: int, x: Signal, h: Parts) -> None:
        # A row times a matrix: MKL takes three times as long for a matrix times a column.
        for target, part in zip(self.into[k], h, strict=True):
            torch.bmm(x.rows[k], part.flatten(0, 2).mT, out=target)

    def finish_(self) -> None:
        for sign, target, part in zip((1, -1), self.gradient, self.found, strict=False):
            target.add_(part, alpha=sign)


@final
class Own(Matrix):
    """(…, channels, n)."""

    def __init__(self, M: Parts, gradient: Parts) -> None:
        self.tiles, self.into = (along(parts, 0) if parts else [] for parts in (M, gradient))

    def hear_(self, k: int, h: Parts, room: Tensor, y: Signal) -> None:
        torch.sum(real_product(self.tiles[k], h, room), -1, out=y.sums[k])

    def collect_(self, k: int, x: Signal, h: Parts) -> None:
        signed = x.tiles[k]
        for target, part in zip(self.into[k], h, strict=True):
            torch.mul(part, signed, out=target)
            signed = -signed

    def finish_(self) -> None:
        """It is written already."""
