"""y = Re(C h) for few channels on the GPU, without storing the drive B u.

`NarrowLayer` (few states): a thread owns a mode and holds its row of B, or column of C, in registers; all threads share
the inputs and outputs of a step. The backward walk forms ∂L/∂h from ∂L/∂y and sums the gradients of B, C and log λ;
matrix products give y from h and ∂L/∂u from g. `ChunkedLayer` (many states): matrix products over chunks of T steps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from compressm.ops.dispatch import once_differentiable
from compressm.ops.launching_triton import launched
from compressm.ops.lti.scan_triton import Walk, _carried, _next_span, _poles, _power, _powers, _rows, _times
from compressm.ops.memory import cdiv
from compressm.ops.sums_triton import column_sums

# Measured on an H200.
_NARROW_MODES = 32  # modes of a program, one a thread
_ROWS = 2  # steps that are loaded before the first is used
_SPAN = 32  # steps between two states in float64
_THREADS = 40_000  # threads that a launch should have if the sequence is long enough


@triton.jit
def _weights(matrix, mode, n, by_pair, by_mode, by_channel, SIGN: tl.constexpr, CHANNELS: tl.constexpr):
    """Load a mode's complex weight for every channel; SIGN −1 conjugates it."""
    re, im = (), ()
    for k in tl.static_range(CHANNELS):
        at = matrix + mode * by_mode + k * by_channel
        re += (tl.load(at, mask=mode < n, other=0.0).to(tl.float32),)
        im += (SIGN * tl.load(at + by_pair, mask=mode < n, other=0.0).to(tl.float32),)
    return re, im


@triton.jit
def _channels(source, at, stride, start, stop, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Load the next ROWS steps of all channels, ROWS · CHANNELS numbers; 0 from `stop` on."""
    values = ()
    for k in tl.static_range(ROWS):
        for channel in tl.static_range(CHANNELS):
            value = tl.load(source + at + k * stride + channel, mask=start + k < stop, other=0.0)
            values += (value.to(tl.float32),)
    return values


@triton.jit
def _driven(values, w_re, w_im, l_re, l_im, k: tl.constexpr, CHANNELS: tl.constexpr):
    """Add the step's channels times their weights to l."""
    for channel in tl.static_range(CHANNELS):
        l_re += values[k * CHANNELS + channel] * w_re[channel]
        l_im += values[k * CHANNELS + channel] * w_im[channel]
    return l_re, l_im


@launched
@triton.jit(do_not_specialize=["by_pair", "by_mode", "by_channel", "length", "n", "segment"])
def _ends(source, matrix, by_pair, by_mode, by_channel, table, ends, length, n, segment, SIGN: tl.constexpr,
          CHANNELS: tl.constexpr, MODES: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """The state at the end of each whole segment, started from zero. SIGN −1 walks from the end, with conjugates."""
    batch, batches = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    mode = tl.program_id(0) * MODES + tl.arange(0, MODES)
    q_re, q_im = _power(table, 0, mode, n, SIGN)
    s_re, s_im = _power(table, 1, mode, n, SIGN)
    o_re, o_im = q_re.to(tl.float32), q_im.to(tl.float32)
    w_re, w_im = _weights(matrix, mode, n, by_pair, by_mode, by_channel, SIGN, CHANNELS)
    c_re, c_im = tl.zeros((MODES,), tl.float64), tl.zeros((MODES,), tl.float64)
    first = tl.program_id(1) * segment
    stop = first + segment
    at = (batch * length + (first if SIGN == 1 else length - 1 - first)) * CHANNELS
    for span in range(first, stop, SPAN):
        l_re, l_im = tl.zeros((MODES,), tl.float32), tl.zeros((MODES,), tl.float32)
        for start in range(span, span + SPAN, ROWS):
            values = _channels(source, at, SIGN * CHANNELS, start, stop, ROWS, CHANNELS)
            for k in tl.static_range(ROWS):
                l_re, l_im = _times(o_re, o_im, l_re, l_im)
                l_re, l_im = _driven(values, w_re, w_im, l_re, l_im, k, CHANNELS)
            at += SIGN * ROWS * CHANNELS
        c_re, c_im = _next_span(c_re, c_im, l_re, l_im, s_re, s_im)
    to = ends + (tl.program_id(1).to(tl.int64) * batches + batch) * 2 * n + mode
    tl.store(to, c_re.to(tl.float32), mask=mode < n)
    tl.store(to + n, c_im.to(tl.float32), mask=mode < n)


@launched
@triton.jit(do_not_specialize=["length", "n", "segment"])
def _forward(u, B, table, state, ends, h, length, n, segment, HAS_STATE: tl.constexpr, P: tl.constexpr,
             MODES: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """Write the conjugates of all h."""
    batch = tl.program_id(2).to(tl.int64)
    mode = tl.program_id(0) * MODES + tl.arange(0, MODES)
    inside = mode < n
    q_re, q_im = _power(table, 0, mode, n, 1)
    s_re, s_im = _power(table, 1, mode, n, 1)
    o_re, o_im = q_re.to(tl.float32), q_im.to(tl.float32)
    w_re, w_im = _weights(B, mode, n, n * P, P, 1, 1, P)
    c_re, c_im = tl.zeros((MODES,), tl.float64), tl.zeros((MODES,), tl.float64)
    if HAS_STATE:
        c_re = tl.load(state + batch * 2 * n + mode, mask=inside, other=0.0).to(tl.float64)
        c_im = tl.load(state + batch * 2 * n + n + mode, mask=inside, other=0.0).to(tl.float64)
    c_re, c_im = _carried(c_re, c_im, ends, table, tl.program_id(1), batch, mode, n, 1)
    first = tl.program_id(1) * segment
    stop = tl.minimum(first + segment, length)
    at = batch * length + first
    for span in range(first, stop, SPAN):
        l_re, l_im = tl.zeros((MODES,), tl.float32), tl.zeros((MODES,), tl.float32)
        f_re, f_im = c_re.to(tl.float32), c_im.to(tl.float32)
        for start in range(span, tl.minimum(span + SPAN, stop), ROWS):
            values = _channels(u, at * P, P, start, stop, ROWS, P)
            for k in tl.static_range(ROWS):
                l_re, l_im = _times(o_re, o_im, l_re, l_im)
                l_re, l_im = _driven(values, w_re, w_im, l_re, l_im, k, P)
                f_re, f_im = _times(o_re, o_im, f_re, f_im)
                to, live = h + (at + k) * 2 * n + mode, inside & (start + k < stop)
                tl.store(to, l_re + f_re, mask=live)
                tl.store(to + n, -(l_im + f_im), mask=live)
            at += ROWS
        c_re, c_im = _next_span(c_re, c_im, l_re, l_im, s_re, s_im)


@launched
@triton.jit(do_not_specialize=["length", "n", "segment"])
def _backward(u, dy, C, h, table, state, ends, g, parts, dstate, length, n, segment, HAS_STATE: tl.constexpr,
              P: tl.constexpr, Q: tl.constexpr, MODES: tl.constexpr, ROWS: tl.constexpr,
              SPAN: tl.constexpr):  # fmt: skip
    """g[t] = ∂L/∂h[t] + λ̄ g[t+1] from the end, and the sums for log λ, B and C, one row of `parts` a segment."""
    batch, batches = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    mode = tl.program_id(0) * MODES + tl.arange(0, MODES)
    inside = mode < n
    q_re, q_im = _power(table, 0, mode, n, -1)
    s_re, s_im = _power(table, 1, mode, n, -1)
    o_re, o_im = q_re.to(tl.float32), q_im.to(tl.float32)
    w_re, w_im = _weights(C, mode, n, n, 1, 2 * n, -1, Q)
    c_re, c_im = tl.zeros((MODES,), tl.float64), tl.zeros((MODES,), tl.float64)
    c_re, c_im = _carried(c_re, c_im, ends, table, tl.program_id(1), batch, mode, n, -1)
    zero = tl.zeros((MODES,), tl.float32)
    sum_re, sum_im, r_re, r_im = zero, zero, zero, zero
    db_re, db_im, dc_re, dc_im = (zero,) * P, (zero,) * P, (zero,) * Q, (zero,) * Q
    first = tl.program_id(1) * segment
    stop = tl.minimum(first + segment, length)
    at = batch * length + length - 1 - first
    # The state of a step is loaded one iteration earlier, where log λ needs it as the previous state.
    b_re = tl.load(h + at * 2 * n + mode, mask=inside, other=0.0)
    b_im = -tl.load(h + at * 2 * n + n + mode, mask=inside, other=0.0)
    for span in range(first, stop, SPAN):
        l_re, l_im = zero, zero
        f_re, f_im = c_re.to(tl.float32), c_im.to(tl.float32)
        for start in range(span, tl.minimum(span + SPAN, stop), ROWS):
            given = _channels(dy, at * Q, -Q, start, stop, ROWS, Q)
            driving = _channels(u, at * P, -P, start, stop, ROWS, P)
            e_re, e_im = _rows(h, (at - 1) * 2 * n + mode, -2 * n, n, start, length - 1, inside, -1, ROWS)
            for k in tl.static_range(ROWS):
                l_re, l_im = _times(o_re, o_im, l_re, l_im)
                l_re, l_im = _driven(given, w_re, w_im, l_re, l_im, k, Q)
                f_re, f_im = _times(o_re, o_im, f_re, f_im)
                g_re, g_im = l_re + f_re, l_im + f_im
                to, live = g + (at - k) * 2 * n + mode, inside & (start + k < stop)
                tl.store(to, g_re, mask=live)
                tl.store(to + n, g_im, mask=live)
                new_re, new_im = (), ()
                for channel in tl.static_range(P):
                    new_re += (db_re[channel] + g_re * driving[k * P + channel],)
                    new_im += (db_im[channel] + g_im * driving[k * P + channel],)
                db_re, db_im = new_re, new_im
                new_re, new_im = (), ()
                for channel in tl.static_range(Q):
                    new_re += (dc_re[channel] + b_re * given[k * Q + channel],)
                    new_im += (dc_im[channel] - b_im * given[k * Q + channel],)
                dc_re, dc_im = new_re, new_im
                end = start + k == length - 1
                r_re, r_im = tl.where(end, g_re, r_re), tl.where(end, g_im, r_im)
                # Beyond the segment g only decays: it must not count.
                b_re, b_im = tl.where(start + k < stop, e_re[k], 0.0), tl.where(start + k < stop, e_im[k], 0.0)
                sum_re += g_re * b_re + g_im * b_im
                sum_im += g_re * b_im - g_im * b_re
            at -= ROWS
        c_re, c_im = _next_span(c_re, c_im, l_re, l_im, s_re, s_im)
    if stop == length:
        at_state = batch * 2 * n + mode
        if HAS_STATE:
            z_re = tl.load(state + at_state, mask=inside, other=0.0).to(tl.float32)
            z_im = tl.load(state + at_state + n, mask=inside, other=0.0).to(tl.float32)
            sum_re += r_re * z_re + r_im * z_im
            sum_im += r_re * z_im - r_im * z_re
        r_re, r_im = _times(o_re, o_im, r_re, r_im)
        tl.store(dstate + at_state, r_re, mask=inside)
        tl.store(dstate + at_state + n, r_im, mask=inside)
    # log λ as (2, n), B as (2, n, p), C as (q, 2, n), one after the other.
    to = parts + (tl.program_id(1).to(tl.int64) * batches + batch) * (2 * n * (1 + P + Q))
    tl.store(to + mode, o_re * sum_re + o_im * sum_im, mask=inside)
    tl.store(to + n + mode, o_im * sum_re - o_re * sum_im, mask=inside)
    for channel in tl.static_range(P):
        tl.store(to + 2 * n + mode * P + channel, db_re[channel], mask=inside)
        tl.store(to + 2 * n + (n + mode) * P + channel, db_im[channel], mask=inside)
    for channel in tl.static_range(Q):
        tl.store(to + 2 * n * (1 + P + channel) + mode, dc_re[channel], mask=inside)
        tl.store(to + 2 * n * (1 + P + channel) + n + mode, dc_im[channel], mask=inside)


@launched
@triton.jit(do_not_specialize=["rows", "depth", "by_depth", "by_column"])
def _product(a, b, out, rows, depth, by_depth, by_column, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
             ROWS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Compute out = a b for a tall `a` and few columns of `b`, where cuBLAS takes twice as long."""
    row, column, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for first in range(0, depth, DEPTH):
        here = first + k < depth
        at = a + row.to(tl.int64)[:, None] * depth + (first + k)[None, :]
        left = tl.load(at, mask=(row < rows)[:, None] & here[None, :], other=0.0)
        at = b + (first + k)[:, None] * by_depth + column[None, :] * by_column
        right = tl.load(at, mask=here[:, None] & (column < COLUMNS)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    to = out + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < COLUMNS)[None, :])


class NarrowLayer(torch.autograd.Function):
    """y by a walk that writes every state, from u of any float dtype, log λ, float32 B and C, and a state or None."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, logs: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> Tensor:
        u, B, C = u.contiguous(), B.contiguous(), C.transpose(0, 1).contiguous()
        (batch, length, p), n = u.shape, B.shape[1]
        segments, segment = _segments(batch, length, n)
        table = torch.empty(3, 2, n, dtype=torch.float64, device=u.device)
        _powers[(cdiv(n, 32), 3)](logs.contiguous(), table, n, segment, STRIDE=1, SPAN=_SPAN, MODES=32,
                                         num_warps=1)  # fmt: skip
        ends = B.new_empty(max(1, segments - 1), batch, 2, n)
        h = B.new_empty(batch * length, 2 * n)
        sizes, blocks = (length, n, segment), cdiv(n, _NARROW_MODES)
        if segments > 1:
            _ends[(blocks, segments - 1, batch)](u, B, n * p, p, 1, table, ends, *sizes, SIGN=1, CHANNELS=p, **_SIZES)
        state = None if state is None else state.contiguous()
        _forward[(blocks, segments, batch)](u, B, table, h if state is None else state, ends, h, *sizes,
                                            HAS_STATE=state is not None, P=p, **_SIZES)  # fmt: skip
        ctx.save_for_backward(u, B, C, h, table, state)
        ctx.walk = (segments, segment, logs.dtype)
        return _multiplied(h, C.flatten(1).mT, u.new_empty(batch, length, C.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        u, B, C, h, table, state = ctx.saved_tensors
        dy, (segments, segment, log_dtype) = grads[0].contiguous(), ctx.walk
        (batch, length, p), (q, _, n) = u.shape, C.shape
        ends, g = B.new_empty(max(1, segments - 1), batch, 2, n), torch.empty_like(h)
        parts, dstate = B.new_empty(segments * batch, 2 * n * (1 + p + q)), B.new_empty(batch, 2, n)
        sizes, blocks = (length, n, segment), cdiv(n, _NARROW_MODES)
        if segments > 1:
            _ends[(blocks, segments - 1, batch)](dy, C, n, 1, 2 * n, table, ends, *sizes, SIGN=-1, CHANNELS=q, **_SIZES)
        given = (u, dy, C, h, table, dstate if state is None else state, ends)
        _backward[(blocks, segments, batch)](*given, g, parts, dstate, *sizes, HAS_STATE=state is not None,
                                             P=p, Q=q, **_SIZES)  # fmt: skip
        du = _multiplied(g, B.flatten(0, 1), torch.empty_like(u))
        dlogs, dB, dC = column_sums(parts).split([2 * n, 2 * n * p, 2 * n * q])
        dlogs, dB, dC = dlogs.view(2, n).to(log_dtype), dB.view(2, n, p), dC.view(q, 2, n).transpose(0, 1)
        return du, dlogs, dB, dC, None if state is None else dstate.to(state.dtype)


def _multiplied(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Fill `out` with a @ b, as exact as torch's matmul precision asks."""
    rows, depth = a.shape
    precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    _product[(cdiv(rows, 64),)](a, b, out, rows, depth, b.stride(0), b.stride(1), COLUMNS=b.shape[1],
                                       WIDE=16, ROWS=64, DEPTH=32, PRECISION=precision)  # fmt: skip
    return out


_SIZES: dict[str, Any] = {"MODES": _NARROW_MODES, "ROWS": _ROWS, "SPAN": _SPAN, "num_warps": _NARROW_MODES // 32}


def _segments(batch: int, length: int, n: int) -> tuple[int, int]:
    """The number of segments, and the steps in each: whole spans."""
    wanted = max(1, _THREADS // (batch * n))
    segment = cdiv(cdiv(length, _SPAN), wanted) * _SPAN
    return cdiv(length, segment), segment


STEPS = 16  # T, the steps of a chunk
_TABLE_MODES, _BLOCK = 16, 128


@triton.jit
def _short_power(log_modulus, phase, exponent):
    """λ^exponent as a float32 pair: turns are counted in float64, sine and cosine are float32."""
    turns = phase * exponent * 0.15915494309189535
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    modulus = tl.exp((log_modulus * exponent).to(tl.float32))
    return modulus * tl.cos(angle), modulus * tl.sin(angle)


@launched
@triton.jit(do_not_specialize=["n"])
def _tables(logs, B, C, collect, collect_t, emit, emit_t, n, T: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
            MODES: tl.constexpr):  # fmt: skip
    """Write λʲ B to column T−1−j of `collect` (2, n, T, p), C λʲ to row j of `emit` (T + 1, q, 2, n); one j a program.

    Both are also written transposed, as (T, p, 2, n) and (2, n, T, q) without row 0: products are fastest when both
    factors are read along rows.
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


@launched
@triton.jit(do_not_specialize=["n"])
def _tables_backward(logs, B, C, dcollect, demit, parts, dB, dC, n, T: tl.constexpr, P: tl.constexpr,
                     Q: tl.constexpr, POWERS: tl.constexpr, MODES: tl.constexpr):  # fmt: skip
    """Program (block, channel of B or C) turns the gradients of the tables into those of its channel and of log λ.

    dB is (2, n, p), dC is (q, 2, n), and ∂L/∂log λ is one of the `parts` (p + q, 2, n).
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


@launched
@triton.jit
def _toeplitz(kernel, own, T: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, BLOCK: tl.constexpr):
    """Write own[t, q, s, p] = K_{t−s}[q, p] from `kernel` (q, T, p), where lag j stands at T−1−j."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p, s, q, t = at % P, at // P % T, at // (P * T) % Q, at // (P * T * Q)
    value = tl.load(kernel + (q * T + T - 1 - t + s) * P + p, mask=(t >= s) & (t < T), other=0.0)
    tl.store(own + at, value, mask=t < T)


@launched
@triton.jit
def _lags(down, dkernel, T: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, BLOCK: tl.constexpr):
    """Write the gradient of every K_j: the sum along its diagonal of blocks."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p, lag, q = at % P, T - 1 - at // P % T, at // (P * T)
    total = tl.zeros((BLOCK,), tl.float32)
    for t in tl.static_range(T):
        total += tl.load(down + ((t * Q + q) * T + t - lag) * P + p, mask=(lag <= t) & (q < Q), other=0.0)
    tl.store(dkernel + at, total, mask=q < Q)


class ChunkedLayer(torch.autograd.Function):
    """y by matrix products over chunks of T steps, from u, log λ, B, C and a state or None; all are float32."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, logs: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> Tensor:
        logs, B, C = logs.float().contiguous(), B.contiguous(), C.transpose(0, 1).contiguous()
        (batch, length, p), (q, _, n), T = u.shape, C.shape, STEPS
        sizes = {"T": T, "P": p, "Q": q}
        collect, collect_t, own = B.new_empty(2 * n, T * p), B.new_empty(T * p, 2 * n), B.new_empty(T * q, T * p)
        emit, emit_t = B.new_empty((T + 1) * q, 2 * n), B.new_empty(2 * n, T * q)
        tables = (collect, collect_t, emit, emit_t)
        _tables[(cdiv(n, 32), T + 1)](logs, B, C, *tables, n, MODES=32, num_warps=1, **sizes)
        _toeplitz[(cdiv(own.numel(), _BLOCK),)](emit[:q] @ collect_t.mT, own, BLOCK=_BLOCK, **sizes)
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
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        blocks, logs, B, C, collect, collect_t, emit, emit_t, own, before, state = ctx.saved_tensors
        (_, n, p), q, sizes = B.shape, C.shape[0], ctx.sizes
        dy = _in_chunks(grads[0])
        dends, dcarry, dstate, _ = ctx.walk.backward((dy @ emit_t.mT).view_as(before), before, state, None)
        dends = dends.view(-1, 2 * n)
        du = (dy @ own).addmm_(dends, collect_t.mT)
        dkernel = B.new_empty(q, STEPS * p)
        _lags[(cdiv(dkernel.numel(), _BLOCK),)](dy.mT @ blocks, dkernel, BLOCK=_BLOCK, **sizes)
        dcollect, demit = (dends.mT @ blocks).addmm_(emit[:q].mT, dkernel), torch.empty_like(emit)
        torch.mm(dkernel, collect.mT, out=demit[:q])
        torch.mm(dy.mT, before.view(-1, 2 * n), out=demit[q:])
        parts, dB, dC = B.new_empty(p + q, 2, n), torch.empty_like(B), torch.empty_like(C)
        _tables_backward[(cdiv(n, _TABLE_MODES), p + q)](logs, B, C, dcollect, demit, parts, dB, dC, n,
                                                          POWERS=2 * STEPS, MODES=_TABLE_MODES, **sizes)  # fmt: skip
        dlogs = column_sums(parts.flatten(1)).view(2, n).add_(dcarry, alpha=STEPS)
        du = du.view(before.shape[0], -1, p)[:, : ctx.length]
        return du, dlogs, dB, dC.transpose(0, 1), None if state is None else dstate.to(state.dtype)


def _in_chunks(sequence: Tensor) -> Tensor:
    """Reshape to (batch · chunks, T · channels), with zeros that fill the last chunk."""
    missing = -sequence.shape[1] % STEPS
    whole = pad(sequence, (0, 0, 0, missing)) if missing else sequence.contiguous()
    return whole.view(-1, STEPS * sequence.shape[2])
