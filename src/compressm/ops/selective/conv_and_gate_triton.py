"""The short convolution, the softplus of step sizes and the gate on the GPU, each in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressm.ops.dispatch import once_differentiable
from compressm.ops.launching_triton import launched
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
    v, weight, bias, dout, dv, sums, length, channels, v_row,
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
    dv += begin * channels
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
            tl.store(dv + (i - K + 1) * channels + col, back.to(dv.dtype.element_ty), mask=live)
        before = _last(seen, AHEAD, K - 1)
        slopes = _last(known, AHEAD, K - 1)
        t += AHEAD
        v += AHEAD * v_row
        dout += AHEAD * channels
        dv += AHEAD * channels
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
        _convolve[_conv_grid(v)](v, weight, bias, out, *v.shape[1:], v_row, K=weight.shape[-1], **_WALK)
        ctx.save_for_backward(v, weight, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        v, weight, bias = ctx.saved_tensors
        taps, channels, grid = weight.shape[-1], v.shape[2], _conv_grid(v, behind=weight.shape[-1] - 1)
        dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        sums = torch.empty(grid[0] * grid[2], taps + 1, channels, dtype=torch.float32, device=v.device)
        _convolve_back[grid](
            *(v, weight, bias, dout.contiguous(), dv, sums, *v.shape[1:], v.stride(1)), K=taps, **_WALK
        )
        total = column_sums(sums.flatten(1)).view(taps + 1, channels)
        dweight = total[:taps].mT.reshape(weight.shape).to(weight.dtype)
        return dv, dweight, None if bias is None else total[taps].to(bias.dtype)


def _conv_grid(v: Tensor, *, behind: int = 0) -> tuple[int, int, int]:
    return -(-(v.shape[1] + behind) // _WALK["SPAN"]), -(-v.shape[2] // _WALK["COLS"]), v.shape[0]


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
def _gate_back(y, z, dout, dy, dz, total, width, y_row, z_row, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col, live = _place(total, width, ROWS, COLS)
    value = tl.load(y + row[:, None] * y_row + col[None, :], mask=live, other=0.0).to(tl.float32)
    gate = tl.load(z + row[:, None] * z_row + col[None, :], mask=live, other=0.0).to(tl.float32)
    given = tl.load(dout + row[:, None] * width + col[None, :], mask=live, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    at = row[:, None] * width + col[None, :]
    tl.store(dy + at, (given * gate * share).to(dy.dtype.element_ty), mask=live)
    slope = share * (1.0 + gate * (1.0 - share))
    tl.store(dz + at, (given * value * slope).to(dz.dtype.element_ty), mask=live)


class StepSizes(torch.autograd.Function):
    """Δ in float32, after bias and softplus, 0 at and after `lengths`."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, bias: Tensor | None, lengths: Tensor | None, softplus: bool) -> Tensor:
        delta, delta_row = rows(delta)
        lengths = None if lengths is None else lengths.to(delta.device, torch.int64)
        step = torch.empty(delta.shape, dtype=torch.float32, device=delta.device)
        _steps[_grid(delta)](*(delta, bias, lengths, step, *_sizes(delta), delta_row), SOFTPLUS=softplus, **_TILE)
        ctx.save_for_backward(delta, bias, lengths)
        ctx.softplus, ctx.delta_row = softplus, delta_row
        return step

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstep: Tensor) -> tuple[Tensor | None, ...]:
        delta, bias, lengths = ctx.saved_tensors
        ddelta = torch.empty(delta.shape, dtype=delta.dtype, device=delta.device)
        sums = None
        if bias is not None:
            sums = torch.empty(_grid(delta)[0], delta.shape[2], dtype=torch.float32, device=delta.device)
        _steps_back[_grid(delta)](
            *(delta, bias, lengths, dstep.contiguous(), ddelta, sums, *_sizes(delta), ctx.delta_row),
            SOFTPLUS=ctx.softplus,
            **_TILE,
        )
        return ddelta, None if sums is None or bias is None else column_sums(sums).to(bias.dtype), None, None


class Gate(torch.autograd.Function):
    """y silu(z) in the dtype of y."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor) -> Tensor:
        (y, y_row), (z, z_row) = rows(y), rows(z)
        out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        total, _, width = _sizes(y)
        _gate[_grid(y)](y, z, out, total, width, y_row, z_row, **_TILE)
        ctx.save_for_backward(y, z)
        ctx.rows = y_row, z_row
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        y, z = ctx.saved_tensors
        dy, dz = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (y, z))
        total, _, width = _sizes(y)
        _gate_back[_grid(y)](y, z, dout.contiguous(), dy, dz, total, width, *ctx.rows, **_TILE)
        return dy, dz


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """The rows in all, the steps of a sequence, and the channels."""
    return x.shape[0] * x.shape[1], x.shape[1], x.shape[2]


def _grid(x: Tensor) -> tuple[int, int]:
    return -(-x.shape[0] * x.shape[1] // _TILE["ROWS"]), -(-x.shape[2] // _TILE["COLS"])
