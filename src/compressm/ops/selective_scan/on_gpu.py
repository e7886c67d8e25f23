"""Launches of the selective scan's kernels, with gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from compressm.ops.around_scan import gated, step_sizes
from compressm.ops.selective_scan import triton as kernels
from compressm.ops.selective_scan.arguments import Selective

# Steps between two states that are kept for the backward pass, of few states and of many.
SPANS = {True: 16, False: 64}
# States that a program has in its registers; more are taken one block after the other, and with orders that differ
# from channel to channel in smaller blocks, so that a block without states is passed over.
_MOST, _MOST_OF_ORDERS = 128, 32
# So few states are tiles of four, each in one thread.
_NARROW = 16
# Channels of a program (of more states than few: of 128 states), steps at a time, and registers of a thread at most: by
# whether there are few states, and whether it is backward.
_TILES: dict[tuple[bool, bool], tuple[int, int, int | None]] = {
    (False, False): (8, 2, 128),
    (False, True): (4, 2, 168),
    (True, False): (64, 4, 128),
    (True, True): (64, 2, None),
}
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

    @classmethod
    def of(cls, shape: Shape, most: int, *, back: bool) -> Tile:
        """At most so many states; as many segments as make enough programs, each of whole spans."""
        states = min(shape.n, most)
        narrow = states <= _NARROW
        BN = 4 if narrow else 1 << (states - 1).bit_length()
        tiles = -(-states // BN)
        BD, steps, registers = _TILES[narrow, back]
        BD = max(1, min(BD if narrow else BD * 128 // BN, 1 << (shape.channels - 1).bit_length()))
        busy = _BUSY[back and not narrow]
        if not (narrow or back) and shape.batch * shape.channels // BD < busy:
            BD = max(1, BD // 2)  # smaller tiles cost less than a pass for the ends of segments
        programs = shape.batch * -(-shape.channels // BD)
        spans = -(-shape.length // SPANS[narrow])
        wanted = max(1, min(busy // programs, spans // 2))
        per_segment = -(-spans // wanted)
        segments = -(-spans // per_segment)
        return cls(BD, BN, tiles, steps, SPANS[narrow], registers, segments, per_segment * SPANS[narrow])

    def sizes(self) -> dict[str, int | None]:
        return {"BD": self.BD, "BN": self.BN, "TILES": self.TILES, "num_warps": 1, "maxnreg": self.registers}


def scan(
    given: Selective, state: Tensor | None, lengths: Tensor | None, orders: Tensor | None, keep_state: bool
) -> tuple[Tensor, Tensor | None]:
    """As `reference.scan`."""
    step = step_sizes(given.delta, given.delta_bias, lengths, softplus=given.softplus)
    last_wanted = keep_state or state is not None
    y, last = Scan.apply(given.u, step, given.A, given.B, given.C, given.D, state, orders, last_wanted)
    return y if given.z is None else gated(y, given.z), last


class Scan(torch.autograd.Function):
    """Re(C h) + D u in the dtype of u, and the last state in float32, if it is wanted."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        step: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        state: Tensor | None,
        orders: Tensor | None,
        last_wanted: bool,
    ) -> tuple[Tensor, Tensor | None]:
        batch, length, channels = u.shape
        shape = Shape(batch, length, channels, A.shape[-1], B.ndim == 4 + (A.ndim == 3), A.ndim == 3)
        (u, u_row), (B, B_row), (C, C_row) = rows(u), rows(B), rows(C)
        A = A.float().contiguous()
        state = None if state is None else state.float().contiguous()
        last = _fresh(u, *shape.states(shape.batch)) if last_wanted else None
        if last is not None and orders is not None:
            last.zero_()
        blocks = _blocks(shape, orders)
        y = torch.empty(u.shape, dtype=u.dtype if len(blocks) == 1 else torch.float32, device=u.device)
        tile = Tile.of(shape, blocks.step, back=False)
        spans = -(-shape.length // tile.SPAN)
        marks = _fresh(u, *shape.states(shape.batch, spans)) if any(ctx.needs_input_grad) else None
        for first in blocks:
            starts = _starts(tile, shape, first, u, u_row, step, A, B, B_row, orders, state)
            kernels._forward[(shape.batch * -(-shape.channels // tile.BD), tile.segments)](
                *(u, step, A, B, C, D, orders, starts, y, marks, last),
                *(shape.length, shape.channels, shape.n, first, u_row, B_row, C_row, tile.segments, tile.per_segment),
                **tile.sizes(),
                T=tile.T,
                SPAN=tile.SPAN,
                OWN=shape.own,
                COMPLEX=shape.complex,
                ADD=first > 0,
            )
        ctx.save_for_backward(u, step, A, B, C, D, orders, marks)
        ctx.shape, ctx.has_state, ctx.rows = shape, state is not None, (u_row, B_row, C_row)
        return y.to(u.dtype), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        u, step, A, B, C, D, orders, marks = ctx.saved_tensors
        shape, (u_row, B_row, C_row) = ctx.shape, ctx.rows
        dy = dy.contiguous()
        dlast = None if dlast is None else dlast.float().contiguous()
        blocks = _blocks(shape, orders)
        tile = Tile.of(shape, blocks.step, back=True)
        programs = shape.batch * -(-shape.channels // tile.BD)
        several = len(blocks) > 1
        du = torch.empty(u.shape, dtype=torch.float32 if several else u.dtype, device=u.device)
        dstep = _fresh(u, *u.shape)
        dA = _fresh(u, *shape.states(shape.batch, tile.segments))
        if orders is not None:
            dA.zero_()
        lanes = tile.BN == 4 and tile.BD >= _LANES and not (shape.own or shape.complex)
        sums, row = _room_for_sums(B, shape, orders, tile.TILES * tile.BN if lanes else shape.n)
        dD = None if D is None else _fresh(u, shape.batch, tile.segments, shape.channels)
        dstate = _fresh(u, *shape.states(shape.batch)).zero_() if ctx.has_state else None
        scratch = _fresh(
            u, programs * tile.segments, tile.SPAN // tile.T, len(shape.pair) + 1, tile.TILES, tile.BD, tile.BN
        )
        for first in blocks:
            starts = _starts_back(tile, shape, first, step, A, C, C_row, dy, orders, dlast)
            kernels._backward[(programs, tile.segments)](
                *(u, step, A, B, C, D, orders, dy, marks, starts, scratch, du, dstep, dA, *sums, dD, dstate),
                *(shape.length, shape.channels, shape.n, first, u_row, B_row, C_row, row, sums[0].numel()),
                *(tile.segments, tile.per_segment),
                **tile.sizes(),
                T=tile.T,
                SPAN=tile.SPAN,
                OWN=shape.own,
                COMPLEX=shape.complex,
                ADD=first > 0,
                LANES=lanes,
            )
        dB, dC = (total[..., : shape.n].to(M.dtype) for total, M in zip(sums, (B, C), strict=True))
        dD = None if dD is None else dD.sum((0, 1)).to(D.dtype)
        return du.to(u.dtype), dstep, dA.sum((0, 1)), dB, dC, dD, dstate, None, None


def _blocks(shape: Shape, orders: Tensor | None) -> range:
    """The first states of the blocks that programs take one after the other."""
    return range(0, shape.n, _MOST if orders is None else _MOST_OF_ORDERS)


def _starts(
    tile: Tile,
    shape: Shape,
    first: int,
    u: Tensor,
    u_row: int,
    step: Tensor,
    A: Tensor,
    B: Tensor,
    B_row: int,
    orders: Tensor | None,
    state: Tensor | None,
) -> Tensor | None:
    """What every segment begins with."""
    if tile.segments == 1:
        return state
    ends = _fresh(u, *shape.states(shape.batch, tile.segments))
    totals = _fresh(u, shape.batch, tile.segments, shape.channels)
    kernels._ends[(shape.batch * -(-shape.channels // tile.BD), tile.segments - 1)](
        *(u, step, A, B, orders, ends, totals),
        *(shape.length, shape.channels, shape.n, first, u_row, B_row, tile.segments, tile.per_segment),
        **tile.sizes(),
        T=tile.T,
        OWN=shape.own,
        COMPLEX=shape.complex,
    )
    return _joined(tile, shape, first, A, orders, ends, totals, state, back=False)


def _starts_back(
    tile: Tile,
    shape: Shape,
    first: int,
    step: Tensor,
    A: Tensor,
    C: Tensor,
    C_row: int,
    dy: Tensor,
    orders: Tensor | None,
    dlast: Tensor | None,
) -> Tensor | None:
    """The gradient that enters every segment at its end."""
    if tile.segments == 1:
        return dlast
    ends = _fresh(step, *shape.states(shape.batch, tile.segments))
    totals = _fresh(step, shape.batch, tile.segments, shape.channels)
    kernels._ends_back[(shape.batch * -(-shape.channels // tile.BD), tile.segments - 1)](
        *(step, A, C, dy, orders, ends, totals),
        *(shape.length, shape.channels, shape.n, first, C_row, tile.segments, tile.per_segment),
        **tile.sizes(),
        T=tile.T,
        OWN=shape.own,
        COMPLEX=shape.complex,
    )
    return _joined(tile, shape, first, A, orders, ends, totals, dlast, back=True)


def _joined(
    tile: Tile,
    shape: Shape,
    first: int,
    A: Tensor,
    orders: Tensor | None,
    ends: Tensor,
    totals: Tensor,
    begin: Tensor | None,
    *,
    back: bool,
) -> Tensor:
    starts = torch.empty_like(ends)
    kernels._join[(shape.batch * -(-shape.channels // tile.BD),)](
        *(A, orders, ends, totals, begin, starts, shape.channels, shape.n, first, tile.segments),
        **tile.sizes(),
        BACK=back,
        COMPLEX=shape.complex,
    )
    return starts


def _room_for_sums(B: Tensor, shape: Shape, orders: Tensor | None, n: int) -> tuple[Tensor, int]:
    """Where dB and dC are gathered, one behind the other, and the numbers of a step: sums over channels begin with 0.

    Rows hold n states, which may be some more than there are.
    """
    if shape.own:
        fresh = torch.empty if orders is None else torch.zeros
        return fresh(2, *B.shape, dtype=B.dtype, device=B.device), shape.own_row
    sums = torch.zeros(2, *B.shape[:-1], n, dtype=torch.float32, device=B.device)
    return sums, shape.own_row // shape.n * n


def rows(x: Tensor) -> tuple[Tensor, int]:
    """As it is where a step is one piece of memory and all steps lie one distance apart, else a copy; the distance."""
    dense = torch.empty(x.shape[2:], device="meta").stride()
    if x.stride()[2:] != dense or (x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1)):
        x = x.contiguous()
    return x, x.stride(1)


def _fresh(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)
