"""How a selective scan is cut into programs on the GPU: blocks of states, tiles of channels, segments of time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressm.ops.rows import rows

# Steps between two states that are kept for the backward pass, of few states and of many.
SPANS = {True: 8, False: 16}
# States that a program has in its registers; more are taken one block after the other, and with orders that differ
# from channel to channel in smaller blocks, so that a block without states is passed over.
_MOST, _MOST_OF_ORDERS = 128, 32
# So few states are tiles of four, each in one thread; twice as many are two such blocks.
_NARROW, _STATES = 16, 4
# Channels of a program (of more states than few: of 128 states), steps at a time, and registers of a thread at most: by
# whether there are few states, and whether it is backward.
_TILES: dict[tuple[bool, bool], tuple[int, int, int | None]] = {
    (False, False): (8, 2, 128),
    (False, True): (2, 2, 128),
    (True, False): (64, 2, 128),
    (True, True): (64, 2, None),
}
# Rows so many numbers apart are read by loads of several numbers.
_ALIGNED = 16
# Lanes of a warp.
_LANES = 32
# Programs that keep a GPU busy, forward and, where a thread has more registers and fewer of them fit, backward.
_BUSY = {False: 2048, True: 4096}


class Shape(NamedTuple):
    """The sizes of a scan, as its kernels take them."""

    batch: int
    length: int
    channels: int
    n: int
    own: bool
    complex: bool

    @property
    def pair(self) -> tuple[int, ...]:
        return (2,) if self.complex else ()

    @property
    def own_row(self) -> int:
        """Numbers in B of one step."""
        return self.n * (2 if self.complex else 1) * (self.channels if self.own else 1)

    def states(self, *places: int) -> tuple[int, ...]:
        """(*places, [2,] channels, n)."""
        return (*places, *self.pair, self.channels, self.n)

    def kind(self) -> dict[str, bool]:
        """What kernels are compiled for."""
        return {"OWN": self.own, "COMPLEX": self.complex}


class Tile(NamedTuple):
    """Channels and states of a program, steps at a time, and segments of time of so many steps."""

    BD: int
    BN: int
    TILES: int
    T: int
    SPAN: int
    registers: int | None
    segments: int
    per_segment: int

    @property
    def narrow(self) -> bool:
        """Whether states are few."""
        return self.BN == _STATES

    @classmethod
    def of(cls, shape: Shape, most: int, *, back: bool) -> Tile:
        """At most so many states; as many segments as make enough programs, each of whole spans."""
        states = min(shape.n, most)
        narrow = states <= _NARROW
        BN = _STATES if narrow else 1 << (states - 1).bit_length()
        tiles = -(-states // BN)
        BD, steps, registers = _TILES[narrow, back]
        BD = max(1, min(BD if narrow else min(BD * 128 // BN, 16), 1 << (shape.channels - 1).bit_length()))
        busy = _BUSY[back and not narrow]
        if not (narrow or back) and shape.batch * shape.channels // BD < busy:
            BD = max(1, BD // 2)  # smaller tiles cost less than a pass for the ends of segments
        programs = shape.batch * -(-shape.channels // BD)
        spans = -(-shape.length // SPANS[narrow])
        wanted = max(1, min(busy // programs, spans // 2))
        per_segment = -(-spans // wanted)
        segments = -(-spans // per_segment)
        return cls(BD, BN, tiles, steps, SPANS[narrow], registers, segments, per_segment * SPANS[narrow])

    def grid(self, shape: Shape) -> tuple[int, int]:
        """Programs: channels of a sequence, and segments."""
        return shape.batch * -(-shape.channels // self.BD), self.segments

    def spans(self, shape: Shape) -> int:
        """How many states of a sequence are kept for the backward pass."""
        return -(-shape.length // self.SPAN)

    def walk(self, shape: Shape, first: int) -> dict[str, int | None]:
        """What kernels are compiled for that walk through whole segments, from this state on."""
        walk = {"T": self.T, "SPAN": self.SPAN, "ADD": first > 0, "JOINED": self.segments > 1}
        return self.sizes() | shape.kind() | walk

    def kept(self, shape: Shape, *places: int) -> tuple[int, ...]:
        """(*places, [2,] tiles, channels, states of a tile): whole tiles, as kernels keep them."""
        return (*places, *shape.pair, self.TILES, shape.channels, self.BN)

    def rows_of(self, M: Tensor, shape: Shape, blocks: range) -> tuple[Tensor, int]:
        """B or C, and the distance of its steps; rows that all channels share as long as all tiles, zeros behind."""
        if shape.own:
            return rows(M)
        width = -(-len(blocks) * self.TILES * self.BN // _ALIGNED) * _ALIGNED
        M = pad(M, (0, width - M.shape[-1])) if width > M.shape[-1] else M
        M, row = rows(M)
        if row % _ALIGNED or M.data_ptr() % _ALIGNED or (shape.complex and row > 2 * width):
            M = M.clone(memory_format=torch.contiguous_format)
        return M, M.stride(1)

    def sums_over_lanes(self, shape: Shape) -> bool:
        """Whether sums over channels are sums over lanes."""
        return self.narrow and self.BD >= _LANES and not (shape.own or shape.complex)

    def sizes(self) -> dict[str, int | None]:
        return {"BD": self.BD, "BN": self.BN, "TILES": self.TILES, "num_warps": 1, "maxnreg": self.registers}


def blocks_of(shape: Shape, orders: Tensor | None) -> range:
    """The first states of the blocks that programs take one after the other."""
    most = _MOST if orders is None else _MOST_OF_ORDERS
    return range(0, shape.n, _NARROW if _NARROW < shape.n <= 2 * _NARROW else most)
