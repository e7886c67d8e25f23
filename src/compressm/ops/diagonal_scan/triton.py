"""The recurrence on the GPU: one pass over memory forward, one backward.

A program owns a block of modes of one sequence and walks through time in tiles. Inside a tile an associative scan;
between tiles a carry in float64, so that slow poles keep their phase. Sums are float32, inputs and outputs any float.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressm.ops.diagonal_scan.pairs import powers

_TILE, _MODES, _WARPS = 64, 32, 4


@triton.jit
def _then(a_re, a_im, x_re, x_im, b_re, b_im, y_re, y_im):
    """First h ← a h + x, then h ← b h + y."""
    return (
        b_re * a_re - b_im * a_im,
        b_re * a_im + b_im * a_re,
        b_re * x_re - b_im * x_im + y_re,
        b_re * x_im + b_im * x_re + y_im,
    )


@triton.jit(do_not_specialize=["length", "n"])
def _forward(x, table, stride, state, h, last, length, n, TILE: tl.constexpr, MODES: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    mode = tl.program_id(0) * MODES + tl.arange(0, MODES)
    row = tl.arange(0, TILE)
    inside = mode < n
    # λ¹ … λ^TILE, kept in registers for all tiles.
    place = row[:, None] * (2 * n) + mode[None, :]
    p_re = tl.load(table + place, mask=inside[None, :], other=0.0)
    p_im = tl.load(table + place + n, mask=inside[None, :], other=0.0)
    a_re = tl.load(table + mode, mask=inside, other=0.0)[None, :] + tl.zeros((TILE, MODES), tl.float32)
    a_im = tl.load(table + n + mode, mask=inside, other=0.0)[None, :] + tl.zeros((TILE, MODES), tl.float32)
    s_re = tl.load(stride + mode, mask=inside, other=0.0)
    s_im = tl.load(stride + n + mode, mask=inside, other=0.0)
    c_re = tl.load(state + batch * 2 * n + mode, mask=inside, other=0.0).to(tl.float64)
    c_im = tl.load(state + batch * 2 * n + n + mode, mask=inside, other=0.0).to(tl.float64)
    base = batch * length * 2 * n
    for start in range(0, length, TILE):
        live = ((start + row) < length)[:, None] & inside[None, :]
        at = base + (start + row)[:, None].to(tl.int64) * (2 * n) + mode[None, :]
        x_re = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
        x_im = tl.load(x + at + n, mask=live, other=0.0).to(tl.float32)
        _, _, l_re, l_im = tl.associative_scan((a_re, a_im, x_re, x_im), 0, _then)
        k_re, k_im = c_re.to(tl.float32)[None, :], c_im.to(tl.float32)[None, :]
        h_re, h_im = l_re + p_re * k_re - p_im * k_im, l_im + p_re * k_im + p_im * k_re
        tl.store(h + at, h_re.to(h.dtype.element_ty), mask=live)
        tl.store(h + at + n, h_im.to(h.dtype.element_ty), mask=live)
        end = (start + row == length - 1)[:, None]
        if start + TILE >= length:
            tl.store(last + batch * 2 * n + mode, tl.sum(tl.where(end, h_re, 0.0), 0), mask=inside)
            tl.store(last + batch * 2 * n + n + mode, tl.sum(tl.where(end, h_im, 0.0), 0), mask=inside)
        final = (row == TILE - 1)[:, None]
        t_re = tl.sum(tl.where(final, l_re, 0.0), 0) + s_re * c_re - s_im * c_im
        c_im = tl.sum(tl.where(final, l_im, 0.0), 0) + s_re * c_im + s_im * c_re
        c_re = t_re


@triton.jit(do_not_specialize=["length", "n"])
def _backward(dh, h, table, stride, state, dlast, dx, dlog, dstate, length, n, TILE: tl.constexpr, MODES: tl.constexpr):
    """g[t] = dh[t] + λ̄ g[t+1] from the end; Σ conj(g[t]) h[t−1] on the way. `table` and `stride` hold powers of λ̄."""
    batch = tl.program_id(1).to(tl.int64)
    mode = tl.program_id(0) * MODES + tl.arange(0, MODES)
    row = tl.arange(0, TILE)
    inside = mode < n
    place = row[:, None] * (2 * n) + mode[None, :]
    p_re = tl.load(table + place, mask=inside[None, :], other=0.0)
    p_im = tl.load(table + place + n, mask=inside[None, :], other=0.0)
    first_re, first_im = (
        tl.load(table + mode, mask=inside, other=0.0),
        tl.load(table + n + mode, mask=inside, other=0.0),
    )
    a_re = first_re[None, :] + tl.zeros((TILE, MODES), tl.float32)
    a_im = first_im[None, :] + tl.zeros((TILE, MODES), tl.float32)
    s_re = tl.load(stride + mode, mask=inside, other=0.0)
    s_im = tl.load(stride + n + mode, mask=inside, other=0.0)
    c_re, c_im = tl.zeros((MODES,), tl.float64), tl.zeros((MODES,), tl.float64)
    sum_re, sum_im = tl.zeros((MODES,), tl.float64), tl.zeros((MODES,), tl.float64)
    at_state = batch * 2 * n + mode
    e_re = tl.load(dlast + at_state, mask=inside, other=0.0).to(tl.float32)
    e_im = tl.load(dlast + at_state + n, mask=inside, other=0.0).to(tl.float32)
    z_re = tl.load(state + at_state, mask=inside, other=0.0).to(tl.float32)
    z_im = tl.load(state + at_state + n, mask=inside, other=0.0).to(tl.float32)
    base = batch * length * 2 * n
    for start in range(0, length, TILE):
        time = length - 1 - (start + row)
        live = (time >= 0)[:, None] & inside[None, :]
        at = base + time[:, None].to(tl.int64) * (2 * n) + mode[None, :]
        d_re = tl.load(dh + at, mask=live, other=0.0).to(tl.float32)
        d_im = tl.load(dh + at + n, mask=live, other=0.0).to(tl.float32)
        ending = (time == length - 1)[:, None]
        d_re, d_im = tl.where(ending, d_re + e_re[None, :], d_re), tl.where(ending, d_im + e_im[None, :], d_im)
        _, _, l_re, l_im = tl.associative_scan((a_re, a_im, d_re, d_im), 0, _then)
        k_re, k_im = c_re.to(tl.float32)[None, :], c_im.to(tl.float32)[None, :]
        g_re, g_im = l_re + p_re * k_re - p_im * k_im, l_im + p_re * k_im + p_im * k_re
        tl.store(dx + at, g_re.to(dx.dtype.element_ty), mask=live)
        tl.store(dx + at + n, g_im.to(dx.dtype.element_ty), mask=live)
        earlier = (time >= 1)[:, None] & inside[None, :]
        h_re = tl.load(h + at - 2 * n, mask=earlier, other=0.0).to(tl.float32)
        h_im = tl.load(h + at - n, mask=earlier, other=0.0).to(tl.float32)
        begin = (time == 0)[:, None]
        h_re, h_im = tl.where(begin, z_re[None, :], h_re), tl.where(begin, z_im[None, :], h_im)
        g_re, g_im = tl.where(live, g_re, 0.0), tl.where(live, g_im, 0.0)
        sum_re += tl.sum(g_re * h_re + g_im * h_im, 0)
        sum_im += tl.sum(g_re * h_im - g_im * h_re, 0)
        if start + TILE >= length:
            w_re, w_im = tl.sum(tl.where(begin, g_re, 0.0), 0), tl.sum(tl.where(begin, g_im, 0.0), 0)
            tl.store(dstate + at_state, first_re * w_re - first_im * w_im, mask=inside)
            tl.store(dstate + at_state + n, first_re * w_im + first_im * w_re, mask=inside)
        final = (row == TILE - 1)[:, None]
        t_re = tl.sum(tl.where(final, l_re, 0.0), 0) + s_re * c_re - s_im * c_im
        c_im = tl.sum(tl.where(final, l_im, 0.0), 0) + s_re * c_im + s_im * c_re
        c_re = t_re
    tl.store(dlog + at_state, sum_re.to(tl.float32), mask=inside)
    tl.store(dlog + at_state + n, sum_im.to(tl.float32), mask=inside)


def triton_recurrence(x: Tensor, log_poles: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """All h, in the dtype of x, and the last, in float32."""
    if state is None:
        state = x.new_zeros(x.shape[0], 2, x.shape[-1], dtype=torch.float32)
    return TritonRecurrence.apply(x, log_poles, state)


class TritonRecurrence(torch.autograd.Function):
    """The gradients are those of `TwoLevelRecurrence`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_poles: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x, state = x.contiguous(), state.contiguous()
        batch, length, _, n = x.shape
        h, last = torch.empty_like(x), torch.empty(batch, 2, n, dtype=torch.float32, device=x.device)
        _forward[_grid(batch, n)](
            x, *_tables(log_poles), state, h, last, length, n, TILE=_TILE, MODES=_MODES, num_warps=_WARPS
        )
        ctx.save_for_backward(h, log_poles, state)
        return h, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, log_poles, state = ctx.saved_tensors
        batch, length, _, n = h.shape
        dh, dlast = grads[0].contiguous(), grads[1].contiguous()
        dx = torch.empty_like(h)
        sums, dstate = (torch.empty(batch, 2, n, dtype=torch.float32, device=h.device) for _ in range(2))
        mirrored = log_poles * log_poles.new_tensor([1.0, -1.0])[:, None]
        _backward[_grid(batch, n)](
            dh, h, *_tables(mirrored), state, dlast, dx, sums, dstate, length, n,
            TILE=_TILE, MODES=_MODES, num_warps=_WARPS,
        )  # fmt: skip
        total = sums.sum(0)
        poles = powers(log_poles, 1, first=1, dtype=torch.complex64)[0]
        pull = torch.complex(total[0], total[1]) * poles
        return dx, torch.stack([pull.real, -pull.imag]).to(log_poles.dtype), dstate.to(state.dtype)


def _grid(batch: int, n: int) -> tuple[int, int]:
    return triton.cdiv(n, _MODES), batch


def _tables(log_poles: Tensor) -> tuple[Tensor, Tensor]:
    """λ¹ … λ^TILE as float32 pairs, and λ^TILE in float64."""
    table = powers(log_poles, _TILE, first=1, dtype=torch.complex128)
    pairs = torch.stack([table.real, table.imag], dim=1)
    return pairs.float().contiguous(), pairs[-1].contiguous()
