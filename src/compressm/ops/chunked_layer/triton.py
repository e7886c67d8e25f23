"""y = Re(C h) by chunks of T steps, for many states behind few channels: large products, small tables.

With u a row of T p numbers a chunk: the state at its end is λᵀ times the state before plus `collect` u; its outputs are
its own Toeplitz block of K_j = Re(C Λʲ B) times u, and `emit` times the state before. Only the tables, and their
gradients, are kernels of our own; products are torch's, in the precision torch is set to.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from compressm.ops.column_sums.triton import column_sums
from compressm.ops.diagonal_scan.triton import Walk, _poles

STEPS = 16  # T
_MODES, _BLOCK = 16, 128


@triton.jit
def _short_power(log_modulus, phase, exponent):
    """λ^exponent as float32 pairs: turns counted in float64, sine and cosine in float32."""
    turns = phase * exponent * 0.15915494309189535
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    modulus = tl.exp((log_modulus * exponent).to(tl.float32))
    return modulus * tl.cos(angle), modulus * tl.sin(angle)


@triton.jit(do_not_specialize=["n"])
def _tables(logs, B, C, collect, collect_t, emit, emit_t, n, T: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
            MODES: tl.constexpr):  # fmt: skip
    """Program (block, j): λʲ B in column T−1−j of `collect` (2, n, T, p), C λʲ in row j of `emit` (T + 1, q, 2, n).

    Both once more transposed, (T, p, 2, n) and (2, n, T, q) without row 0: products are fastest when both sides are
    read along rows.
    """
    j = tl.program_id(1)
    mode = tl.program_id(0) * MODES + tl.arange(0, MODES)
    inside = mode < n
    log_modulus, phase = _poles(logs, mode, n)
    w_re, w_im = _short_power(log_modulus, phase, j.to(tl.float64))
    for p in tl.static_range(P):
        b_re = tl.load(B + mode * P + p, mask=inside, other=0.0)
        b_im = tl.load(B + (n + mode) * P + p, mask=inside, other=0.0)
        re, im, live = w_re * b_re - w_im * b_im, w_re * b_im + w_im * b_re, inside & (j < T)
        to = collect + (mode * T + T - 1 - j) * P + p
        tl.store(to, re, mask=live)
        tl.store(to + n * T * P, im, mask=live)
        to = collect_t + ((T - 1 - j) * P + p) * 2 * n + mode
        tl.store(to, re, mask=live)
        tl.store(to + n, im, mask=live)
    for q in tl.static_range(Q):
        c_re = tl.load(C + q * 2 * n + mode, mask=inside, other=0.0)
        c_im = tl.load(C + q * 2 * n + n + mode, mask=inside, other=0.0)
        re, im = w_re * c_re - w_im * c_im, -(w_re * c_im + w_im * c_re)
        to = emit + (j * Q + q) * 2 * n + mode
        tl.store(to, re, mask=inside)
        tl.store(to + n, im, mask=inside)
        to = emit_t + (mode * T + j - 1) * Q + q
        tl.store(to, re, mask=inside & (j > 0))
        tl.store(to + n * T * Q, im, mask=inside & (j > 0))


@triton.jit(do_not_specialize=["n"])
def _tables_backward(logs, B, C, dcollect, demit, parts, dB, dC, n, T: tl.constexpr, P: tl.constexpr,
                     Q: tl.constexpr, POWERS: tl.constexpr, MODES: tl.constexpr):  # fmt: skip
    """Program (block, channel of B or C): from its gradients in the table to those of the matrix and of log λ.

    dB as (2, n, p), dC as (q, 2, n), log λ as one of the `parts` (p + q, 2, n).
    """
    channel = tl.program_id(1)
    mode = tl.program_id(0) * MODES + tl.arange(0, MODES)
    row = tl.arange(0, POWERS)[:, None]
    inside, here = mode < n, (mode < n)[None, :]
    log_modulus, phase = _poles(logs, mode, n)
    w_re, w_im = _short_power(log_modulus[None, :], phase[None, :], row.to(tl.float64))
    if channel < P:
        at, live = dcollect + (mode[None, :] * T + T - 1 - row) * P + channel, here & (row < T)
        g_re, g_im = tl.load(at, mask=live, other=0.0), tl.load(at + n * T * P, mask=live, other=0.0)
        m_re = tl.load(B + mode * P + channel, mask=inside, other=0.0)
        m_im = tl.load(B + (n + mode) * P + channel, mask=inside, other=0.0)
        d_re, d_im = w_re * g_re + w_im * g_im, w_re * g_im - w_im * g_re
        tl.store(dB + mode * P + channel, tl.sum(d_re, 0), mask=inside)
        tl.store(dB + (n + mode) * P + channel, tl.sum(d_im, 0), mask=inside)
    else:
        q = channel - P
        at, live = demit + (row * Q + q) * 2 * n + mode[None, :], here & (row <= T)
        g_re, g_im = tl.load(at, mask=live, other=0.0), -tl.load(at + n, mask=live, other=0.0)
        m_re = tl.load(C + q * 2 * n + mode, mask=inside, other=0.0)
        m_im = tl.load(C + q * 2 * n + n + mode, mask=inside, other=0.0)
        d_re, d_im = w_re * g_re + w_im * g_im, w_re * g_im - w_im * g_re
        tl.store(dC + q * 2 * n + mode, tl.sum(d_re, 0), mask=inside)
        tl.store(dC + q * 2 * n + n + mode, tl.sum(d_im, 0), mask=inside)
    j, to = row.to(tl.float32), parts + channel * 2 * n + mode
    tl.store(to, tl.sum(j * (d_re * m_re[None, :] + d_im * m_im[None, :]), 0), mask=inside)
    tl.store(to + n, tl.sum(j * (d_im * m_re[None, :] - d_re * m_im[None, :]), 0), mask=inside)


@triton.jit
def _toeplitz(kernel, own, T: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, BLOCK: tl.constexpr):
    """own[t, q, s, p] = K_{t−s}[q, p], from (q, T, p) where lag j stands at T−1−j."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p, s, q, t = at % P, at // P % T, at // (P * T) % Q, at // (P * T * Q)
    value = tl.load(kernel + (q * T + T - 1 - t + s) * P + p, mask=(t >= s) & (t < T), other=0.0)
    tl.store(own + at, value, mask=t < T)


@triton.jit
def _lags(down, dkernel, T: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of every K_j: the sum along its diagonal of blocks."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p, lag, q = at % P, T - 1 - at // P % T, at // (P * T)
    total = tl.zeros((BLOCK,), tl.float32)
    for t in tl.static_range(T):
        total += tl.load(down + ((t * Q + q) * T + t - lag) * P + p, mask=(lag <= t) & (q < Q), other=0.0)
    tl.store(dkernel + at, total, mask=q < Q)


class ChunkedLayer(torch.autograd.Function):
    """y from u, log λ, B, C and a state or None; all float32."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, logs: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> Tensor:
        logs, B, C = logs.float().contiguous(), B.contiguous(), C.transpose(0, 1).contiguous()
        (batch, length, p), (q, _, n), T = u.shape, C.shape, STEPS
        sizes = {"T": T, "P": p, "Q": q}
        collect, collect_t, own = B.new_empty(2 * n, T * p), B.new_empty(T * p, 2 * n), B.new_empty(T * q, T * p)
        emit, emit_t = B.new_empty((T + 1) * q, 2 * n), B.new_empty(2 * n, T * q)
        tables = (collect, collect_t, emit, emit_t)
        _tables[(triton.cdiv(n, 32), T + 1)](logs, B, C, *tables, n, MODES=32, num_warps=1, **sizes)
        _toeplitz[(triton.cdiv(own.numel(), _BLOCK),)](emit[:q] @ collect_t.mT, own, BLOCK=_BLOCK, **sizes)
        blocks = _in_chunks(u)
        ends = (blocks @ collect.mT).reshape(batch, -1, 2, n)
        walk = Walk(ends, logs, exclusive=True, stride=T)
        state = None if state is None else state.contiguous()
        before = walk.forward(ends, state, keep_last=False)[0]
        y = (blocks @ own.mT).addmm_(before.view(-1, 2 * n), emit[q:].mT)
        ctx.save_for_backward(blocks, logs, B, C, *tables, own, before, state)
        ctx.walk, ctx.sizes, ctx.length = walk, sizes, length
        return y.view(batch, -1, q)[:, :length]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        blocks, logs, B, C, collect, collect_t, emit, emit_t, own, before, state = ctx.saved_tensors
        (_, n, p), q, sizes = B.shape, C.shape[0], ctx.sizes
        dy = _in_chunks(grads[0])
        dends, dcarry, dstate, _ = ctx.walk.backward((dy @ emit_t.mT).view_as(before), before, state, None)
        dends = dends.view(-1, 2 * n)
        du = (dy @ own).addmm_(dends, collect_t.mT)
        dkernel = B.new_empty(q, STEPS * p)
        _lags[(triton.cdiv(dkernel.numel(), _BLOCK),)](dy.mT @ blocks, dkernel, BLOCK=_BLOCK, **sizes)
        dcollect, demit = (dends.mT @ blocks).addmm_(emit[:q].mT, dkernel), torch.empty_like(emit)
        torch.mm(dkernel, collect.mT, out=demit[:q])
        torch.mm(dy.mT, before.view(-1, 2 * n), out=demit[q:])
        parts, dB, dC = B.new_empty(p + q, 2, n), torch.empty_like(B), torch.empty_like(C)
        _tables_backward[(triton.cdiv(n, _MODES), p + q)](logs, B, C, dcollect, demit, parts, dB, dC, n,
                                                          POWERS=2 * STEPS, MODES=_MODES, **sizes)  # fmt: skip
        dlogs = column_sums(parts.flatten(1)).view(2, n).add_(dcarry, alpha=STEPS)
        du = du.view(before.shape[0], -1, p)[:, : ctx.length]
        return du, dlogs, dB, dC.transpose(0, 1), None if state is None else dstate.to(state.dtype)


def _in_chunks(sequence: Tensor) -> Tensor:
    """(batch · chunks, T · channels), with zeros up to the last whole chunk."""
    missing = -sequence.shape[1] % STEPS
    whole = pad(sequence, (0, 0, 0, missing)) if missing else sequence.contiguous()
    return whole.view(-1, STEPS * sequence.shape[2])
