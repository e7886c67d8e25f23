"""Tiles of a selective scan on the CPU: some steps of some channels with all their states, small enough for the cache.

Steps come first, then rows of the batch and chunks of time that are walked side by side, then states and channels:
states above channels where these have B and C in common, so that sums over states are sums of rows; channels above
states, as B and C are given, where each channel has its own. What a tile is made of and gives is cut for all stretches
of a run at once, since every view costs a call: (stretches, steps, batch, chunks, …).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from compressm.ops.selective_scan.parts import Parts, along, real_product


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
