"""Recurrences in place over real numbers, (re,), or complex ones, (re, im), whose parts are tensors of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

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
