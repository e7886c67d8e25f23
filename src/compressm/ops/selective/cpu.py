"""The selective scan on the CPU, tile by tile, with its own gradients: how it is cut, and the arithmetic of a tile.

The decays, drives and outputs of a tile are computed at once; only the recurrence goes step by step. The state at the
beginning of each tile is kept; the backward pass computes the others again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from compressm.ops.dispatch import once_differentiable
from compressm.ops.memory import empty_in_large_pages, keep_freed_memory
from compressm.ops.selective.conv_and_gate import plain_steps
from compressm.ops.selective.reference import Selective, finish, there

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


def scan(
    given: Selective, state: Tensor | None, lengths: Tensor | None, orders: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `loop_scan` tile by tile."""
    keep_freed_memory()
    step = plain_steps(given.delta, given.delta_bias, lengths, soft=given.softplus)
    wide = torch.promote_types(step.dtype, given.u.dtype)
    u, step, A, B, C = (x.to(wide) for x in (given.u, step, given.A, given.B, given.C))
    state = None if state is None else state.to(wide)
    present = None if orders is None else there(given, orders).to(wide)
    # Ask here: inside a Function gradients are never enabled, and inputs say that they need one even under no_grad.
    y, last = BlockedScan.apply(u, step, A, B, C, state, present, torch.is_grad_enabled())
    return finish(y, given).to(given.u.dtype), last


class Inputs(NamedTuple):
    """The inputs of the recurrence, or their gradients: of all rows and channels, or of a group."""

    u: Tensor
    step: Tensor
    A: Parts
    B: Parts
    C: Parts

    @classmethod
    def of(cls, u: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Inputs:
        first, second = (0, -2) if A.ndim == 3 else (None, None)
        return cls(u, step, of_pairs(A, first), of_pairs(B, second), of_pairs(C, second))

    @property
    def own(self) -> bool:
        return self.B[0].ndim == 4

    def of_group(self, group: Slab) -> Inputs:
        u, step = (x[group.rows, :, group.channels] for x in (self.u, self.step))
        A = tuple(part[group.channels] for part in self.A)
        where = (group.rows, slice(None), group.channels) if self.own else (group.rows,)
        return Inputs(u, step, A, tuple(part[where] for part in self.B), tuple(part[where] for part in self.C))


@final
class Passes:
    """The forward and the backward pass through the tiles of a `Run`."""

    def __init__(self, run: Span, group: GroupScan, into: Inputs | None) -> None:
        given, self.rates, self.present, self.own = group.given, group.rates, group.present, group.given.own
        self.u, self.step = run.of(given.u), self._signal(run.of(given.step))
        self.drive = self._signal(self.u * self.step.all)
        targets: tuple[Parts, Parts] = ((), ()) if into is None else (into.B, into.C)
        self.B, self.C = (
            (Own if given.own else Shared)(tuple(map(run.of, M)), tuple(map(run.of, target)))
            for M, target in zip((given.B, given.C), targets, strict=True)
        )
        shape = (*self.u.shape[1:4], *self.rates[0].shape)
        self.tile = Tile(given.u, len(self.rates), shape, back=into is not None)

    def forward(self, marks: list[Parts], y: Tensor) -> None:
        """Write y, and after each tile its last state into `marks`; a tile starts from the mark before it."""
        tile, heard = self.tile, self._signal(torch.empty_like(self.step.all))
        for k, (before, after) in enumerate(pairwise(marks)):
            self._walk(k, before)
            self.C.hear_(k, tile.after, tile.room, heard)
            hand_on_(after, tile.end)
        y.copy_(heard.all)

    def backward(self, marks: list[Parts], g: Parts, dy: Tensor, du: Tensor, dstep: Tensor, dA: Parts) -> None:
        """Write the gradients; `g` enters as the last state's gradient and returns as the first state's.

        Gradients of states go back in time as conjugates, g[t] = C[t] dy[t] + a[t+1] g[t+1].
        """
        tile, heard = self.tile, self._signal(dy)
        driven, slope = (self._signal(torch.empty_like(self.step.all)) for _ in range(2))
        for k in reversed(range(len(marks))):
            self._walk(k, marks[k])
            self._walk_back(k, heard, g)
            self.C.collect_(k, heard, tile.after)
            self.B.collect_(k, self.drive, tile.g)
            self.B.hear_(k, tile.g, tile.room, driven)
            multiply_(tile.decay, tile.g, tile.room)
            hand_on_(g, tile.begin)
            multiply_(tile.decay, tile.before, tile.g[0])
            self._rates_and_steps(k, slope, dA)
        self.B.finish_()
        self.C.finish_()
        torch.mul(driven.all, self.step.all, out=du)
        torch.addcmul(slope.all, driven.all, self.u, out=dstep)

    def _walk(self, k: int, h: Parts) -> None:
        """Compute all states of tile k from the state before it."""
        tile = self.tile
        exponential_(tile.decay, self.step.tiles[k], self.rates, tile.room)
        self._drive(self.B, k, self.drive, tile.after)
        if h[0].shape != tile.states[0][0].shape:
            ends = end_of_walk(tile.states[1:], tile.decays[1:])
            h = starts_of_chunks(ends, self._left(k, ends), h, back=False)
        copy_(tile.states[0], h)
        walk_(tile.states, tile.decays)

    def _walk_back(self, k: int, dy: Signal, g: Parts) -> None:
        """Compute the gradients of all states of tile k from the gradient that reaches the last one."""
        tile = self.tile
        self._drive(self.C, k, dy, tile.g)
        gradients, decays = tile.gradients[::-1], tile.decays[:0:-1]
        if g[0].shape != gradients[0][0].shape:
            ends = end_of_walk(gradients, decays)
            multiply_(ends, tile.decays[0], torch.empty_like(ends[0]))
            g = starts_of_chunks(ends, self._left(k, ends), g, back=True)
        add_(gradients[0], g)
        walk_(gradients, decays)

    def _rates_and_steps(self, k: int, slope: Signal, dA: Parts) -> None:
        """Turn the gradients of Δ a, which replace the decays, into those of rates and steps."""
        found, room = self.tile.decay, self.tile.g[0]
        torch.sum(real_product(self.rates, found, room), -1 if self.own else -2, out=slope.sums[k])
        for gradient, part in zip(dA, found, strict=True):
            gradient.add_(torch.mul(part, self.step.tiles[k], out=room).sum((0, 1, 2)))

    def _drive(self, M: Matrix, k: int, x: Signal, target: Parts) -> None:
        M.drive_(k, x, target)
        if self.present is not None:
            for part in target:
                part.mul_(self.present)

    def _left(self, k: int, like: Parts) -> Parts:
        """The decay over each whole chunk: exp(a Σ Δ)."""
        left = tuple(torch.empty_like(part) for part in like)
        exponential_(left, self.step.tiles[k].sum(0), self.rates, torch.empty_like(like[0]))
        return left

    def _signal(self, x: Tensor) -> Signal:
        return Signal(x, own=self.own)


@final
class GroupScan:
    """The whole scan for some rows and channels; `present` is 0 at the states that a channel does not have."""

    def __init__(self, inputs: Inputs, group: Slab, present: Tensor | None) -> None:
        self.group, self.given = group, inputs.of_group(group)
        self.present = None if present is None else self._turned(present[group.channels]).contiguous()
        self.rates = self._of_those(tuple(self._turned(part).contiguous() for part in self.given.A))
        rows, length, _ = self.given.u.shape
        self.runs = runs(length, rows * self.rates[0].numel() * len(self.rates))

    def forward(self, state: Parts, y: Tensor, last: Parts, *, keep: bool) -> Parts:
        """Write y and the last state; return the states at the beginning of all tiles if `keep`."""
        h = tuple(part.clone() for part in self._of_those(self._states(state)))
        count = sum(run.stretches for run in self.runs) if keep else 0
        marks = tuple(part.new_empty(count, *part.shape) for part in h)
        y, places = y[self.group.rows, :, self.group.channels], iter(along(marks, 0))
        for run in self.runs:
            here = list(islice(places, run.stretches)) or [h] * run.stretches
            copy_(here[0], h)
            Passes(run, self, None).forward([*here, h], run.of(y))
        copy_(self._states(last), h)
        return marks

    def backward(self, marks: Parts, dy: Tensor, dlast: Parts, into: Inputs, dstate: Parts) -> None:
        """Write the gradients of the inputs and of the first state, from those of y and of the last state."""
        g = conjugate_(tuple(part.clone() for part in self._of_those(self._states(dlast))))
        found, places = into.of_group(self.group), along(marks, 0)
        dy, dA = dy[self.group.rows, :, self.group.channels], tuple(map(torch.zeros_like, self.rates))
        for run in reversed(self.runs):
            here, places = places[-run.stretches :], places[: -run.stretches]
            Passes(run, self, found).backward(here, g, run.of(dy), run.of(found.u), run.of(found.step), dA)
        copy_(self._states(dstate), conjugate_(g))
        add_(found.A, tuple(map(self._turned, conjugate_(dA))))

    def _states(self, states: Parts) -> Parts:
        """The group's part of (batch, channels, n), in the layout of its tiles."""
        return tuple(self._turned(part[self.group.rows, self.group.channels])[:, None] for part in states)

    def _of_those(self, states: Parts) -> Parts:
        return states if self.present is None else tuple(part * self.present for part in states)

    def _turned(self, states: Tensor) -> Tensor:
        return states if self.given.own else states.mT


class BlockedScan(torch.autograd.Function):
    """Re(C h) and the last state, group by group and tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        step: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        state: Tensor | None,
        present: Tensor | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(u, memory_format=torch.contiguous_format)
        last = u.new_zeros(u.shape[0], *A.shape)
        begin, end = (of_pairs(x, 1 if A.ndim == 3 else None) for x in (last if state is None else state, last))
        keep = keep and any(ctx.needs_input_grad)
        marks: list[Tensor] = []
        for group in _groups(Inputs.of(u, step, A, B, C), present):
            marks += group.forward(begin, y, end, keep=keep)
        if keep:
            ctx.save_for_backward(u, step, A, B, C, present, *marks)
            ctx.has_state = state is not None
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        *given, present = islice(saved := iter(ctx.saved_tensors), 6)
        inputs = Inputs.of(*given)
        gradients = [_fresh(x) for x in given]
        # Sums begin with 0; the other gradients are overwritten.
        for sums in gradients[2:3] if inputs.own else gradients[2:]:
            sums.zero_()
        dstate = _fresh(dlast)
        end, begin = (of_pairs(x, 1 if len(inputs.A) == 2 else None) for x in (dlast, dstate))
        for group in _groups(inputs, present):
            group.backward(tuple(islice(saved, len(end))), dy, end, Inputs.of(*gradients), begin)
        return *gradients, dstate if ctx.has_state else None, None, None


def _groups(inputs: Inputs, present: Tensor | None) -> Iterator[GroupScan]:
    sizes = (*inputs.u.shape, inputs.A[0].shape[1])
    return (GroupScan(inputs, group, present) for group in groups(*sizes))


def _fresh(like: Tensor) -> Tensor:
    if like.device.type != "cpu":
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return empty_in_large_pages(tuple(like.shape), like.dtype)
