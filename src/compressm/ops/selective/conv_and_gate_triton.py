"""The short convolution, the softplus of step sizes and the gate on the GPU, each in one pass over memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressm.ops.dispatch import once_differentiable
from compressm.ops.launching_triton import Planned, kinds_of, launched, plan_of
from compressm.ops.memory import rows
from compressm.ops.sums_triton import column_sums

# Steps of a program, how many of them are read at once, and channels.
_WALK = {"SPAN": 32, "AHEAD": 8, "COLS": 64, "num_warps": 1}


@triton.jit
def _channels(weight, bias, channels, K: tl.constexpr, COLS: tl.constexpr):
    """This program's channels, a mask of existing channels, their taps and their bias."""
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    there = col < channels
    taps = ()
    for k in tl.static_range(K):
        taps = taps + (tl.load(weight + col * K + k, mask=there, other=0.0).to(tl.float32),)
    shift = tl.zeros((COLS,), tl.float32)
    if bias is not None:
        shift = tl.load(bias + col, mask=there, other=0.0).to(tl.float32)
    return col, there, taps, shift


@triton.jit
def _read(x, row, col, there, t, length, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Load COUNT steps from t + FIRST on, where x points to step t: a tuple, with zeros outside the sequence."""
    found = ()
    for i in tl.static_range(COUNT):
        live = there & (t + (FIRST + i) >= 0) & (t + (FIRST + i) < length)
        found = found + (tl.load(x + (FIRST + i) * row + col, mask=live, other=0.0).to(tl.float32),)
    return found


@triton.jit
def _last(values, FIRST: tl.constexpr, COUNT: tl.constexpr):
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (values[FIRST + i],)
    return found


@triton.jit
def _before_silu(taps, shift, seen, FIRST: tl.constexpr, K: tl.constexpr):
    """bias + Σ weight[k] v[t − K + 1 + k], where `seen` holds v[t − K + 1] at FIRST."""
    total = shift
    for k in tl.static_range(K):
        total += taps[k] * seen[FIRST + k]
    return total


@triton.jit
def _slope(total):
    """The slope of SiLU."""
    share = 1.0 / (1.0 + tl.exp(-total))
    return share * (1.0 + total * (1.0 - share))


@launched
@triton.jit
def _convolve(
    v, weight, bias, out, length, channels, v_row,
    K: tl.constexpr, SPAN: tl.constexpr, AHEAD: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * SPAN
    begin = tl.program_id(2).to(tl.int64) * length + t
    col, there, taps, shift = _channels(weight, bias, channels, K, COLS)
    v += begin * v_row
    out += begin * channels
    before = _read(v, v_row, col, there, t, length, 1 - K, K - 1)
    for _ in range(SPAN // AHEAD):
        seen = before + _read(v, v_row, col, there, t, length, 0, AHEAD)
        for i in tl.static_range(AHEAD):
            total = _before_silu(taps, shift, seen, i, K)
            value = total / (1.0 + tl.exp(-total))
            tl.store(out + i * channels + col, value.to(out.dtype.element_ty), mask=there & (t + i < length))
        before = _last(seen, AHEAD, K - 1)
        t += AHEAD
        v += AHEAD * v_row
        out += AHEAD * channels


@launched
@triton.jit
def _convolve_back(
    v, weight, bias, dout, dv, sums, length, channels, v_row, dv_row,
    K: tl.constexpr, SPAN: tl.constexpr, AHEAD: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dv[t − K + 1] = Σ weight[k] g[t − k], g the gradient before SiLU; the walk goes K − 1 steps past the end.

    Each program also writes the sums of g with every input and alone: (…, K + 1, channels).
    """
    t = tl.program_id(0) * SPAN
    b = tl.program_id(2).to(tl.int64)
    begin = b * length + t
    col, there, taps, shift = _channels(weight, bias, channels, K, COLS)
    v += begin * v_row
    dout += begin * channels
    dv += begin * dv_row
    earlier = _read(v, v_row, col, there, t, length, 2 - 2 * K, 2 * K - 2)
    from_earlier = _read(dout, channels, col, there, t, length, 1 - K, K - 1)
    slopes = ()
    for i in tl.static_range(K - 1):
        slopes = slopes + (from_earlier[i] * _slope(_before_silu(taps, shift, earlier, i, K)),)
    before = _last(earlier, K - 1, K - 1)
    totals = ()
    for _ in tl.static_range(K + 1):
        totals = totals + (tl.zeros((COLS,), tl.float32),)
    for _ in range(SPAN // AHEAD):
        seen = before + _read(v, v_row, col, there, t, length, 0, AHEAD)
        given = _read(dout, channels, col, there, t, length, 0, AHEAD)
        known = slopes
        for i in tl.static_range(AHEAD):
            g = given[i] * _slope(_before_silu(taps, shift, seen, i, K))
            known = known + (g,)
            new = ()
            for k in tl.static_range(K):
                new = new + (totals[k] + g * seen[i + k],)
            totals = new + (totals[K] + g,)
            back = tl.zeros((COLS,), tl.float32)
            for k in tl.static_range(K):
                back += taps[k] * known[K - 1 + i - k]
            live = there & (t + (i - K + 1) >= 0) & (t + (i - K + 1) < length)
            tl.store(dv + (i - K + 1) * dv_row + col, back.to(dv.dtype.element_ty), mask=live)
        before = _last(seen, AHEAD, K - 1)
        slopes = _last(known, AHEAD, K - 1)
        t += AHEAD
        v += AHEAD * v_row
        dout += AHEAD * channels
        dv += AHEAD * dv_row
    target = sums + (b * tl.num_programs(0) + tl.program_id(0)) * (K + 1) * channels + col
    for k in tl.static_range(K + 1):
        tl.store(target + k * channels, totals[k], mask=there)


class CausalConv(torch.autograd.Function):
    """`plain_causal_conv` without `before`; sums are float32 whatever the dtype of v."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        v, v_row = rows(v)
        weight = weight.contiguous()
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        _conv_plan(v.shape, v_row, weight.shape[-1], kinds_of(v, weight, bias), v.device)(v, weight, bias, out)
        ctx.save_for_backward(v, weight, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        v, weight, bias = ctx.saved_tensors
        dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        return dv, *conv_gradient(dout.contiguous(), v, weight, bias, dv)


def conv_gradient(
    dout: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, dv: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Write the gradient of v into `dv`, whose rows are dense, and return those of weight and bias."""
    taps, channels = weight.shape[-1], v.shape[2]
    kinds = kinds_of(v, weight, bias)
    plan, programs = _conv_back_plan(v.shape, v.stride(1), dv.stride(1), taps, kinds, v.device)
    sums = torch.empty(programs, (taps + 1) * channels, dtype=torch.float32, device=v.device)
    plan(v, weight, bias, dout, dv, sums)
    total = column_sums(sums).view(taps + 1, channels)
    dweight = total[:taps].mT.reshape(weight.shape).to(weight.dtype)
    return dweight, None if bias is None else total[taps].to(bias.dtype)


@plan_of
def _conv_plan(shape: tuple[int, ...], v_row: int, taps: int, kinds: tuple[Any, ...], device: torch.device) -> Planned:
    return Planned(_convolve, _conv_grid(shape), *shape[1:], v_row, K=taps, **_WALK)


@plan_of
def _conv_back_plan(
    shape: tuple[int, ...], v_row: int, dv_row: int, taps: int, kinds: tuple[Any, ...], device: torch.device
) -> tuple[Planned, int]:
    """The kernel, and the number of its programs that write sums."""
    grid = _conv_grid(shape, behind=taps - 1)
    return Planned(_convolve_back, grid, *shape[1:], v_row, dv_row, K=taps, **_WALK), grid[0] * grid[2]


def _conv_grid(shape: tuple[int, ...], *, behind: int = 0) -> tuple[int, int, int]:
    batch, length, channels = shape
    return -(-(length + behind) // _WALK["SPAN"]), -(-channels // _WALK["COLS"]), batch


_TILE = {"ROWS": 32, "COLS": 128, "num_warps": 4}


@triton.jit
def _place(total, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    return row, col, (row < total)[:, None] & (col < width)[None, :]


@triton.jit
def _before_softplus(delta, bias, row, col, live, width, delta_row):
    value = tl.load(delta + row[:, None] * delta_row + col[None, :], mask=live, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + col, mask=col < width, other=0.0).to(tl.float32)[None, :]
    return value


@triton.jit
def _within(lengths, row, length):
    """True where a row is a step before the end of its sequence."""
    return (row % length < tl.load(lengths + row // length, mask=row >= 0, other=0))[:, None]


@launched
@triton.jit
def _steps(
    delta, bias, lengths, step, total, length, width, delta_row,
    SOFTPLUS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, col, live = _place(total, width, ROWS, COLS)
    value = _before_softplus(delta, bias, row, col, live, width, delta_row)
    if SOFTPLUS:
        # log(1 + e) with e = exp(−|value|) at most 1: a series where the sum would round e away.
        e = tl.exp(-tl.abs(value))
        series = e * (1.0 - e * (0.5 - e * (0.33333334 - e * (0.25 - e * 0.2))))
        value = tl.maximum(value, 0.0) + tl.where(e < 0.03, series, tl.log(1.0 + e))
    if lengths is not None:
        value = tl.where(_within(lengths, tl.where(row < total, row, 0), length), value, 0.0)
    tl.store(step + row[:, None] * width + col[None, :], value, mask=live)


@launched
@triton.jit
def _steps_back(
    delta, bias, lengths, dstep, ddelta, sums, total, length, width, delta_row,
    SOFTPLUS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write ddelta, and its sums over the rows of a tile."""
    row, col, live = _place(total, width, ROWS, COLS)
    value = tl.load(dstep + row[:, None] * width + col[None, :], mask=live, other=0.0)
    if SOFTPLUS:
        before = _before_softplus(delta, bias, row, col, live, width, delta_row)
        value = value / (1.0 + tl.exp(-before))
    if lengths is not None:
        value = tl.where(_within(lengths, tl.where(row < total, row, 0), length), value, 0.0)
    tl.store(ddelta + row[:, None] * width + col[None, :], value.to(ddelta.dtype.element_ty), mask=live)
    if sums is not None:
        tl.store(sums + tl.program_id(0).to(tl.int64) * width + col, tl.sum(value, 0), mask=col < width)


@launched
@triton.jit
def _gate(y, z, out, total, width, y_row, z_row, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col, live = _place(total, width, ROWS, COLS)
    value = tl.load(y + row[:, None] * y_row + col[None, :], mask=live, other=0.0).to(tl.float32)
    gate = tl.load(z + row[:, None] * z_row + col[None, :], mask=live, other=0.0).to(tl.float32)
    value = value * gate / (1.0 + tl.exp(-gate))
    tl.store(out + row[:, None] * width + col[None, :], value.to(out.dtype.element_ty), mask=live)


@launched
@triton.jit
def _gate_back(y, z, dout, dy, dz, total, width, y_row, z_row, dz_row, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col, live = _place(total, width, ROWS, COLS)
    value = tl.load(y + row[:, None] * y_row + col[None, :], mask=live, other=0.0).to(tl.float32)
    gate = tl.load(z + row[:, None] * z_row + col[None, :], mask=live, other=0.0).to(tl.float32)
    given = tl.load(dout + row[:, None] * width + col[None, :], mask=live, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    at = row[:, None] * width + col[None, :]
    tl.store(dy + at, (given * gate * share).to(dy.dtype.element_ty), mask=live)
    slope = share * (1.0 + gate * (1.0 - share))
    at = row[:, None] * dz_row + col[None, :]
    tl.store(dz + at, (given * value * slope).to(dz.dtype.element_ty), mask=live)


def soft_steps(delta: Tensor, bias: Tensor | None, lengths: Tensor | None, *, softplus: bool = True) -> Tensor:
    """Δ in float32, after bias and softplus, 0 at and after `lengths` (int64); rows of delta are dense."""
    step = torch.empty(delta.shape, dtype=torch.float32, device=delta.device)
    kinds = kinds_of(delta, bias, lengths)
    plan = _steps_plan(delta.shape, delta.stride(1), softplus, kinds, delta.device)
    plan.forward(delta, bias, lengths, step)
    return step


class StepSizes(torch.autograd.Function):
    """Δ in float32, after bias and softplus, 0 at and after `lengths`."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, bias: Tensor | None, lengths: Tensor | None, softplus: bool) -> Tensor:
        delta, _ = rows(delta)
        lengths = None if lengths is None else lengths.to(delta.device, torch.int64)
        ctx.save_for_backward(delta, bias, lengths)
        ctx.softplus = softplus
        return soft_steps(delta, bias, lengths, softplus=softplus)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstep: Tensor) -> tuple[Tensor | None, ...]:
        delta, bias, lengths = ctx.saved_tensors
        ddelta = torch.empty(delta.shape, dtype=delta.dtype, device=delta.device)
        plan = _steps_plan(delta.shape, delta.stride(1), ctx.softplus, kinds_of(delta, bias, lengths), delta.device)
        sums = None
        if bias is not None:
            sums = torch.empty(plan.tiles, delta.shape[2], dtype=torch.float32, device=delta.device)
        plan.backward(delta, bias, lengths, dstep.contiguous(), ddelta, sums)
        return ddelta, None if sums is None or bias is None else column_sums(sums).to(bias.dtype), None, None


class Gate(torch.autograd.Function):
    """y silu(z) in the dtype of y."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor) -> Tensor:
        (y, y_row), (z, z_row) = rows(y), rows(z)
        out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        _gate_plan(y.shape, y_row, z_row, 0, kinds_of(y, z), y.device).forward(y, z, out)
        ctx.save_for_backward(y, z)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        y, z = ctx.saved_tensors
        dz = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        return gate_gradient(dout.contiguous(), y, z, dz), dz


def gate_gradient(dout: Tensor, y: Tensor, z: Tensor, dz: Tensor) -> Tensor:
    """Write the gradient of z into `dz`, whose rows are dense, and return that of y."""
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    plan = _gate_plan(y.shape, y.stride(1), z.stride(1), dz.stride(1), kinds_of(y, z), y.device)
    plan.backward(y, z, dout, dy, dz)
    return dy


class _BothWays(NamedTuple):
    """The kernels of both passes, and the number of tiles of rows."""

    forward: Planned
    backward: Planned
    tiles: int


@plan_of
def _steps_plan(
    shape: tuple[int, ...], delta_row: int, softplus: bool, kinds: tuple[Any, ...], device: torch.device
) -> _BothWays:
    grid, (total, length, width) = _grid(shape), _sizes(shape)
    options = {"SOFTPLUS": softplus, **_TILE}
    forward, back = (
        Planned(kernel, grid, total, length, width, delta_row, **options) for kernel in (_steps, _steps_back)
    )
    return _BothWays(forward, back, grid[0])


@plan_of
def _gate_plan(
    shape: tuple[int, ...], y_row: int, z_row: int, dz_row: int, kinds: tuple[Any, ...], device: torch.device
) -> _BothWays:
    grid, (total, _, width) = _grid(shape), _sizes(shape)
    forward = Planned(_gate, grid, total, width, y_row, z_row, **_TILE)
    return _BothWays(forward, Planned(_gate_back, grid, total, width, y_row, z_row, dz_row, **_TILE), grid[0])


def _sizes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The rows in all, the steps of a sequence, and the channels."""
    return shape[0] * shape[1], shape[1], shape[2]


def _grid(shape: tuple[int, ...]) -> tuple[int, int]:
    return -(-shape[0] * shape[1] // _TILE["ROWS"]), -(-shape[2] // _TILE["COLS"])
