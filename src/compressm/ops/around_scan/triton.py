"""Softplus of steps and the gate of outputs on the GPU, each one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from compressm.ops.column_sums.triton import column_sums
from compressm.ops.rows import rows

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
    """Whether a row is a step before the end of its sequence."""
    return (row % length < tl.load(lengths + row // length, mask=row >= 0, other=0))[:, None]


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


@triton.jit
def _steps_back(
    delta, bias, lengths, dstep, ddelta, sums, total, length, width, delta_row,
    SOFTPLUS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """ddelta, and its sums over the rows of a tile."""
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


@triton.jit
def _gate(y, z, out, total, width, y_row, z_row, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col, live = _place(total, width, ROWS, COLS)
    value = tl.load(y + row[:, None] * y_row + col[None, :], mask=live, other=0.0).to(tl.float32)
    gate = tl.load(z + row[:, None] * z_row + col[None, :], mask=live, other=0.0).to(tl.float32)
    value = value * gate / (1.0 + tl.exp(-gate))
    tl.store(out + row[:, None] * width + col[None, :], value.to(out.dtype.element_ty), mask=live)


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


class Steps(torch.autograd.Function):
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
    """Rows in all, steps of a sequence, channels."""
    return x.shape[0] * x.shape[1], x.shape[1], x.shape[2]


def _grid(x: Tensor) -> tuple[int, int]:
    return -(-x.shape[0] * x.shape[1] // _TILE["ROWS"]), -(-x.shape[2] // _TILE["COLS"])
