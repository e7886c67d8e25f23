"""The selective scan on the GPU: how it is cut into blocks of states, tiles of channels and segments of time."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressm.ops.dispatch import once_differentiable
from compressm.ops.launching_triton import Planned, kinds_of, plan_of
from compressm.ops.memory import rows
from compressm.ops.selective import scan_triton as kernels
from compressm.ops.selective.conv_and_gate import gated, step_sizes
from compressm.ops.selective.conv_and_gate_triton import soft_steps
from compressm.ops.selective.reference import Selective
from compressm.ops.sums_triton import column_sums

# Steps between two states that are kept for the backward pass: with few states (True) and with many.
SPANS = {True: 8, False: 16}
# States that a program holds in registers; more states are taken block after block. If the orders of channels differ,
# blocks are smaller, so that a block without states is skipped.
_MOST, _MOST_OF_ORDERS = 128, 32
# Up to `_NARROW` states are tiles of four, each in one thread; up to twice as many are two such blocks.
_NARROW, _STATES = 16, 4
# Channels of a program (with many states: for 128 states), steps at a time, and the most registers of a thread; keyed
# by whether states are few, and whether the pass is backward.
_TILES: dict[tuple[bool, bool], tuple[int, int, int | None]] = {
    (False, False): (8, 2, 128),
    (False, True): (2, 2, 128),
    (True, False): (64, 2, 128),
    (True, True): (64, 2, None),
}
# Rows whose distance is a multiple of this are read by loads of several numbers.
_ALIGNED = 16
# Lanes of a warp.
_LANES = 32
# Programs that keep a GPU busy: forward, and backward (True), where threads have more registers and fewer fit.
_BUSY = {False: 2048, True: 4096}


class ScanSizes(NamedTuple):
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
        """The numbers of one step in B."""
        return self.n * (2 if self.complex else 1) * (self.channels if self.own else 1)

    def states(self, *places: int) -> tuple[int, ...]:
        """The shape of states: (*places, [2,] channels, n)."""
        return (*places, *self.pair, self.channels, self.n)

    def kind(self) -> dict[str, bool]:
        """The flags that kernels are compiled with."""
        return {"OWN": self.own, "COMPLEX": self.complex}


class ProgramTile(NamedTuple):
    """The channels and states of a program, its steps at a time, and the number and length of segments of time."""

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
        """True if states are few."""
        return self.BN == _STATES

    @classmethod
    def of(cls, shape: ScanSizes, most: int, *, back: bool) -> ProgramTile:
        """Choose a tile of at most `most` states, and enough segments, each of whole spans, to keep the GPU busy."""
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

    def grid(self, shape: ScanSizes) -> tuple[int, int]:
        """The grid: blocks of channels of every sequence, and segments."""
        return shape.batch * -(-shape.channels // self.BD), self.segments

    def spans(self, shape: ScanSizes) -> int:
        """The number of states of a sequence that are kept for the backward pass."""
        return -(-shape.length // self.SPAN)

    def walk(self, shape: ScanSizes, first: int) -> dict[str, int | None]:
        """The constants of kernels that walk through whole segments, for the block of states that begins at `first`."""
        walk = {"T": self.T, "SPAN": self.SPAN, "ADD": first > 0, "JOINED": self.segments > 1}
        return self.sizes() | shape.kind() | walk

    def kept(self, shape: ScanSizes, *places: int) -> tuple[int, ...]:
        """The shape of kept states, in whole tiles: (*places, [2,] tiles, channels, states of a tile)."""
        return (*places, *shape.pair, self.TILES, shape.channels, self.BN)

    def rows_of(self, M: Tensor, shape: ScanSizes, blocks: range) -> tuple[Tensor, int]:
        """B or C, and the distance of its steps; zeros extend shared rows to the length of all tiles."""
        if shape.own:
            return rows(M)
        width = -(-len(blocks) * self.TILES * self.BN // _ALIGNED) * _ALIGNED
        M = pad(M, (0, width - M.shape[-1])) if width > M.shape[-1] else M
        M, row = rows(M)
        if row % _ALIGNED or M.data_ptr() % _ALIGNED or (shape.complex and row > 2 * width):
            M = M.clone(memory_format=torch.contiguous_format)
        return M, M.stride(1)

    def sums_over_lanes(self, shape: ScanSizes) -> bool:
        """True if sums over channels are sums over lanes."""
        return self.narrow and self.BD >= _LANES and not (shape.own or shape.complex)

    def sizes(self) -> dict[str, int | None]:
        return {"BD": self.BD, "BN": self.BN, "TILES": self.TILES, "num_warps": 1, "maxnreg": self.registers}


def blocks_of(shape: ScanSizes, ragged: bool) -> range:
    """The first state of each block; programs take the blocks one after the other."""
    most = _MOST_OF_ORDERS if ragged else _MOST
    return range(0, shape.n, _NARROW if _NARROW < shape.n <= 2 * _NARROW else most)


# Steps at a time in the kernels that only find the ends of segments.
_STEPS_TO_ENDS = 4
# Segments whose ends are read at once.
_AHEAD = 4


def scan(
    given: Selective, state: Tensor | None, lengths: Tensor | None, orders: Tensor | None, keep_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute `loop_scan` by GPU kernels."""
    # Ask here: inside a Function gradients are never enabled, and inputs say that they need one even under no_grad.
    wanted = (keep_state or state is not None, torch.is_grad_enabled())
    delta, bias, ends = given.delta, given.delta_bias, lengths
    if not given.softplus:
        delta, bias, ends = step_sizes(delta, bias, lengths, softplus=False), None, None
    if ends is not None:
        ends = ends.to(delta.device, torch.int64)
    rest = (given.A, given.B, given.C, given.D, state, orders, given.softplus, wanted)
    y, last = Scan.apply(given.u, delta, bias, ends, *rest)
    return y if given.z is None else gated(y, given.z), last


class Scan(torch.autograd.Function):
    """Re(C h) + D u in the dtype of u, and the last state in float32 if wanted.

    If `soft`, steps are softplus(delta + bias), and 0 at and after `lengths`; else they are delta.
    """

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        delta: Tensor,
        bias: Tensor | None,
        lengths: Tensor | None,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        state: Tensor | None,
        orders: Tensor | None,
        soft: bool,
        wanted: tuple[bool, bool],
        memory: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        batch, length, channels = u.shape
        shape = ScanSizes(batch, length, channels, A.shape[-1], B.ndim == 4 + (A.ndim == 3), A.ndim == 3)
        blocks, tile = _cut(shape, orders is not None, False)
        (u, u_row), (B, B_row), (C, C_row) = rows(u), tile.rows_of(B, shape, blocks), tile.rows_of(C, shape, blocks)
        A = A.float().contiguous()
        state = None if state is None else state.float().contiguous()
        last = _fresh(u, *shape.states(shape.batch), zero=orders is not None) if wanted[0] else None
        y = torch.empty(u.shape, dtype=u.dtype if len(blocks) == 1 else torch.float32, device=u.device)
        raw = (delta, bias, lengths) if soft and tile.segments > 1 else None
        step = _steps(delta, bias, lengths, soft=soft, later=raw is not None)
        kept = wanted[1] and any(ctx.needs_input_grad)
        marks = _marks(tile, shape, len(blocks), _fresh(u, 0) if memory is None else memory) if kept else None
        for place, first in enumerate(blocks):
            starts = _starts(tile, shape, first, u, u_row, step, None if first else raw, A, B, B_row, orders, state)
            given = (u, step, A, B, C, D, orders, starts, y, None if marks is None else marks[place], last)
            _walk(tile, shape, first, (u_row, B_row, C_row), kinds_of(*given), u.device)(*given)
        ctx.save_for_backward(u, step, A, B, C, D, orders, marks)
        ctx.shape, ctx.has_state, ctx.rows = shape, state is not None, (u_row, B_row, C_row)
        ctx.soft, ctx.delta = soft, (delta.dtype, None if bias is None else bias.dtype)
        return y.to(u.dtype), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        u, step, A, B, C, D, orders, marks = ctx.saved_tensors
        shape, (u_row, B_row, C_row) = ctx.shape, ctx.rows
        dy = dy.contiguous()
        dlast = None if dlast is None else dlast.float().contiguous()
        blocks, tile = _cut(shape, orders is not None, True)
        has = (ctx.delta[1] is not None, D is not None, ctx.has_state)
        room = Room.of(tile, shape, len(blocks), (u, ctx.delta[0], B), has, ragged=orders is not None)
        sums = room.sums.unbind(0)
        padded = sums[0].shape[-1] != shape.n
        for place, first in enumerate(blocks):
            starts = _starts_back(tile, shape, first, step, A, C, C_row, dy, orders, dlast)
            given = (
                *(u, step, A, B, C, D, orders, dy, marks[place], starts, room.scratch, room.du, room.ddelta),
                *(None if room.dbias is None else room.dbias[place], room.drates, *sums, room.dskip, room.dstate),
            )
            apart = (u_row, B_row, C_row, room.row, sums[0].numel())
            _walk_back(tile, shape, first, apart, ctx.soft, kinds_of(*given), u.device)(*given)
        dB, dC = (
            (total[..., : shape.n] if padded else total).to(M.dtype) for total, M in zip(sums, (B, C), strict=True)
        )
        dbias, dD = (
            None if total is None else column_sums(total.flatten(0, -2)).to(dtype)
            for total, dtype in ((room.dbias, ctx.delta[1]), (room.dskip, None if D is None else D.dtype))
        )
        dA = column_sums(room.drates.flatten(0, 1).flatten(1)).view(A.shape)
        dsteps = (room.ddelta.to(ctx.delta[0]), dbias, None)
        return room.du.to(u.dtype), *dsteps, dA, dB, dC, dD, room.dstate, None, None, None


def _marks(tile: ProgramTile, shape: ScanSizes, blocks: int, memory: Tensor) -> Tensor:
    """The states that are kept for the backward pass, in this memory if there is any."""
    sizes = (blocks, *tile.kept(shape, shape.batch, tile.spans(shape)))
    return memory[: math.prod(sizes)].view(sizes) if memory.numel() else memory.new_empty(sizes)


def most_marks(batch: int, length: int, channels: int, n: int) -> int:
    """The memory that `_marks` needs at most, for any real rates: a formula without cases, for symbolic sizes.

    Narrow tiles keep up to n + 15 states every 8 steps; wide ones up to 2n every 16 steps.
    """
    return batch * channels * (n + 16) * ((length + 7) // 8 + 1)


def resume(
    ctx: Any, u: Tensor, step: Tensor, bias: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, memory: Tensor
) -> None:
    """Make a context as `Scan.forward` has left it, from what it computed, without a state, lengths and orders."""
    shape = ScanSizes(u.shape[0], u.shape[1], u.shape[2], A.shape[-1], False, False)
    blocks, tile = _cut(shape, False, False)
    (u, u_row), (B, B_row), (C, C_row) = rows(u), tile.rows_of(B, shape, blocks), tile.rows_of(C, shape, blocks)
    ctx.save_for_backward(u, step, A, B, C, D, None, _marks(tile, shape, len(blocks), memory))
    ctx.shape, ctx.has_state, ctx.rows = shape, False, (u_row, B_row, C_row)
    ctx.soft, ctx.delta = True, (u.dtype, bias.dtype)


def _steps(delta: Tensor, bias: Tensor | None, lengths: Tensor | None, *, soft: bool, later: bool) -> Tensor:
    """Δ in float32; if `later`, only memory for it, which the kernel that finds the ends of segments fills."""
    if later:
        return _fresh(delta, *delta.shape)
    return soft_steps(delta, bias, lengths) if soft else delta.float().contiguous()


class Room(NamedTuple):
    """The workspace of the backward kernel: gradients, partial sums, and states that it needs again."""

    du: Tensor
    ddelta: Tensor
    dbias: Tensor | None
    drates: Tensor
    sums: Tensor
    row: int
    dskip: Tensor | None
    dstate: Tensor | None
    scratch: Tensor

    @classmethod
    def of(
        cls,
        tile: ProgramTile,
        shape: ScanSizes,
        blocks: int,
        like: tuple[Tensor, torch.dtype, Tensor],
        has: tuple[bool, bool, bool],
        *,
        ragged: bool,
    ) -> Room:
        """Allocate for `like`: u, the dtype of delta, and B; `has` says if there are a bias, a D and a first state."""
        u, dtype, B = like
        du, ddelta = (
            torch.empty(u.shape, dtype=kind if blocks == 1 else torch.float32, device=u.device)
            for kind in (u.dtype, dtype)
        )
        dA = _fresh(u, *shape.states(shape.batch, tile.segments), zero=ragged)
        parts = (shape.batch, tile.segments, shape.channels)
        dbias = _fresh(u, blocks, *parts, zero=ragged) if has[0] else None
        lanes = tile.sums_over_lanes(shape)
        sums, row = _room_for_sums(B, shape, blocks * tile.TILES * tile.BN if lanes else shape.n, ragged=ragged)
        dD = _fresh(u, *parts) if has[1] else None
        dstate = _fresh(u, *shape.states(shape.batch), zero=True) if has[2] else None
        groups, (programs, segments) = tile.SPAN // tile.T, tile.grid(shape)
        places = programs * segments if groups > 2 else 1
        scratch = _fresh(u, places, groups, len(shape.pair) + 1, tile.TILES, tile.BD, tile.BN)
        return cls(du, ddelta, dbias, dA, sums, row, dD, dstate, scratch)


def _starts(
    tile: ProgramTile,
    shape: ScanSizes,
    first: int,
    u: Tensor,
    u_row: int,
    step: Tensor,
    raw: tuple[Tensor, Tensor | None, Tensor | None] | None,
    A: Tensor,
    B: Tensor,
    B_row: int,
    orders: Tensor | None,
    state: Tensor | None,
) -> Tensor | None:
    """The state at the start of every segment; on the way, steps are written if they are `raw`, before softplus."""
    if tile.segments == 1:
        return state
    delta, bias, lengths = raw or (None, None, None)
    delta, delta_row = (None, 0) if delta is None else rows(delta)
    ends = _fresh(u, *tile.kept(shape, shape.batch, tile.segments))
    totals = _fresh(u, shape.batch, tile.segments, shape.channels)
    given = (u, delta, bias, lengths, step, A, B, orders, ends, totals)
    _to_ends(tile, shape, first, (u_row, delta_row, B_row), kinds_of(*given), u.device)(*given)
    return _joined(tile, shape, first, A, orders, ends, totals, state, back=False)


def _starts_back(
    tile: ProgramTile,
    shape: ScanSizes,
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
    ends = _fresh(dy, *tile.kept(shape, shape.batch, tile.segments))
    totals = _fresh(dy, shape.batch, tile.segments, shape.channels)
    given = (step, A, C, dy, orders, ends, totals)
    _to_ends_back(tile, shape, first, C_row, kinds_of(*given), dy.device)(*given)
    return _joined(tile, shape, first, A, orders, ends, totals, dlast, back=True)


def _joined(
    tile: ProgramTile,
    shape: ScanSizes,
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
    given = (A, orders, ends, totals, begin, starts)
    _join(tile, shape, first, back, kinds_of(*given), ends.device)(*given)
    return starts


@plan_of
def _cut(shape: ScanSizes, ragged: bool, back: bool) -> tuple[range, ProgramTile]:
    """The blocks of states, and the tile of a program."""
    blocks = blocks_of(shape, ragged)
    return blocks, ProgramTile.of(shape, blocks.step, back=back)


@plan_of
def _walk(
    tile: ProgramTile, shape: ScanSizes, first: int, rows: tuple[int, ...], kinds: tuple[Any, ...], device: torch.device
) -> Planned:
    sizes = (shape.length, shape.channels, shape.n, first, *rows, tile.segments, tile.per_segment)
    return Planned(kernels._scan, tile.grid(shape), *sizes, **tile.walk(shape, first))


@plan_of
def _walk_back(
    tile: ProgramTile,
    shape: ScanSizes,
    first: int,
    rows: tuple[int, ...],
    soft: bool,
    kinds: tuple[Any, ...],
    device: torch.device,
) -> Planned:
    sizes = (shape.length, shape.channels, shape.n, first, *rows, tile.segments, tile.per_segment)
    options = tile.walk(shape, first) | {"SOFT": soft, "LANES": tile.sums_over_lanes(shape)}
    return Planned(kernels._scan_back, tile.grid(shape), *sizes, **options)


@plan_of
def _to_ends(
    tile: ProgramTile, shape: ScanSizes, first: int, rows: tuple[int, ...], kinds: tuple[Any, ...], device: torch.device
) -> Planned:
    # Steps that come before softplus (a delta) are written for the last segment too, whose end nobody needs.
    grid = (tile.grid(shape)[0], tile.segments - (kinds[1] is None))
    sizes = (shape.length, shape.channels, shape.n, first, *rows, tile.segments, tile.per_segment)
    return Planned(kernels._ends, grid, *sizes, T=_STEPS_TO_ENDS, **tile.sizes(), **shape.kind())


@plan_of
def _to_ends_back(
    tile: ProgramTile, shape: ScanSizes, first: int, C_row: int, kinds: tuple[Any, ...], device: torch.device
) -> Planned:
    grid = (tile.grid(shape)[0], tile.segments - 1)
    sizes = (shape.length, shape.channels, shape.n, first, C_row, tile.segments, tile.per_segment)
    return Planned(kernels._ends_back, grid, *sizes, T=_STEPS_TO_ENDS, **tile.sizes(), **shape.kind())


@plan_of
def _join(
    tile: ProgramTile, shape: ScanSizes, first: int, back: bool, kinds: tuple[Any, ...], device: torch.device
) -> Planned:
    tile = tile._replace(BD=max(1, tile.BD // 4))
    sizes = (shape.channels, shape.n, first, tile.segments)
    options = {"AHEAD": _AHEAD, "BACK": back, "COMPLEX": shape.complex}
    return Planned(kernels._join, tile.grid(shape)[:1], *sizes, **tile.sizes(), **options)


def _room_for_sums(B: Tensor, shape: ScanSizes, n: int, *, ragged: bool) -> tuple[Tensor, int]:
    """Memory for dB and dC, one after the other, and the numbers of a step; sums over channels begin with 0.

    Rows hold n states, which may be more than the system has.
    """
    if shape.own:
        fresh = torch.zeros if ragged else torch.empty
        return fresh(2, *B.shape, dtype=B.dtype, device=B.device), shape.own_row
    sums = torch.zeros(2, *B.shape[:-1], n, dtype=torch.float32, device=B.device)
    return sums, shape.own_row // shape.n * n


def _fresh(like: Tensor, *shape: int, zero: bool = False) -> Tensor:
    return (torch.zeros if zero else torch.empty)(shape, dtype=torch.float32, device=like.device)
