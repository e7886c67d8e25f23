"""Tiles of a selective scan on the CPU: how time, rows and channels are cut, and the arithmetic inside a tile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

# Numbers in a tile: decays, states and gradients, half a megabyte each, fit into a cache of two megabytes.
TILE = 2**17
# States in one step of a tile, at most; more if there are too few steps.
STEP = 2**13
# Numbers in a step up to which a call costs more than walking through the same steps twice.
FEW = 2**10


class Slab(NamedTuple):
    """Some rows of the batch and some channels."""

    rows: slice
    channels: slice


class Span(NamedTuple):
    """Consecutive tiles (`stretches`) of the same shape; a tile has chunks side by side, of `steps` steps each."""

    start: int
    stretches: int
    chunks: int
    steps: int

    @property
    def stop(self) -> int:
        return self.start + self.stretches * self.chunks * self.steps

    def of(self, x: Tensor) -> Tensor:
        """Reshape (batch, length, …) to (stretches, steps, batch, chunks, …)."""
        return x[:, self.start : self.stop].unflatten(1, self[1:]).movedim((1, 3), (0, 1))


def groups(batch: int, length: int, channels: int, n: int) -> Iterator[Slab]:
    """Cut rows and channels, of n states each, into groups that fill one step of a tile."""
    most = max(STEP, TILE // length)
    for chosen in _evenly(channels, max(1, most // n)):
        for rows in _evenly(batch, max(1, most // ((chosen.stop - chosen.start) * n))):
            yield Slab(rows, chosen)


def runs(length: int, numbers: int) -> list[Span]:
    """Cut `length` steps, of `numbers` numbers each, into whole tiles, a shorter tile, and the rest."""
    most = min(length, max(1, TILE // numbers))
    # A tile of K chunks of T steps takes T calls to find their ends, K to join them and T for all states.
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
    """The two parts of pairs on `axis`; the tensor itself if there is no such axis."""
    return (M,) if axis is None else M.unbind(axis)


def along(parts: Parts, axis: int) -> list[Parts]:
    """The slices of all parts along an axis, one after the other."""
    return list(zip(*(part.unbind(axis) for part in parts), strict=True))


def copy_(target: Parts, source: Parts) -> None:
    """Copy part by part."""
    for part, value in zip(target, source, strict=True):
        part.copy_(value)


def hand_on_(target: Parts, source: Parts) -> None:
    """Copy, but zero the numbers that would soon be below 1e-38, where a product takes ten times as long."""
    floor = torch.finfo(source[0].dtype).tiny ** 0.75  # 4e-29 in float32
    copy_(target, tuple(hardshrink(part, floor) for part in source))


def add_(target: Parts, source: Parts) -> None:
    """Add part by part."""
    for part, value in zip(target, source, strict=True):
        part.add_(value)


def conjugate_(z: Parts) -> Parts:
    """Conjugate in place: torch's gradient of a complex number is the conjugate of the derivative."""
    for im in z[1:]:
        im.neg_()
    return z


def exponential_(target: Parts, step: Tensor, rates: Parts, room: Tensor) -> None:
    """Write exp(Δ a) to `target`."""
    torch.mul(step, rates[0], out=target[0]).exp_()
    if len(target) == 2:
        # torch's exp takes 45 ns for a complex number and 0.2 ns for a real one; its sin and cos take 0.5 ns.
        torch.mul(step, rates[1], out=room)
        torch.sin(room, out=target[1]).mul_(target[0])
        target[0].mul_(room.cos_())


def add_product_(z: Parts, a: Parts, h: Parts) -> None:
    """Add a h to z."""
    z[0].addcmul_(a[0], h[0])
    if len(z) == 2:
        z[0].addcmul_(a[1], h[1], value=-1)
        z[1].addcmul_(a[0], h[1]).addcmul_(a[1], h[0])


def multiply_(z: Parts, a: Parts, room: Tensor) -> None:
    """Multiply z by a."""
    if len(z) == 1:
        z[0].mul_(a[0])
        return
    torch.mul(z[1], a[1], out=room)
    z[1].mul_(a[0]).addcmul_(z[0], a[1])
    z[0].mul_(a[0]).sub_(room)


def real_product(a: Parts, h: Parts, room: Tensor) -> Tensor:
    """Re(a h), written to `room`."""
    torch.mul(a[0], h[0], out=room)
    return room if len(a) == 1 else room.addcmul_(a[1], h[1], value=-1)


def walk_(states: Iterable[Parts], decays: Sequence[Parts]) -> None:
    """Add a[t] h[t−1] to h[t], step by step from the first state on."""
    for decay, (before, after) in zip(decays, pairwise(states), strict=True):
        add_product_(after, decay, before)


def end_of_walk(states: Sequence[Parts], decays: Sequence[Parts]) -> Parts:
    """The state at the end of `walk_`, without changing `states`."""
    end, room = tuple(part.clone() for part in states[0]), torch.empty_like(states[0][0])
    for decay, drive in zip(decays, states[1:], strict=True):
        multiply_(end, decay, room)
        add_(end, drive)
    return end


def starts_of_chunks(ends: Parts, left: Parts, first: Parts, *, back: bool) -> Parts:
    """The start of each chunk, on axis 1: the end of the chunk before it, plus that chunk's start times `left`."""
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
    """Memory for a tile: decays, states from the one before the first step on, and with `back` gradients of states."""

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
    """A signal (…, channels) in a `Run`: as a whole, and tile by tile."""

    def __init__(self, x: Tensor, *, own: bool) -> None:
        self.all, self.own = x.contiguous(), own

    @cached_property
    def tiles(self) -> Parts:
        """The tiles, with an axis of size 1 for states."""
        return self.all.unsqueeze(-1 if self.own else -2).unbind(0)

    @cached_property
    def rows(self) -> Parts:
        """The tiles as rows that multiply matrices from the left."""
        return self.all.flatten(1, 3).unsqueeze(2).unbind(0)

    @cached_property
    def sums(self) -> Parts:
        """The tiles as targets of sums over states."""
        return self.all.unbind(0)


class Matrix(ABC):
    """B or C in a `Run`, and its gradient if wanted."""

    tiles: list[Parts]

    def drive_(self, k: int, x: Signal, target: Parts) -> None:
        """Write M x of tile k to `target`."""
        for part, m in zip(target, self.tiles[k], strict=True):
            torch.mul(x.tiles[k], m, out=part)

    @abstractmethod
    def hear_(self, k: int, h: Parts, room: Tensor, y: Signal) -> None:
        """Write Re Σ M h, the sum over states, to tile k of y."""

    @abstractmethod
    def collect_(self, k: int, x: Signal, h: Parts) -> None:
        """Put the conjugate of x h into the gradient."""

    @abstractmethod
    def finish_(self) -> None:
        """Complete the gradient after all tiles are collected."""


@final
class Shared(Matrix):
    """A matrix (…, n) that all channels share."""

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
    """A matrix (…, channels, n): each channel has its own."""

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
        """Do nothing: the gradient is already written."""
