"""y = Re(C h) for few channels on the GPU, without storing the drive B u or the states h.

A state is written once a chunk of T steps. One kernel multiplies a chunk's inputs to what they add to the state, and
scans over the chunks of a sequence; another reads the outputs from the state before the chunk and the inputs inside.
The gradients of the tables λʲ B, C λʲ and K_j = Re(C λʲ B) are sums over all chunks, formed apart for `_PARTS` shares
of them and added in a fixed order: the same input gives the same bits.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from compressm.ops.dispatch import once_differentiable
from compressm.ops.launching_triton import Planned, kinds_of, launched, plan_of
from compressm.ops.lti.scan_triton import _next_span, _poles, _times
from compressm.ops.memory import cdiv, next_power_of_2
from compressm.ops.sums_triton import column_sums

# Measured on an H200.
STEPS = 16  # T, the steps of a chunk
_CHUNKS = 64  # chunks of a tile: a scan finds the states between them
_PARTS = 8  # shares of all chunks over which gradients of tables are summed apart
_TABLE_MODES, _LAGS = 16, 16
_STATES: dict[str, Any] = {"DEPTH": 32, "num_warps": 4}
# Of a thread, at most: four programs run at once on a multiprocessor. Exact products would take twice as many.
_REGISTERS = {"tf32": 128}
_JOINED: dict[str, Any] = {"ROWS": 64, "COLS": 64, "DEPTH": 32, "num_warps": 4, "num_stages": 4}
# Tiles of 32 rows: their factors lie across the rows in memory, which the matrix units for 64 rows do not read. Up to
# 32 states (True) take narrow ones, so that all multiprocessors get some; more take wide ones, which read less.
_OUTER: dict[bool, dict[str, Any]] = {
    True: {"ROWS": 32, "COLS": 32, "DEPTH": 32, "num_warps": 2, "num_stages": 4},
    False: {"ROWS": 32, "COLS": 128, "DEPTH": 32, "num_warps": 4, "num_stages": 3},
}


@triton.jit
def _short_power(log_modulus, phase, exponent):
    """λ^exponent as a float32 pair: turns are counted in float64, sine and cosine are float32."""
    turns = phase * exponent * 0.15915494309189535
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    modulus = tl.exp((log_modulus * exponent).to(tl.float32))
    return modulus * tl.cos(angle), modulus * tl.sin(angle)


@triton.jit
def _exact_power(log_modulus, phase, exponent):
    """λ^exponent as a float64 pair."""
    modulus = tl.exp(log_modulus * exponent)
    return modulus * tl.cos(phase * exponent), modulus * tl.sin(phase * exponent)


@launched
@triton.jit(do_not_specialize=["n"])
def _tables(logs, B, C, tables, n, T: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
            MODES: tl.constexpr):  # fmt: skip
    """Write λʲ B to column T−1−j of `collect` (2, n, T, p), C λʲ to row j of `emit` (T + 1, q, 2, n); one j a program.

    Both are also written transposed, as (T, p, 2, n) and (2, n, T, q) without row 0: products are fastest when both
    factors are read along rows. `_places` says where they lie in `tables`.
    """
    j = tl.program_id(1)
    collect = tables + 2 * T * T * P * Q
    collect_t = collect + 2 * n * T * P
    emit_t = collect_t + 2 * n * T * P
    emit = emit_t + 2 * n * T * Q
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
@triton.jit
def _toeplitz(tables, double, T: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, CHANNELS: tl.constexpr,
              MODES: tl.constexpr):  # fmt: skip
    """Program (j, q) forms K_j = Re(C λʲ B) for its row, and writes all own[t, q, t − j, p], and zeros for t < j.

    `own_t` is the transpose, (T, p, T, q).
    """
    lag, q = tl.program_id(0), tl.program_id(1)
    own, own_t, collect_t = tables, tables + T * T * P * Q, tables + 2 * T * T * P * Q + double * T * P
    emit = collect_t + double * T * (P + Q)
    p, k, t = tl.arange(0, CHANNELS)[None, :], tl.arange(0, MODES), tl.arange(0, T)[:, None]
    total = tl.zeros((MODES, CHANNELS), tl.float32)
    for start in range(0, double, MODES):
        mode = start + k
        c = tl.load(emit + q * double + mode, mask=mode < double, other=0.0)
        at = collect_t + ((T - 1 - lag) * P + p) * double + mode[:, None]
        total += c[:, None] * tl.load(at, mask=(mode < double)[:, None] & (p < P), other=0.0)
    value = tl.where(t >= lag, tl.sum(total, 0)[None, :], 0.0)
    s = (t - lag + T) % T
    tl.store(own + ((t * Q + q) * T + s) * P + p, value, mask=p < P)
    tl.store(own_t + ((s * P + p) * T + t) * Q + q, value, mask=p < P)


@triton.jit
def _joined(a_re, a_im, x_re, x_im, b_re, b_im, y_re, y_im):
    """Two steps h → a h + x and h → b h + y as one."""
    re, im = b_re * a_re - b_im * a_im, b_re * a_im + b_im * a_re
    return re, im, b_re * x_re - b_im * x_im + y_re, b_re * x_im + b_im * x_re + y_im


@launched
@triton.jit(do_not_specialize=["chunks"])
def _states(source, tables, logs, begin, before, out, end, sums, chunks, double, place, T: tl.constexpr,
            WIDTH: tl.constexpr, SIGN: tl.constexpr, ONE: tl.constexpr, ROWS: tl.constexpr, MODES: tl.constexpr,
            DEPTH: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write the state before every chunk; a chunk brings its `source` (WIDTH) times the table (2, n, WIDTH) at `place`.

    SIGN −1 walks from the end with conjugates, as gradients do: `out` gets ∂L/∂x, `end` ∂L/∂state, and a row of `sums`
    ∂L/∂log λ, from the states `before` the chunks. From one tile of chunks to the next the state is carried in float64.
    """
    batch, n = tl.program_id(1).to(tl.int64), double // 2
    row, k = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    mode = tl.program_id(0) * MODES + tl.arange(0, MODES)
    inside = mode < n
    log_modulus, phase = _poles(logs, mode, n)
    phase *= SIGN
    w_re, w_im = _short_power(log_modulus, phase, T)
    zero = tl.zeros((ROWS, MODES), tl.float32)
    a_re, a_im = zero + w_re[None, :], zero + w_im[None, :]
    s_re, s_im = tl.zeros((MODES,), tl.float64), tl.zeros((MODES,), tl.float64)
    if not ONE:
        s_re, s_im = _exact_power(log_modulus, phase, T * ROWS)
    c_re, c_im = tl.zeros((MODES,), tl.float64), tl.zeros((MODES,), tl.float64)
    if begin is not None:
        c_re = tl.load(begin + batch * double + mode, mask=inside, other=0.0).to(tl.float64)
        c_im = tl.load(begin + batch * double + n + mode, mask=inside, other=0.0).to(tl.float64)
    sum_re, sum_im = tl.zeros((MODES,), tl.float32), tl.zeros((MODES,), tl.float32)
    base = batch * chunks + (0 if SIGN == 1 else chunks - 1)
    tl.store(out + base * double + mode, c_re.to(tl.float32), mask=inside)
    tl.store(out + base * double + n + mode, c_im.to(tl.float32), mask=inside)
    for first in range(0, chunks, ROWS):
        line, here = base + SIGN * (first + row), (first + row < chunks)[:, None]
        x_re, x_im = zero, zero
        for start in range(0, WIDTH, DEPTH):
            deep = start + k < WIDTH
            at, live = tables + place + mode[None, :] * WIDTH + (start + k)[:, None], deep[:, None] & inside[None, :]
            value = tl.load(source + line[:, None] * WIDTH + (start + k)[None, :], mask=here & deep[None, :], other=0.0)
            value = value.to(tl.float32)
            x_re = tl.dot(value, tl.load(at, mask=live, other=0.0), x_re, input_precision=PRECISION)
            x_im = tl.dot(value, tl.load(at + n * WIDTH, mask=live, other=0.0), x_im, input_precision=PRECISION)
        p_re, p_im, x_re, x_im = tl.associative_scan((a_re, a_im, x_re, x_im), 0, _joined)
        l_re, l_im = x_re, x_im
        if begin is not None or not ONE:
            f_re, f_im = _times(p_re, p_im, c_re.to(tl.float32)[None, :], c_im.to(tl.float32)[None, :])
            l_re, l_im = x_re + f_re, x_im + f_im
        to, live = (
            (line + SIGN)[:, None] * double + mode[None, :],
            (first + row + 1 < chunks)[:, None] & inside[None, :],
        )
        tl.store(out + to, l_re, mask=live)
        tl.store(out + to + n, l_im, mask=live)
        if before is not None:
            b_re = tl.load(before + to, mask=live, other=0.0)
            b_im = tl.load(before + to + n, mask=live, other=0.0)
            sum_re += tl.sum(l_re * b_re + l_im * b_im, 0)
            sum_im += tl.sum(l_re * b_im - l_im * b_re, 0)
        if end is not None:
            last, to = (first + row == chunks - 1)[:, None] & inside[None, :], batch * double + mode[None, :]
            tl.store(end + to + row[:, None] * 0, l_re, mask=last)
            tl.store(end + to + n + row[:, None] * 0, l_im, mask=last)
        if not ONE:
            last = (row == ROWS - 1)[:, None]
            e_re, e_im = tl.sum(tl.where(last, x_re, 0.0), 0), tl.sum(tl.where(last, x_im, 0.0), 0)
            c_re, c_im = _next_span(c_re, c_im, e_re, e_im, s_re, s_im)
    if sums is not None:
        # ∂L/∂log|λ| = Re, ∂L/∂arg λ = −Im of the sum times λ^T, T times each.
        to = sums + batch * double + mode
        tl.store(to, T * (w_re * sum_re + w_im * sum_im), mask=inside)
        tl.store(to + n, T * (w_im * sum_re - w_re * sum_im), mask=inside)


@triton.jit
def _add_product(total, a, b, row, column, rows, columns, depth, DEPTH: tl.constexpr, PRECISION: tl.constexpr):
    """Add a bᵀ; both are read along rows."""
    k = tl.arange(0, DEPTH)
    for start in range(0, depth, DEPTH):
        here = start + k < depth
        at = a + row.to(tl.int64)[:, None] * depth + (start + k)[None, :]
        left = tl.load(at, mask=(row < rows)[:, None] & here[None, :], other=0.0).to(tl.float32)
        at = b + column[None, :] * depth + (start + k)[:, None]
        right = tl.load(at, mask=here[:, None] & (column < columns)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@launched
@triton.jit(do_not_specialize=["rows"])
def _joined_products(a, c, tables, out, rows, double, first, second, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
                     ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
                     PRECISION: tl.constexpr):  # fmt: skip
    """Compute out = a bᵀ + c dᵀ for a of WIDTH columns and c of 2n, b at place `first` of the tables, d at `second`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    total = _add_product(total, c, tables + second, row, column, rows, COLUMNS, double, DEPTH, PRECISION)
    total = _add_product(total, a, tables + first, row, column, rows, COLUMNS, WIDTH, DEPTH, PRECISION)
    to = out + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < COLUMNS)[None, :])


@triton.jit
def _outer_tile(left, right, to, tile, first, stop, height, width, ROWS: tl.constexpr, COLS: tl.constexpr,
                DEPTH: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One tile of leftᵀ right, over rows from `first` to `stop`."""
    across = tl.cdiv(width, COLS)
    row = tile // across * ROWS + tl.arange(0, ROWS)
    column, k = tile % across * COLS + tl.arange(0, COLS), tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(first, stop, DEPTH):
        line = (start + k).to(tl.int64)
        at, here = left + line[None, :] * height + row[:, None], start + k < stop
        a = tl.load(at, mask=here[None, :] & (row < height)[:, None], other=0.0).to(tl.float32)
        at = right + line[:, None] * width + column[None, :]
        b = tl.load(at, mask=here[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    live = (row < height)[:, None] & (column < width)[None, :]
    tl.store(to + row[:, None] * width + column[None, :], total, mask=live)


@launched
@triton.jit(do_not_specialize=["rows", "share"])
def _outer(blocks, dy, before, dends, parts, rows, share, double, P: tl.constexpr, Q: tl.constexpr,
           ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Write blocksᵀ dends (P, 2n), dyᵀ before (Q, 2n) and dyᵀ blocks (Q, P) over a share of rows; P = T p, Q = T q.

    Each share has its row of `parts`, of (P + Q) 2n + Q P numbers.
    """
    first, tile = tl.program_id(1) * share, tl.program_id(0)
    stop, across = tl.minimum(first + share, rows), tl.cdiv(double, COLS)
    collected, emitted = tl.cdiv(P, ROWS) * across, tl.cdiv(Q, ROWS) * across
    to = parts + tl.program_id(1).to(tl.int64) * ((P + Q) * double + Q * P)
    if tile < collected:
        _outer_tile(blocks, dends, to, tile, first, stop, P, double, ROWS, COLS, DEPTH, PRECISION)
    elif tile < collected + emitted:
        to, tile = to + P * double, tile - collected
        _outer_tile(dy, before, to, tile, first, stop, Q, double, ROWS, COLS, DEPTH, PRECISION)
    else:
        to, tile = to + (P + Q) * double, tile - collected - emitted
        _outer_tile(dy, blocks, to, tile, first, stop, Q, P, ROWS, COLS, DEPTH, PRECISION)


@launched
@triton.jit
def _lags(parts, double, T: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, PARTS: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Write the gradient of every K_j as (q, T, p) behind all parts, lag j at T−1−j: the sum of its blocks in them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    p, lag, q = at % P, T - 1 - at // P % T, at // (P * T)
    term = tl.arange(0, PARTS * T)[:, None]
    t, whole = term % T, (P + Q) * T * double
    down = parts + term // T * (whole + Q * T * P * T) + whole
    value = tl.load(down + ((t * Q + q) * T + t - lag) * P + p, mask=(lag <= t) & (q < Q), other=0.0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    to = parts + PARTS * (whole + Q * T * P * T) + at
    tl.store(to, tl.sum(value, 0), mask=at < Q * T * P)


@launched
@triton.jit(do_not_specialize=["others"])
def _tables_backward(logs, B, C, tables, parts, sums, dB, dC, double, others, T: tl.constexpr, P: tl.constexpr,
                     Q: tl.constexpr, POWERS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
                     MODES: tl.constexpr):  # fmt: skip
    """Program (block, channel of B or C) turns the gradients of the tables into those of its channel and of log λ.

    Those are the sum of all `parts`, and what arrives from the kernel K. dB is (2, n, p), dC is (q, 2, n), and
    ∂L/∂log λ is one of the `sums`, rows of (2, n) behind `others`.
    """
    channel, n = tl.program_id(1), double // 2
    collect_t = tables + 2 * T * T * P * Q + double * T * P
    emit = collect_t + double * T * (P + Q)
    dkernel = parts + PARTS * ((P + Q) * T * double + Q * T * P * T)
    mode = tl.program_id(0) * MODES + tl.arange(0, MODES)
    row = tl.arange(0, POWERS)[:, None]
    inside, here = mode < n, (mode < n)[None, :]
    log_modulus, phase = _poles(logs, mode, n)
    w_re, w_im = _short_power(log_modulus[None, :], phase[None, :], row.to(tl.float64))
    g_re, g_im = tl.zeros((POWERS, MODES), tl.float32), tl.zeros((POWERS, MODES), tl.float32)
    if channel < P:
        line = (T - 1 - row) * P + channel
        at, live = parts + line * double + mode[None, :], here & (row < T)
        for q in tl.static_range(Q):
            slope = tl.load(dkernel + q * T * P + line, mask=row < T, other=0.0)
            g_re += slope * tl.load(emit + q * double + mode, mask=inside, other=0.0)[None, :]
            g_im += slope * tl.load(emit + q * double + n + mode, mask=inside, other=0.0)[None, :]
    else:
        q, k = channel - P, tl.arange(0, WIDE)[:, None]
        at, live = parts + (P * T + (row - 1) * Q + q) * double + mode[None, :], here & (row >= 1) & (row <= T)
        slopes = tl.load(dkernel + q * T * P + k, mask=k < T * P, other=0.0)
        table, whole = collect_t + k * double + mode[None, :], here & (k < T * P)
        first_re = tl.sum(slopes * tl.load(table, mask=whole, other=0.0), 0)[None, :]
        first_im = tl.sum(slopes * tl.load(table + n, mask=whole, other=0.0), 0)[None, :]
        g_re, g_im = tl.where(row == 0, first_re, g_re), tl.where(row == 0, first_im, g_im)
    for part in tl.static_range(PARTS):
        share = at + part * ((P + Q) * T * double + Q * T * P * T)
        g_re += tl.load(share, mask=live, other=0.0)
        g_im += tl.load(share + n, mask=live, other=0.0)
    if channel < P:
        m_re = tl.load(B + mode * P + channel, mask=inside, other=0.0)
        m_im = tl.load(B + (n + mode) * P + channel, mask=inside, other=0.0)
        d_re, d_im = w_re * g_re + w_im * g_im, w_re * g_im - w_im * g_re
        tl.store(dB + mode * P + channel, tl.sum(d_re, 0), mask=inside)
        tl.store(dB + (n + mode) * P + channel, tl.sum(d_im, 0), mask=inside)
    else:
        q = channel - P
        m_re = tl.load(C + q * double + mode, mask=inside, other=0.0)
        m_im = tl.load(C + q * double + n + mode, mask=inside, other=0.0)
        # The table holds conjugates.
        d_re, d_im = w_re * g_re - w_im * g_im, -w_re * g_im - w_im * g_re
        tl.store(dC + q * double + mode, tl.sum(d_re, 0), mask=inside)
        tl.store(dC + q * double + n + mode, tl.sum(d_im, 0), mask=inside)
    j, to = row.to(tl.float32), sums + (others + channel) * double + mode
    tl.store(to, tl.sum(j * (d_re * m_re[None, :] + d_im * m_im[None, :]), 0), mask=inside)
    tl.store(to + n, tl.sum(j * (d_im * m_re[None, :] - d_re * m_im[None, :]), 0), mask=inside)


class ChunkedLayer(torch.autograd.Function):
    """y by products over chunks of T steps, from u of any float dtype, log λ, float32 B and C, and a state or None."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, logs: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> Tensor:
        state = None if state is None else state.contiguous()
        return ChunkedLayer.outputs(ctx, u, logs.contiguous(), B.contiguous(), C.transpose(0, 1).contiguous(), state)

    @staticmethod
    def outputs(ctx: Any, u: Tensor, logs: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> Tensor:
        """The outputs, for dense tensors: B as (2, n, p) and C as (q, 2, n), or flat as `system_of` gives them."""
        (batch, length, p), q, n, T, device = u.shape, C.shape[0], logs.shape[1], STEPS, u.device
        kinds = kinds_of(u, logs, state)
        plan = _chunked_plan(batch, cdiv(length, T), n, p, q, kinds, _precision(), device)
        tables = torch.empty(plan.tables_size, dtype=torch.float32, device=device)
        plan.tables(logs, B, C, tables)
        plan.toeplitz(tables)
        blocks = _in_chunks(u)
        before = torch.empty(len(blocks), 2 * n, dtype=torch.float32, device=device)
        plan.states(blocks, tables, logs, state, None, before, None, None)
        y = torch.empty(batch, len(blocks) // batch * T, q, dtype=u.dtype, device=device)
        plan.readout(blocks, before, tables, y)
        ctx.save_for_backward(blocks, logs, B, C, tables, before)
        ctx.plan, ctx.state, ctx.log_dtype = plan, kinds[2], logs.dtype
        return y if y.shape[1] == length else y[:, :length].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        du, sums, dB, dC, dstate = ChunkedLayer.gradients(ctx, grads[0])
        dlogs = column_sums(sums).view(2, -1).to(ctx.log_dtype)
        return du, dlogs, dB, dC.transpose(0, 1), None if dstate is None else dstate.to(ctx.state)

    @staticmethod
    def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The gradients in the shapes that `outputs` was given, but of log λ rows of (2, n) to be summed."""
        blocks, logs, B, C, tables, before = ctx.saved_tensors
        p, q, n, plan, device, length = B.shape[-1], C.shape[0], logs.shape[1], ctx.plan, B.device, dy.shape[1]
        dy, batch = _in_chunks(dy), len(dy)
        dstate = None if ctx.state is None else torch.empty(batch, 2, n, dtype=torch.float32, device=device)
        dends, sums = torch.empty_like(before), torch.empty(batch + p + q, 2 * n, dtype=torch.float32, device=device)
        plan.states_backward(dy, tables, logs, None, before, dends, dstate, sums)
        du = torch.empty(batch, len(blocks) // batch * STEPS, p, dtype=blocks.dtype, device=device)
        plan.drive(dy, dends, tables, du)
        parts = torch.empty(plan.parts_size, dtype=torch.float32, device=device)
        plan.outer(blocks, dy, before, dends, parts)
        plan.lags(parts)
        dB, dC = torch.empty_like(B), torch.empty_like(C)
        plan.tables_backward(logs, B, C, tables, parts, sums, dB, dC)
        return du if du.shape[1] == length else du[:, :length].contiguous(), sums, dB, dC, dstate


class _ChunkedPlan(NamedTuple):
    """The kernels of both passes, and the numbers in all tables and in all parts with what is behind them."""

    tables: Planned
    toeplitz: Planned
    states: Planned
    readout: Planned
    states_backward: Planned
    drive: Planned
    outer: Planned
    lags: Planned
    tables_backward: Planned
    tables_size: int
    parts_size: int


class _Places(NamedTuple):
    """Where tables begin in the memory of all: the responses inside of a chunk, λʲ B and C λʲ, each also transposed."""

    own: int
    own_t: int
    collect: int
    collect_t: int
    emit_t: int
    emit: int
    end: int


def _places(n: int, p: int, q: int) -> _Places:
    own, collect, emit = STEPS * STEPS * p * q, 2 * n * STEPS * p, 2 * n * STEPS * q
    return _Places(*accumulate((own, own, collect, collect, emit, emit + 2 * n * q), initial=0))


@plan_of
def _chunked_plan(
    batch: int, chunks: int, n: int, p: int, q: int, kinds: tuple[Any, ...], precision: str, device: torch.device
) -> _ChunkedPlan:
    """Plan both passes; `kinds` are the dtypes of u, log λ and state."""
    T, rows, double, places = STEPS, batch * chunks, 2 * n, _places(n, p, q)
    sizes, modes = {"T": T, "P": p, "Q": q}, 16 if n <= 16 else 32
    lines = max(16, min(_CHUNKS, next_power_of_2(chunks)))
    scanned: dict[str, Any] = {"ONE": chunks <= lines, "ROWS": lines, "MODES": modes, "PRECISION": precision}
    walk = (cdiv(n, modes), batch)
    limit = _REGISTERS.get(precision)
    states = partial(Planned, _states, walk, chunks, double, T=T, maxnreg=limit, **scanned, **_STATES)

    def joined(first: int, second: int, depth: int, columns: int) -> Planned:
        grid = (cdiv(rows, _JOINED["ROWS"]), cdiv(columns, _JOINED["COLS"]))
        options = {"WIDTH": depth, "COLUMNS": columns, "PRECISION": precision}
        return Planned(_joined_products, grid, rows, double, first, second, **options, **_JOINED)

    folded = {"POWERS": 2 * T, "WIDE": next_power_of_2(T * p), "PARTS": _PARTS, "MODES": _TABLE_MODES}
    # Both parts of 256 states in one round.
    rounds = min(512, max(128, next_power_of_2(double)))
    tile = _OUTER[n <= 32]
    across, down = cdiv(double, tile["COLS"]), [cdiv(T * count, tile["ROWS"]) for count in (p, q)]
    outer = (sum(down) * across + down[1] * cdiv(T * p, tile["COLS"]), _PARTS)
    return _ChunkedPlan(
        Planned(_tables, (cdiv(n, _TABLE_MODES), T + 1), n, MODES=_TABLE_MODES, num_warps=1, **sizes),
        Planned(_toeplitz, (T, q), double, CHANNELS=next_power_of_2(p), MODES=rounds, **sizes),
        states(places.collect, WIDTH=T * p, SIGN=1),
        joined(places.own, places.emit + q * double, T * p, T * q),
        states(places.emit_t, WIDTH=T * q, SIGN=-1),
        joined(places.own_t, places.collect_t, T * q, T * p),
        Planned(_outer, outer, rows, cdiv(rows, _PARTS), double, P=T * p, Q=T * q, PRECISION=precision, **tile),
        Planned(_lags, (cdiv(q * T * p, _LAGS),), double, PARTS=_PARTS, BLOCK=_LAGS, **sizes),
        Planned(_tables_backward, (cdiv(n, _TABLE_MODES), p + q), double, batch, **folded, **sizes),
        places.end,
        _PARTS * ((p + q) * T * double + q * T * p * T) + q * T * p,
    )


def _precision() -> str:
    """Products are as exact as torch's matmul precision asks."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _in_chunks(sequence: Tensor) -> Tensor:
    """Reshape to (batch · chunks, T · channels), with zeros that fill the last chunk."""
    missing = -sequence.shape[1] % STEPS
    whole = pad(sequence, (0, 0, 0, missing)) if missing else sequence.contiguous()
    return whole.view(-1, STEPS * sequence.shape[2])
