"""The short convolution on the GPU, in the layout of sequences: no transposed copies, one pass over memory each way.

A program walks along time with a few channels a thread, and keeps in registers what the taps reach back to.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from compressm.ops.column_sums.triton import column_sums
from compressm.ops.rows import rows

# Steps of a program, steps that are read at once, channels; the same on the way back, where more is read at once.
_WALK = {"SPAN": 32, "AHEAD": 8, "COLS": 128, "num_warps": 1}
_WALK_BACK = {"SPAN": 32, "AHEAD": 8, "COLS": 128, "num_warps": 1}


@triton.jit
def _channels(weight, bias, channels, K: tl.constexpr, COLS: tl.constexpr):
    """This program's channels, whether they exist, their taps and their bias."""
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
def _read(x, row, col, there, first, length, START: tl.constexpr, COUNT: tl.constexpr):
    """So many steps from the program's first one plus START, a tuple; zeros outside of the sequence."""
    found = ()
    for i in tl.static_range(COUNT):
        t = first + (START + i)
        live = there & (t >= 0) & (t < length)
        found = found + (tl.load(x + (START + i) * row + col, mask=live, other=0.0).to(tl.float32),)
    return found


@triton.jit
def _convolve(
    v, weight, bias, out, length, channels, v_row,
    K: tl.constexpr, SPAN: tl.constexpr, AHEAD: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * SPAN
    begin = tl.program_id(2).to(tl.int64) * length + first
    col, there, taps, shift = _channels(weight, bias, channels, K, COLS)
    v += begin * v_row
    out += begin * channels
    seen = _read(v, v_row, col, there, first, length, 1 - K, K - 1)
    for start in tl.static_range(0, SPAN, AHEAD):
        seen = seen + _read(v, v_row, col, there, first, length, start, AHEAD)
        for i in tl.static_range(AHEAD):
            total = shift
            for k in tl.static_range(K):
                total += taps[k] * seen[start + i + k]
            value = total / (1.0 + tl.exp(-total))
            live = there & (first + start + i < length)
            tl.store(out + (start + i) * channels + col, value.to(out.dtype.element_ty), mask=live)


@triton.jit
def _convolve_back(
    v, weight, bias, dout, dv, sums, length, channels, v_row,
    K: tl.constexpr, SPAN: tl.constexpr, AHEAD: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """With g the gradient before SiLU, dv[t] = Σ weight[k] g[t + K − 1 − k]; and for each program the sums of g with
    every input and alone: (…, K + 1, channels)."""
    first = tl.program_id(0) * SPAN
    b = tl.program_id(2).to(tl.int64)
    begin = b * length + first
    col, there, taps, shift = _channels(weight, bias, channels, K, COLS)
    v += begin * v_row
    dout += begin * channels
    dv += begin * channels
    totals = ()
    for _ in tl.static_range(K + 1):
        totals = totals + (tl.zeros((COLS,), tl.float32),)
    seen = _read(v, v_row, col, there, first, length, 1 - K, K - 1)
    slopes = ()
    for start in tl.static_range(0, SPAN + K - 1, AHEAD):
        seen = seen + _read(v, v_row, col, there, first, length, start, min(AHEAD, SPAN + K - 1 - start))
        given = _read(dout, channels, col, there, first, length, start, min(AHEAD, SPAN + K - 1 - start))
        for i in tl.static_range(min(AHEAD, SPAN + K - 1 - start)):
            total = shift
            for k in tl.static_range(K):
                total += taps[k] * seen[start + i + k]
            share = 1.0 / (1.0 + tl.exp(-total))
            slope = given[i] * share * (1.0 + total * (1.0 - share))
            slopes = slopes + (slope,)
            if start + i < SPAN:
                new = ()
                for k in tl.static_range(K):
                    new = new + (totals[k] + slope * seen[start + i + k],)
                totals = new + (totals[K] + slope,)
            if start + i >= K - 1:
                back = tl.zeros((COLS,), tl.float32)
                for k in tl.static_range(K):
                    back += taps[k] * slopes[start + i - k]
                live = there & (first + (start + i - K + 1) < length)
                at = dv + (start + i - K + 1) * channels + col
                tl.store(at, back.to(dv.dtype.element_ty), mask=live)
    target = sums + (b * tl.num_programs(0) + tl.program_id(0)) * (K + 1) * channels + col
    for k in tl.static_range(K + 1):
        tl.store(target + k * channels, totals[k], mask=there)


class CausalConv(torch.autograd.Function):
    """As `plain_causal_conv` without what came before; sums in float32 whatever v is."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        v, v_row = rows(v)
        weight = weight.contiguous()
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        _convolve[_grid(v, _WALK)](v, weight, bias, out, *v.shape[1:], v_row, K=weight.shape[-1], **_WALK)
        ctx.save_for_backward(v, weight, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        v, weight, bias = ctx.saved_tensors
        taps, channels, grid = weight.shape[-1], v.shape[2], _grid(v, _WALK_BACK)
        dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        sums = torch.empty(grid[0] * grid[2], taps + 1, channels, dtype=torch.float32, device=v.device)
        _convolve_back[grid](
            *(v, weight, bias, dout.contiguous(), dv, sums, *v.shape[1:], v.stride(1)), K=taps, **_WALK_BACK
        )
        total = column_sums(sums.flatten(1)).view(taps + 1, channels)
        dweight = total[:taps].mT.reshape(weight.shape).to(weight.dtype)
        return dv, dweight, None if bias is None else total[taps].to(bias.dtype)


def _grid(v: Tensor, walk: dict[str, int]) -> tuple[int, int, int]:
    return -(-v.shape[1] // walk["SPAN"]), -(-v.shape[2] // walk["COLS"]), v.shape[0]
