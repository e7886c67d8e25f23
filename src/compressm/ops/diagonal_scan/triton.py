"""The recurrence on the GPU: one pass over memory forward, one backward.

A program owns a block of modes of one sequence and walks through time in tiles. Inside a tile
h[t] = λᵗ Σ_{s≤t} λ⁻ˢ x[s], one multiplication, a running sum, one multiplication; between tiles a carry in float64, so
that slow poles keep their phase. Sums are float32, inputs and outputs any float. Powers of λ are formed in the kernel
from log λ, their phase reduced in float64.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Launch(NamedTuple):
    """Steps in a tile, modes and warps of a program."""

    TILE: int
    MODES: int
    num_warps: int


# Measured on an H200. Many programs hide the memory behind each other and want small tiles that never spill; few must
# do it alone, with long tiles and several warps.
_MANY, _SOME, _FEW = Launch(16, 16, 1), Launch(64, 16, 4), Launch(64, 8, 4)


@triton.jit
def _powers(log_modulus, phase, exponent, SIGN: tl.constexpr):
    """λ^exponent (λ̄ for SIGN −1) as float32 pairs: turns counted in float64, sine and cosine in float32."""
    turns = phase * exponent * 0.15915494309189535
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    modulus = tl.exp((log_modulus * exponent).to(tl.float32))
    return modulus * tl.cos(angle), SIGN * modulus * tl.sin(angle)


@triton.jit
def _then(a_re, a_im, x_re, x_im, b_re, b_im, y_re, y_im):
    """First h ← a h + x, then h ← b h + y."""
    return (
        b_re * a_re - b_im * a_im,
        b_re * a_im + b_im * a_re,
        b_re * x_re - b_im * x_im + y_re,
        b_re * x_im + b_im * x_re + y_im,
    )


@triton.jit
def _tile_scan(x_re, x_im, up_re, up_im, down_re, down_im, one_re, one_im, scaled):
    """h[t] = λ h[t−1] + x[t] from h = 0 inside a tile; by running sums of λ⁻ˢ x[s] where λ⁻ˢ stays below 1e30."""
    if scaled:
        s_re = tl.cumsum(x_re * up_re - x_im * up_im, 0)
        s_im = tl.cumsum(x_re * up_im + x_im * up_re, 0)
        l_re, l_im = s_re * down_re - s_im * down_im, s_re * down_im + s_im * down_re
    else:
        a_re, a_im = one_re[None, :] + 0.0 * x_re, one_im[None, :] + 0.0 * x_re
        _, _, l_re, l_im = tl.associative_scan((a_re, a_im, x_re, x_im), 0, _then)
    return l_re, l_im


@triton.jit(do_not_specialize=["length", "n"])
def _forward(x, log_poles, state, h, last, length, n, TILE: tl.constexpr, MODES: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    mode = tl.program_id(0) * MODES + tl.arange(0, MODES)
    row = tl.arange(0, TILE)
    inside = mode < n
    log_modulus = tl.load(log_poles + mode, mask=inside, other=-1.0).to(tl.float64)
    phase = tl.load(log_poles + n + mode, mask=inside, other=0.0).to(tl.float64)
    step = row.to(tl.float64)[:, None]
    up_re, up_im = _powers(log_modulus[None, :], phase[None, :], -step, 1)
    down_re, down_im = _powers(log_modulus[None, :], phase[None, :], step, 1)
    one_re, one_im = _powers(log_modulus, phase, 1.0, 1)
    scaled = tl.min(log_modulus) * TILE > -69.0
    size = tl.exp(log_modulus * TILE)
    s_re, s_im = size * tl.cos(phase * TILE), size * tl.sin(phase * TILE)
    at_state = batch * 2 * n + mode
    c_re = tl.load(state + at_state, mask=inside, other=0.0).to(tl.float64)
    c_im = tl.load(state + at_state + n, mask=inside, other=0.0).to(tl.float64)
    # The carry enters as λ h: then every row of a tile takes it times λᵗ, the powers already there.
    q_re, q_im = tl.exp(log_modulus) * tl.cos(phase), tl.exp(log_modulus) * tl.sin(phase)
    at = batch * length * 2 * n + row[:, None].to(tl.int64) * (2 * n) + mode[None, :]
    live = (row < length)[:, None] & inside[None, :]
    next_re, next_im = tl.load(x + at, mask=live, other=0.0), tl.load(x + at + n, mask=live, other=0.0)
    for start in range(0, length, TILE):
        x_re, x_im = next_re.to(tl.float32), next_im.to(tl.float32)
        # The next tile is on its way while this one is summed.
        coming = ((start + TILE + row) < length)[:, None] & inside[None, :]
        next_re = tl.load(x + at + TILE * 2 * n, mask=coming, other=0.0)
        next_im = tl.load(x + at + TILE * 2 * n + n, mask=coming, other=0.0)
        l_re, l_im = _tile_scan(x_re, x_im, up_re, up_im, down_re, down_im, one_re, one_im, scaled)
        k_re, k_im = (
            (q_re * c_re - q_im * c_im).to(tl.float32)[None, :],
            (q_re * c_im + q_im * c_re).to(tl.float32)[None, :],
        )
        h_re, h_im = l_re + down_re * k_re - down_im * k_im, l_im + down_re * k_im + down_im * k_re
        tl.store(h + at, h_re.to(h.dtype.element_ty), mask=live)
        tl.store(h + at + n, h_im.to(h.dtype.element_ty), mask=live)
        if start + TILE >= length:
            end = (start + row == length - 1)[:, None]
            tl.store(last + at_state, tl.sum(tl.where(end, h_re, 0.0), 0), mask=inside)
            tl.store(last + at_state + n, tl.sum(tl.where(end, h_im, 0.0), 0), mask=inside)
        final = (row == TILE - 1)[:, None]
        t_re = tl.sum(tl.where(final, l_re, 0.0), 0) + s_re * c_re - s_im * c_im
        c_im = tl.sum(tl.where(final, l_im, 0.0), 0) + s_re * c_im + s_im * c_re
        c_re = t_re
        live, at = coming, at + TILE * 2 * n


@triton.jit(do_not_specialize=["length", "n"])
def _backward(dh, h, log_poles, state, dlast, dx, dlog, dstate, length, n, TILE: tl.constexpr, MODES: tl.constexpr):
    """g[t] = dh[t] + λ̄ g[t+1] from the end, and Σ conj(g[t]) λ h[t−1] on the way."""
    batch = tl.program_id(1).to(tl.int64)
    mode = tl.program_id(0) * MODES + tl.arange(0, MODES)
    row = tl.arange(0, TILE)
    inside = mode < n
    log_modulus = tl.load(log_poles + mode, mask=inside, other=-1.0).to(tl.float64)
    phase = tl.load(log_poles + n + mode, mask=inside, other=0.0).to(tl.float64)
    step = row.to(tl.float64)[:, None]
    up_re, up_im = _powers(log_modulus[None, :], phase[None, :], -step, -1)
    down_re, down_im = _powers(log_modulus[None, :], phase[None, :], step, -1)
    one_re, one_im = _powers(log_modulus, phase, 1.0, -1)
    scaled = tl.min(log_modulus) * TILE > -69.0
    size = tl.exp(log_modulus * TILE)
    s_re, s_im = size * tl.cos(phase * TILE), -size * tl.sin(phase * TILE)
    q_re, q_im = tl.exp(log_modulus) * tl.cos(phase), -tl.exp(log_modulus) * tl.sin(phase)
    c_re, c_im = tl.zeros((MODES,), tl.float64), tl.zeros((MODES,), tl.float64)
    sum_re, sum_im = tl.zeros((MODES,), tl.float32), tl.zeros((MODES,), tl.float32)
    at_state = batch * 2 * n + mode
    e_re = tl.load(dlast + at_state, mask=inside, other=0.0).to(tl.float32)
    e_im = tl.load(dlast + at_state + n, mask=inside, other=0.0).to(tl.float32)
    z_re = tl.load(state + at_state, mask=inside, other=0.0).to(tl.float32)
    z_im = tl.load(state + at_state + n, mask=inside, other=0.0).to(tl.float32)
    time = length - 1 - row
    at = batch * length * 2 * n + time[:, None].to(tl.int64) * (2 * n) + mode[None, :]
    live, earlier = (time >= 0)[:, None] & inside[None, :], (time >= 1)[:, None] & inside[None, :]
    next_re, next_im = tl.load(dh + at, mask=live, other=0.0), tl.load(dh + at + n, mask=live, other=0.0)
    before_re, before_im = (
        tl.load(h + at - 2 * n, mask=earlier, other=0.0),
        tl.load(h + at - n, mask=earlier, other=0.0),
    )
    for start in range(0, length, TILE):
        d_re, d_im, h_re, h_im = (
            next_re.to(tl.float32),
            next_im.to(tl.float32),
            before_re.to(tl.float32),
            before_im.to(tl.float32),
        )
        back = at - TILE * 2 * n
        coming, earlier = (time >= TILE)[:, None] & inside[None, :], (time >= TILE + 1)[:, None] & inside[None, :]
        next_re, next_im = tl.load(dh + back, mask=coming, other=0.0), tl.load(dh + back + n, mask=coming, other=0.0)
        before_re = tl.load(h + back - 2 * n, mask=earlier, other=0.0)
        before_im = tl.load(h + back - n, mask=earlier, other=0.0)
        ending, begin = (time == length - 1)[:, None], (time == 0)[:, None]
        d_re, d_im = tl.where(ending, d_re + e_re[None, :], d_re), tl.where(ending, d_im + e_im[None, :], d_im)
        l_re, l_im = _tile_scan(d_re, d_im, up_re, up_im, down_re, down_im, one_re, one_im, scaled)
        k_re, k_im = (
            (q_re * c_re - q_im * c_im).to(tl.float32)[None, :],
            (q_re * c_im + q_im * c_re).to(tl.float32)[None, :],
        )
        g_re = tl.where(live, l_re + down_re * k_re - down_im * k_im, 0.0)
        g_im = tl.where(live, l_im + down_re * k_im + down_im * k_re, 0.0)
        tl.store(dx + at, g_re.to(dx.dtype.element_ty), mask=live)
        tl.store(dx + at + n, g_im.to(dx.dtype.element_ty), mask=live)
        h_re, h_im = tl.where(begin, z_re[None, :], h_re), tl.where(begin, z_im[None, :], h_im)
        sum_re += tl.sum(g_re * h_re + g_im * h_im, 0)
        sum_im += tl.sum(g_re * h_im - g_im * h_re, 0)
        if start + TILE >= length:
            w_re, w_im = tl.sum(tl.where(begin, g_re, 0.0), 0), tl.sum(tl.where(begin, g_im, 0.0), 0)
            tl.store(dstate + at_state, one_re * w_re - one_im * w_im, mask=inside)
            tl.store(dstate + at_state + n, one_re * w_im + one_im * w_re, mask=inside)
        final = (row == TILE - 1)[:, None]
        t_re = tl.sum(tl.where(final, l_re, 0.0), 0) + s_re * c_re - s_im * c_im
        c_im = tl.sum(tl.where(final, l_im, 0.0), 0) + s_re * c_im + s_im * c_re
        c_re = t_re
        live, at, time = coming, back, time - TILE
    # ∂L/∂log|λ| = Re, ∂L/∂arg λ = −Im of the sum times λ.
    tl.store(dlog + at_state, one_re * sum_re + one_im * sum_im, mask=inside)
    tl.store(dlog + at_state + n, one_im * sum_re - one_re * sum_im, mask=inside)


def triton_recurrence(x: Tensor, log_poles: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """All h, in the dtype of x, and the last, in float32."""
    if state is None:
        state = x.new_zeros(x.shape[0], 2, x.shape[-1], dtype=torch.float32)
    return TritonRecurrence.apply(x, log_poles, state)


class TritonRecurrence(torch.autograd.Function):
    """The gradients are those of `TwoLevelRecurrence`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_poles: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x, log_poles, state = x.contiguous(), log_poles.contiguous(), state.contiguous()
        batch, length, _, n = x.shape
        h, last = torch.empty_like(x), torch.empty(batch, 2, n, dtype=torch.float32, device=x.device)
        _compile_all(x.dtype, log_poles.dtype, x.device)
        launch = _launch(batch, n)
        grid = (triton.cdiv(n, launch.MODES), batch)
        _forward[grid](x, log_poles, state, h, last, length, n, **launch._asdict())
        ctx.save_for_backward(h, log_poles, state)
        return h, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, log_poles, state = ctx.saved_tensors
        batch, length, _, n = h.shape
        dx = torch.empty_like(h)
        dlog, dstate = (torch.empty(batch, 2, n, dtype=torch.float32, device=h.device) for _ in range(2))
        given = (grads[0].contiguous(), h, log_poles, state, grads[1].contiguous())
        launch = _launch(batch, n)
        grid = (triton.cdiv(n, launch.MODES), batch)
        _backward[grid](*given, dx, dlog, dstate, length, n, **launch._asdict())
        return dx, dlog.sum(0).to(log_poles.dtype), dstate.to(state.dtype)


def _launch(batch: int, n: int) -> Launch:
    programs = batch * triton.cdiv(n, 16)
    if programs <= 100:
        return _FEW
    return _SOME if programs <= 400 else _MANY


@cache
def _compile_all(dtype: torch.dtype, log_dtype: torch.dtype, device: torch.device) -> None:
    """Every variant at the first use, on one step of one mode: a cut later must not wait for a compiler."""
    x, small = torch.zeros(1, 1, 2, 1, dtype=dtype, device=device), torch.zeros(1, 2, 1, device=device)
    logs = torch.full((2, 1), -1.0, dtype=log_dtype, device=device)
    for launch in (_MANY, _SOME, _FEW):
        options = launch._asdict()
        _forward[(1, 1)](x, logs, small, torch.empty_like(x), torch.empty_like(small), 1, 1, **options)
        outputs = (torch.empty_like(x), torch.empty_like(small), torch.empty_like(small))
        _backward[(1, 1)](x, x, logs, small, small, *outputs, 1, 1, **options)
