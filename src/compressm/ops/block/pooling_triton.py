"""Means over time, linear maps of them, and zeros after the end of each sequence, on the GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressm.ops.block.pooling import COLUMNS
from compressm.ops.dispatch import once_differentiable
from compressm.ops.launching_triton import Planned, kinds_of, launched, plan_of
from compressm.ops.memory import cdiv, next_power_of_2


@launched
@triton.jit(do_not_specialize=["length"])
def _mean(
    x, weight, bias, out, mapped, length, H: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The mean over time, and if there is a weight, weight · mean + bias too; a program then has all columns."""
    batch, row = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (col < H)[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    # Unrolling lets four loads wait for memory together.
    for start in tl.range(0, length, ROWS, loop_unroll_factor=4):
        at = x + (batch * length + start + row[:, None]) * H + col[None, :]
        total += tl.load(at, mask=(start + row < length)[:, None] & inside, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / length
    tl.store(out + batch * H + col, mean.to(out.dtype.element_ty), mask=col < H)
    if weight is not None:
        k = tl.arange(0, WIDE)
        live = (k < OUTPUTS)[:, None] & inside
        value = tl.sum(tl.load(weight + k[:, None] * H + col[None, :], mask=live, other=0.0) * mean[None, :], 1)
        value += tl.load(bias + k, mask=k < OUTPUTS, other=0.0)
        tl.store(mapped + batch * OUTPUTS + k, value, mask=k < OUTPUTS)


@plan_of
def _mean_plan(batch: int, length: int, H: int, outputs: int, kinds: tuple[Any, ...], device: torch.device) -> Planned:
    """Plan the mean, and with `outputs` the map of it."""
    columns = min(next_power_of_2(H), COLUMNS)
    sizes = {"ROWS": 2048 // columns, "COLS": columns, "WIDE": next_power_of_2(max(outputs, 1))}
    return Planned(_mean, (batch, cdiv(H, columns)), length, H=H, OUTPUTS=outputs, num_warps=8, **sizes)


def mean_of_rows(x: Tensor) -> Tensor:
    """Average (batch, length, width) over time to (batch, width)."""
    x, (batch, length, H) = x.contiguous(), x.shape
    out = x.new_empty(batch, H)
    _mean_plan(batch, length, H, 0, (x.dtype,), x.device)(x, None, None, out, None)
    return out


@launched
@triton.jit(do_not_specialize=["batch", "length"])
def _mapped_mean_backward(
    dmapped, mean, weight, dmean, dweight, dbias, batch, length, H: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradients of weight and bias, and of every step of the sequence whose mean was mapped."""
    row, col, k = tl.arange(0, ROWS), tl.arange(0, COLS), tl.arange(0, WIDE)
    inside, live = (col < H)[None, :], (k < OUTPUTS)[:, None] & (col < H)[None, :]
    at = k[:, None] * H + col[None, :]
    matrix = tl.load(weight + at, mask=live, other=0.0)
    of_weight = tl.zeros((WIDE, COLS), tl.float32)
    of_bias = tl.zeros((ROWS, WIDE), tl.float32)
    for start in range(0, batch, ROWS):
        here = (start + row < batch)[:, None]
        to = dmapped + (start + row)[:, None] * OUTPUTS + k[None, :]
        gradient = tl.load(to, mask=here & (k < OUTPUTS)[None, :], other=0.0)
        to = (start + row)[:, None] * H + col[None, :]
        value = tl.load(mean + to, mask=here & inside, other=0.0)
        tl.store(dmean + to, tl.dot(gradient, matrix, input_precision="ieee") / length, mask=here & inside)
        of_weight = tl.dot(tl.trans(gradient), value, of_weight, input_precision="ieee")
        of_bias += gradient
    tl.store(dweight + at, of_weight, mask=live)
    tl.store(dbias + k, tl.sum(of_bias, 0), mask=k < OUTPUTS)


@plan_of
def _mapped_back_plan(batch: int, length: int, H: int, outputs: int, device: torch.device) -> Planned:
    sizes = {"COLS": max(16, next_power_of_2(H)), "WIDE": max(16, next_power_of_2(outputs))}
    return Planned(_mapped_mean_backward, (1,), batch, length, H=H, OUTPUTS=outputs, ROWS=64, num_warps=4, **sizes)


class MappedMean(torch.autograd.Function):
    """weight · mean + bias for the mean over time, in one kernel each way; all in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x, weight, bias, (batch, length, H) = x.contiguous(), weight.contiguous(), bias.contiguous(), x.shape
        mean, mapped = x.new_empty(batch, H), x.new_empty(batch, len(weight))
        kinds = kinds_of(x, weight, bias)
        _mean_plan(batch, length, H, len(weight), kinds, x.device)(x, weight, bias, mean, mapped)
        ctx.save_for_backward(mean, weight)
        ctx.length = length
        return mapped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        mean, weight = ctx.saved_tensors
        (batch, H), outputs = mean.shape, len(weight)
        dmean, dweight, dbias = torch.empty_like(mean), torch.empty_like(weight), weight.new_empty(outputs)
        plan = _mapped_back_plan(batch, ctx.length, H, outputs, mean.device)
        plan(grads[0].contiguous(), mean, weight, dmean, dweight, dbias)
        return dmean.unsqueeze(1).expand(batch, ctx.length, H), dweight, dbias


_VALUES = 4096  # numbers in a tile


@launched
@triton.jit
def _rows_before(x, lengths, out, length, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(2) * COLS + tl.arange(0, COLS)
    inside = (t < length)[:, None] & (col < width)[None, :]
    at = (b * length + t[:, None]) * width + col[None, :]
    value = tl.load(x + at, mask=inside & (t < tl.load(lengths + b))[:, None], other=0.0)
    tl.store(out + at, value, mask=inside)


def rows_before(x: Tensor, lengths: Tensor) -> Tensor:
    """Copy (batch, length, width), with zeros at and after `lengths`."""
    x, lengths = x.contiguous(), lengths.to(x.device).contiguous()
    out = torch.empty_like(x)
    batch, length, width = x.shape
    COLS = min(512, next_power_of_2(width))
    ROWS = max(1, _VALUES // COLS)
    grid = (cdiv(length, ROWS), batch, cdiv(width, COLS))
    _rows_before[grid](x, lengths, out, length, width, ROWS=ROWS, COLS=COLS, num_warps=4)
    return out
