"""y = Re(C h) for few channels on the GPU, without storing the drive B u.

`NarrowLayer` (few states): a thread owns a mode and holds its row of B, or column of C, in registers; all threads share
the inputs and outputs of a step. The backward walk forms ∂L/∂h from ∂L/∂y and sums the gradients of B, C and log λ;
matrix products give y from h and ∂L/∂u from g. `ChunkedLayer` (many states): matrix products over chunks of T steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from compressm.ops.dispatch import once_differentiable
from compressm.ops.launching_triton import Planned, kinds_of, launched, plan_of
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
def _ends(source, matrix, table, ends, by_pair, by_mode, by_channel, length, n, segment, SIGN: tl.constexpr,
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
    if HAS_STATE:
        if stop == length:
            at_state = batch * 2 * n + mode
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
        (batch, length, _), n, q, device = u.shape, B.shape[1], len(C), u.device
        plan = _narrow_plan(u.shape, n, q, kinds_of(u, logs, state), _precision(), device)
        table = torch.empty(3, 2, n, dtype=torch.float64, device=device)
        plan.powers(logs.contiguous(), table)
        ends = torch.empty(plan.ends, dtype=torch.float32, device=device)
        h = torch.empty(batch * length, 2 * n, dtype=torch.float32, device=device)
        if plan.segments > 1:
            plan.ends_forward(u, B, table, ends)
        state = None if state is None else state.contiguous()
        plan.forward(u, B, table, h if state is None else state, ends, h)
        ctx.save_for_backward(u, B, C, h, table, state)
        ctx.plan, ctx.log_dtype = plan, logs.dtype
        y = torch.empty(batch, length, q, dtype=u.dtype, device=device)
        plan.readout(h, C, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        u, B, C, h, table, state = ctx.saved_tensors
        dy, plan, device = grads[0].contiguous(), ctx.plan, u.device
        p, (q, _, n) = u.shape[2], C.shape
        ends, g = torch.empty(plan.ends, dtype=torch.float32, device=device), torch.empty_like(h)
        parts = torch.empty(plan.rows, 2 * n * (1 + p + q), dtype=torch.float32, device=device)
        dstate = None if state is None else torch.empty_like(state, dtype=torch.float32)
        if plan.segments > 1:
            plan.ends_backward(dy, C, table, ends)
        plan.backward(u, dy, C, h, table, ends if state is None else state, ends, g, parts, dstate)
        du = torch.empty_like(u)
        plan.drive(g, B, du)
        dlogs, dB, dC = column_sums(parts).split_with_sizes([2 * n, 2 * n * p, 2 * n * q])
        dlogs, dB, dC = dlogs.view(2, n).to(ctx.log_dtype), dB.view(2, n, p), dC.view(q, 2, n).transpose(0, 1)
        return du, dlogs, dB, dC, None if state is None or dstate is None else dstate.to(state.dtype)


class _NarrowPlan(NamedTuple):
    """The segments of a walk and the kernels of both passes."""

    segments: int
    rows: int
    ends: tuple[int, ...]
    powers: Planned
    ends_forward: Planned
    forward: Planned
    readout: Planned
    ends_backward: Planned
    backward: Planned
    drive: Planned


@plan_of
def _narrow_plan(
    shape: tuple[int, ...], n: int, q: int, kinds: tuple[Any, ...], precision: str, device: torch.device
) -> _NarrowPlan:
    """Plan both passes; `kinds` are the dtypes of u, log λ and state."""
    batch, length, p = shape
    segments, segment = _segments(batch, length, n)
    sizes, blocks, has_state = (length, n, segment), cdiv(n, _NARROW_MODES), kinds[2] is not None
    powers = Planned(_powers, (cdiv(n, 32), 3), n, segment, STRIDE=1, SPAN=_SPAN, MODES=32, num_warps=1)
    ends = (blocks, segments - 1, batch)
    walk = (blocks, segments, batch)
    forward = Planned(_ends, ends, n * p, p, 1, *sizes, SIGN=1, CHANNELS=p, **_SIZES)
    back = Planned(_ends, ends, n, 1, 2 * n, *sizes, SIGN=-1, CHANNELS=q, **_SIZES)
    product = {"WIDE": 16, "ROWS": 64, "DEPTH": 32, "PRECISION": precision}
    rows = batch * length
    # y = h Cᵀ for C as (q, 2n), ∂L/∂u = g B for B as (2n, p).
    readout = Planned(_product, (cdiv(rows, 64),), rows, 2 * n, 1, 2 * n, COLUMNS=q, **product)
    drive = Planned(_product, (cdiv(rows, 64),), rows, 2 * n, p, 1, COLUMNS=p, **product)
    return _NarrowPlan(
        *(segments, segments * batch, (max(1, segments - 1), batch, 2, n), powers),
        *(forward, Planned(_forward, walk, *sizes, HAS_STATE=has_state, P=p, **_SIZES), readout),
        *(back, Planned(_backward, walk, *sizes, HAS_STATE=has_state, P=p, Q=q, **_SIZES), drive),
    )


def _precision() -> str:
    """Products are as exact as torch's matmul precision asks."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


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
        (batch, length, p), (q, _, n), T, device = u.shape, C.shape, STEPS, u.device
        plan = _chunked_plan(n, p, q, device)
        # Both tables, each also transposed.
        shapes = ((2 * n, T * p), (T * p, 2 * n), ((T + 1) * q, 2 * n), (2 * n, T * q), (T * q, T * p))
        *tables, own = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
        collect, collect_t, emit, _ = tables
        plan.tables(logs, B, C, *tables)
        plan.toeplitz(emit[:q] @ collect_t.mT, own)
        blocks = _in_chunks(u)
        ends = (blocks @ collect.mT).view(batch, -1, 2, n)
        walk = Walk(ends, logs, exclusive=True, stride=T)
        state = None if state is None else state.contiguous()
        before = walk.forward(ends, state, keep_last=False)[0]
        y = (blocks @ own.mT).addmm_(before.view(-1, 2 * n), emit[q:].mT)
        ctx.save_for_backward(blocks, logs, B, C, *tables, own, before, state)
        ctx.walk, ctx.plan, ctx.length = walk, plan, length
        y = y.view(batch, -1, q)
        return y if y.shape[1] == length else y[:, :length]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        blocks, logs, B, C, collect, collect_t, emit, emit_t, own, before, state = ctx.saved_tensors
        (_, n, p), q, plan, device = B.shape, C.shape[0], ctx.plan, B.device
        dy = _in_chunks(grads[0])
        dends, dcarry, dstate, _ = ctx.walk.backward((dy @ emit_t.mT).view_as(before), before, state, None)
        dends = dends.view(-1, 2 * n)
        du = (dy @ own).addmm_(dends, collect_t.mT)
        dkernel = torch.empty(q, STEPS * p, dtype=torch.float32, device=device)
        plan.lags(dy.mT @ blocks, dkernel)
        dcollect, demit = (dends.mT @ blocks).addmm_(emit[:q].mT, dkernel), torch.empty_like(emit)
        torch.mm(dkernel, collect.mT, out=demit[:q])
        torch.mm(dy.mT, before.view(-1, 2 * n), out=demit[q:])
        parts = torch.empty(p + q, 2 * n, dtype=torch.float32, device=device)
        dB, dC = torch.empty_like(B), torch.empty_like(C)
        plan.tables_backward(logs, B, C, dcollect, demit, parts, dB, dC)
        dlogs = column_sums(parts).view(2, n).add_(dcarry, alpha=STEPS)
        du = du.view(before.shape[0], -1, p)
        du = du if du.shape[1] == ctx.length else du[:, : ctx.length]
        return du, dlogs, dB, dC.transpose(0, 1), None if state is None else dstate.to(state.dtype)


class _ChunkedPlan(NamedTuple):
    """The kernels around the products of both passes."""

    tables: Planned
    toeplitz: Planned
    lags: Planned
    tables_backward: Planned


@plan_of
def _chunked_plan(n: int, p: int, q: int, device: torch.device) -> _ChunkedPlan:
    T = STEPS
    sizes = {"T": T, "P": p, "Q": q}
    return _ChunkedPlan(
        Planned(_tables, (cdiv(n, 32), T + 1), n, MODES=32, num_warps=1, **sizes),
        Planned(_toeplitz, (cdiv(T * q * T * p, _BLOCK),), BLOCK=_BLOCK, **sizes),
        Planned(_lags, (cdiv(q * T * p, _BLOCK),), BLOCK=_BLOCK, **sizes),
        Planned(_tables_backward, (cdiv(n, _TABLE_MODES), p + q), n, POWERS=2 * T, MODES=_TABLE_MODES, **sizes),
    )


def _in_chunks(sequence: Tensor) -> Tensor:
    """Reshape to (batch · chunks, T · channels), with zeros that fill the last chunk."""
    missing = -sequence.shape[1] % STEPS
    whole = pad(sequence, (0, 0, 0, missing)) if missing else sequence.contiguous()
    return whole.view(-1, STEPS * sequence.shape[2])
