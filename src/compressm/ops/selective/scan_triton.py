"""The selective scan on the GPU: every program walks through time with tiles of channels × states in its registers.

A program has `TILES` tiles of BD channels and BN states each. Few states are tiles of four, all in one thread, with
channels as lanes; many states are one tile with states as lanes. If channels alone would not fill the GPU, time is cut
into segments: one kernel finds their ends from zero, another joins them, and every segment then starts with the state
that the earlier ones leave. One state in every `SPAN` steps is stored; the backward pass computes the others again and
keeps those of `T` steps in registers. Loads come before work that does not depend on them, `T` steps at a time forward
and one step ahead backward, so that little waits for memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compressm.ops.selective.tiles_triton import (
    add_heard,
    add_over_lanes,
    advance,
    decay,
    go_back,
    hand_out,
    imaginary,
    inner,
    keep,
    kept,
    matrix,
    numbers,
    places,
    program_place,
    rates,
    read,
    share_of_step,
    shared,
    slopes,
    softplus,
    times,
    weighted,
    write,
    zeros,
)


@triton.jit(do_not_specialize=["segments", "per_segment"])
def _ends(
    u, delta, bias, lengths, step, A, B, orders, ends, totals,
    length, channels, n, first, u_row, delta_row, B_row, segments, per_segment,
    BD: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr,
    OWN: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """Write the state at the end of each segment, started from zero, and Σ Δ over the segment.

    Given delta, steps are softplus(delta + bias), 0 after the end of a sequence, and are written for later kernels.
    """
    b, d = program_place(channels, BD)
    live, part = d < channels, tl.program_id(1)
    rate, freq = rates(A, orders, d, channels, n, first, TILES, BN, COMPLEX)
    u += b * length * u_row
    step += b * length * channels
    B += b * length * B_row
    end = length
    if lengths is not None:
        end = tl.minimum(end, tl.load(lengths + b).to(tl.int32))
    before = tl.zeros((BD,), tl.float32)
    if delta is not None:
        delta += b * length * delta_row
        if bias is not None:
            before = tl.load(bias + d, mask=live, other=0.0).to(tl.float32)
    h_re, h_im = zeros(BD, TILES, BN, True), zeros(BD, TILES, BN, COMPLEX)
    total = tl.zeros((BD,), tl.float32)
    for g in range(part * per_segment, (part + 1) * per_segment, T):
        for j in tl.static_range(T):
            now = live & (g + j < length)
            x = tl.load(u + (g + j) * u_row + d, mask=now, other=0.0).to(tl.float32)
            if delta is not None:
                raw = tl.load(delta + (g + j) * delta_row + d, mask=now, other=0.0).to(tl.float32)
                w = tl.where(live & (g + j < end), softplus(raw + before), 0.0)
                tl.store(step + (g + j) * channels + d, w, mask=now)
            else:
                w = tl.load(step + (g + j) * channels + d, mask=now, other=0.0)
            B_re, B_im = matrix(
                B, g + j, length, B_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX
            )  # fmt: skip
            h_re, h_im = advance(h_re, h_im, w, x, B_re, B_im, rate, freq, TILES, COMPLEX)
            total += w
    target = ends + (b * segments + part) * numbers(channels, TILES, BN, COMPLEX)
    keep(target, h_re, h_im, d, channels, TILES, BN, COMPLEX)
    tl.store(totals + (b * segments + part) * channels + d, total, mask=live)


@triton.jit(do_not_specialize=["segments", "per_segment"])
def _ends_back(
    step, A, C, dy, orders, ends, totals,
    length, channels, n, first, C_row, segments, per_segment,
    BD: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr,
    OWN: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """Write the gradient at the beginning of each segment but the first, if none enters at its end."""
    b, d = program_place(channels, BD)
    live, part = d < channels, tl.program_id(1) + 1
    rate, freq = rates(A, orders, d, channels, n, first, TILES, BN, COMPLEX)
    step += b * length * channels
    dy += b * length * channels
    C += b * length * C_row
    g_re, g_im = zeros(BD, TILES, BN, True), zeros(BD, TILES, BN, COMPLEX)
    total = tl.zeros((BD,), tl.float32)
    for i in range(0, per_segment, T):
        for j in tl.static_range(T):
            t = (part + 1) * per_segment - 1 - i - j
            w = tl.load(step + t * channels + d, mask=live & (t < length), other=0.0)
            given = tl.load(dy + t * channels + d, mask=live & (t < length), other=0.0).to(tl.float32)
            C_re, C_im = matrix(C, t, length, C_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX)
            g_re, g_im = add_heard(g_re, g_im, given, C_re, C_im, TILES, COMPLEX)
            g_re, g_im = go_back(g_re, g_im, w, rate, freq, TILES, COMPLEX)
            total += w
    target = ends + (b * segments + part) * numbers(channels, TILES, BN, COMPLEX)
    keep(target, g_re, g_im, d, channels, TILES, BN, COMPLEX)
    tl.store(totals + (b * segments + part) * channels + d, total, mask=live)


@triton.jit(do_not_specialize=["segments"])
def _join(
    A, orders, ends, totals, begin, starts,
    channels, n, first, segments,
    BD: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
    AHEAD: tl.constexpr, BACK: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """Write the start of every segment: all earlier ends, decayed; `BACK` goes from the last, with conjugate poles.

    `AHEAD` segments are read at once: one after the other, each would wait for memory.
    """
    b, d = program_place(channels, BD)
    rate, freq = rates(A, orders, d, channels, n, first, TILES, BN, COMPLEX)
    size = numbers(channels, TILES, BN, COMPLEX)
    h_re, h_im = zeros(BD, TILES, BN, True), zeros(BD, TILES, BN, COMPLEX)
    if begin is not None:
        own = begin + b * channels * n * (2 if COMPLEX else 1)
        h_re, h_im = read(own, orders, d, channels, n, first, TILES, BN, COMPLEX)
    for i in range(0, segments, AHEAD):
        ws, parts = (), ()
        for j in tl.static_range(AHEAD):
            s = tl.minimum(i + j, segments - 1)
            place = b * segments + (segments - 1 - s if BACK else s)
            ws = ws + (tl.load(totals + place * channels + d, mask=d < channels, other=0.0),)
            parts = parts + (kept(ends + place * size, d, channels, TILES, BN, COMPLEX),)
        for j in tl.static_range(AHEAD):
            if i + j < segments:
                place = b * segments + (segments - 1 - i - j if BACK else i + j)
                keep(starts + place * size, h_re, h_im, d, channels, TILES, BN, COMPLEX)
            new_re, new_im = (), ()
            for q in tl.static_range(TILES):
                a_re, a_im = decay(ws[j], rate[q], imaginary(freq, q, COMPLEX), COMPLEX)
                re, im = times(a_re, -a_im if BACK else a_im, h_re[q], imaginary(h_im, q, COMPLEX), COMPLEX)
                new_re = new_re + (re + parts[j][0][q],)
                if COMPLEX:
                    new_im = new_im + (im + parts[j][1][q],)
            h_re, h_im = new_re, new_im


@triton.jit(do_not_specialize=["segments", "per_segment"])
def _scan(
    u, step, A, B, C, D, orders, starts, y, marks, last,
    length, channels, n, first, u_row, B_row, C_row, segments, per_segment,
    BD: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr,
    OWN: tl.constexpr, COMPLEX: tl.constexpr, ADD: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """Write y of one segment; `ADD` adds it to what earlier blocks of states wrote."""
    b, d = program_place(channels, BD)
    live, part = d < channels, tl.program_id(1)
    if orders is not None:
        if ADD:
            if tl.max(tl.load(orders + d, mask=live, other=0)) <= first:
                return
    rate, freq = rates(A, orders, d, channels, n, first, TILES, BN, COMPLEX)
    size, kept_size = (2 if COMPLEX else 1) * channels * n, numbers(channels, TILES, BN, COMPLEX)
    u += b * length * u_row
    step += b * length * channels
    y += b * length * channels
    B += b * length * B_row
    C += b * length * C_row
    h_re, h_im = zeros(BD, TILES, BN, True), zeros(BD, TILES, BN, COMPLEX)
    if starts is not None:
        if JOINED:
            h_re, h_im = kept(starts + (b * segments + part) * kept_size, d, channels, TILES, BN, COMPLEX)
        else:
            h_re, h_im = read(starts + b * size, orders, d, channels, n, first, TILES, BN, COMPLEX)
    skip = tl.zeros((BD,), tl.float32)
    if D is not None:
        if not ADD:
            skip = tl.load(D + d, mask=live, other=0.0).to(tl.float32)
    for s in range(part * per_segment, tl.minimum((part + 1) * per_segment, length), SPAN):
        if marks is not None:
            mark = marks + (b * tl.cdiv(length, SPAN) + s // SPAN) * kept_size
            keep(mark, h_re, h_im, d, channels, TILES, BN, COMPLEX)
        for g in range(s, s + SPAN, T):
            xs, ws, Bs, Cs = (), (), (), ()
            for j in tl.static_range(T):
                t = g + j
                xs = xs + (tl.load(u + t * u_row + d, mask=live & (t < length), other=0.0).to(tl.float32),)
                ws = ws + (tl.load(step + t * channels + d, mask=live & (t < length), other=0.0),)
                Bs = Bs + (matrix(B, t, length, B_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX),)
                Cs = Cs + (matrix(C, t, length, C_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX),)
            outs = ()
            for j in tl.static_range(T):
                h_re, h_im = advance(h_re, h_im, ws[j], xs[j], Bs[j][0], Bs[j][1], rate, freq, TILES, COMPLEX)
                outs = outs + (inner(h_re, h_im, Cs[j][0], Cs[j][1], -1, TILES, COMPLEX) + skip * xs[j],)
            for j in tl.static_range(T):
                at = y + (g + j) * channels + d
                out = outs[j]
                if ADD:
                    out += tl.load(at, mask=live & (g + j < length), other=0.0).to(tl.float32)
                tl.store(at, out.to(y.dtype.element_ty), mask=live & (g + j < length))
    if last is not None:
        if part == segments - 1:
            write(last + b * size, h_re, h_im, orders, d, channels, n, first, TILES, BN, COMPLEX)


@triton.jit
def _at_step(
    u, step, dy, B, C, t, length, u_row, B_row, C_row, orders, d, channels, n, first,
    TILES: tl.constexpr, BN: tl.constexpr, OWN: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """Load the input, step size, gradient of the output, B and C of a step."""
    here = (d < channels) & (t < length)
    x = tl.load(u + t * u_row + d, mask=here, other=0.0).to(tl.float32)
    w = tl.load(step + t * channels + d, mask=here, other=0.0)
    given = tl.load(dy + t * channels + d, mask=here, other=0.0).to(tl.float32)
    B_re, B_im = matrix(B, t, length, B_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX)
    C_re, C_im = matrix(C, t, length, C_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX)
    return x, w, given, B_re, B_im, C_re, C_im


@triton.jit(do_not_specialize=["segments", "per_segment"])
def _scan_back(
    u, step, A, B, C, D, orders, dy, marks, starts, scratch, du, ddelta, dbias, dA, dB, dC, dD, dstate,
    length, channels, n, first, u_row, B_row, C_row, sum_row, apart, segments, per_segment,
    BD: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr,
    OWN: tl.constexpr, COMPLEX: tl.constexpr, SOFT: tl.constexpr, ADD: tl.constexpr,
    JOINED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """All gradients of one segment: dA and dD as its sums, dB and dC added up over programs; `ADD` is as in `_scan`."""
    b, d = program_place(channels, BD)
    live, part = d < channels, tl.program_id(1)
    if orders is not None:
        if ADD:
            if tl.max(tl.load(orders + d, mask=live, other=0)) <= first:
                return
    rate, freq = rates(A, orders, d, channels, n, first, TILES, BN, COMPLEX)
    pair: tl.constexpr = 2 if COMPLEX else 1
    size, kept_size = pair * channels * n, numbers(channels, TILES, BN, COMPLEX)
    u += b * length * u_row
    step += b * length * channels
    dy += b * length * channels
    du += b * length * channels
    ddelta += b * length * channels
    B += b * length * B_row
    C += b * length * C_row
    dB += b * length * sum_row
    dC += b * length * sum_row
    GROUPS: tl.constexpr = SPAN // T
    KEPT: tl.constexpr = TILES * BN * BD * pair
    scratch += (tl.program_id(0).to(tl.int64) * segments + part) * (GROUPS * KEPT)
    inside = tl.arange(0, BD)
    g_re, g_im = zeros(BD, TILES, BN, True), zeros(BD, TILES, BN, COMPLEX)
    if starts is not None:
        if JOINED:
            g_re, g_im = kept(starts + (b * segments + part) * kept_size, d, channels, TILES, BN, COMPLEX)
        else:
            g_re, g_im = read(starts + b * size, orders, d, channels, n, first, TILES, BN, COMPLEX)
    A_re, A_im = zeros(BD, TILES, BN, True), zeros(BD, TILES, BN, COMPLEX)
    skip, skipped, moved = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    if D is not None:
        if not ADD:
            skip = tl.load(D + d, mask=live, other=0.0).to(tl.float32)
    spans = tl.cdiv(tl.minimum((part + 1) * per_segment, length) - part * per_segment, SPAN)
    for i in range(0, spans):
        s = part * per_segment + (spans - 1 - i) * SPAN
        mark = marks + (b * tl.cdiv(length, SPAN) + s // SPAN) * kept_size
        h_re, h_im = kept(mark, d, channels, TILES, BN, COMPLEX)
        for r in range(0, GROUPS - 1):
            if GROUPS > 2:
                keep(scratch + r * KEPT, h_re, h_im, inside, BD, TILES, BN, COMPLEX)
            for j in tl.static_range(T):
                t = s + r * T + j
                x = tl.load(u + t * u_row + d, mask=live & (t < length), other=0.0).to(tl.float32)
                w = tl.load(step + t * channels + d, mask=live & (t < length), other=0.0)
                B_re, B_im = matrix(B, t, length, B_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX)
                h_re, h_im = advance(h_re, h_im, w, x, B_re, B_im, rate, freq, TILES, COMPLEX)
        for r in range(0, GROUPS):
            begin = s + (GROUPS - 1 - r) * T
            if GROUPS > 2:
                if r > 0:
                    h_re, h_im = kept(scratch + (GROUPS - 1 - r) * KEPT, inside, BD, TILES, BN, COMPLEX)
            elif GROUPS == 2:
                if r > 0:
                    h_re, h_im = kept(mark, d, channels, TILES, BN, COMPLEX)
            hs = ((h_re, h_im),)
            for j in tl.static_range(T):
                t = begin + j
                x = tl.load(u + t * u_row + d, mask=live & (t < length), other=0.0).to(tl.float32)
                w = tl.load(step + t * channels + d, mask=live & (t < length), other=0.0)
                B_re, B_im = matrix(B, t, length, B_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX)
                h_re, h_im = advance(h_re, h_im, w, x, B_re, B_im, rate, freq, TILES, COMPLEX)
                hs = hs + ((h_re, h_im),)
            du_s, ddelta_s, dB_s, dC_s = (), (), (), ()
            parts, where, whether = (), (), ()
            coming = _at_step(
                u, step, dy, B, C, begin + T - 1, length, u_row, B_row, C_row,
                orders, d, channels, n, first, TILES, BN, OWN, COMPLEX,
            )  # fmt: skip
            for j in tl.static_range(T - 1, -1, -1):
                x, w, given, B_re, B_im, C_re, C_im = coming
                if j > 0:
                    coming = _at_step(
                        u, step, dy, B, C, begin + j - 1, length, u_row, B_row, C_row,
                        orders, d, channels, n, first, TILES, BN, OWN, COMPLEX,
                    )  # fmt: skip
                g_re, g_im = add_heard(g_re, g_im, given, C_re, C_im, TILES, COMPLEX)
                into = inner(g_re, g_im, B_re, B_im, 1, TILES, COMPLEX)
                if LANES:
                    B_at, there = places(apart * 0, begin + j, length, sum_row, first, TILES, BN)
                    C_at, _ = places(apart, begin + j, length, sum_row, first, TILES, BN)
                    parts = parts + weighted(g_re, w * x, TILES, BD, BN)
                    parts = parts + weighted(hs[j + 1][0], given, TILES, BD, BN)
                    where, whether = where + B_at + C_at, whether + there + there
                    if j % 2 == 0:
                        add_over_lanes(dB, parts, where, whether, BN)
                        parts, where, whether = (), (), ()
                else:
                    dB_s = dB_s + (shared(g_re, g_im, w * x, 1.0, TILES, OWN, COMPLEX),)
                    dC_s = dC_s + (shared(hs[j + 1][0], hs[j + 1][1], given, -1.0, TILES, OWN, COMPLEX),)
                g_re, g_im = go_back(g_re, g_im, w, rate, freq, TILES, COMPLEX)
                turned, A_re, A_im = slopes(
                    g_re, g_im, hs[j][0], hs[j][1], w, rate, freq, A_re, A_im, TILES, COMPLEX
                )  # fmt: skip
                skipped += given * x
                slope = x * into + turned
                if SOFT:
                    slope *= share_of_step(w)
                    moved += slope
                du_s, ddelta_s = du_s + (w * into + skip * given,), ddelta_s + (slope,)
            for i_j in tl.static_range(T):
                t = begin + T - 1 - i_j
                du_t, ddelta_t = du_s[i_j], ddelta_s[i_j]
                at = t * channels + d
                if ADD:
                    du_t += tl.load(du + at, mask=live & (t < length), other=0.0).to(tl.float32)
                    ddelta_t += tl.load(ddelta + at, mask=live & (t < length), other=0.0).to(tl.float32)
                tl.store(du + at, du_t.to(du.dtype.element_ty), mask=live & (t < length))
                tl.store(ddelta + at, ddelta_t.to(ddelta.dtype.element_ty), mask=live & (t < length))
                if not LANES:
                    hand_out(
                        dB, dB_s[i_j], t, length, sum_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX
                    )  # fmt: skip
                    hand_out(
                        dC, dC_s[i_j], t, length, sum_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX
                    )  # fmt: skip
    place = b * segments + part
    write(dA + place * size, A_re, A_im, orders, d, channels, n, first, TILES, BN, COMPLEX)
    if dD is not None:
        if not ADD:
            tl.store(dD + place * channels + d, skipped, mask=live)
    if dbias is not None:
        tl.store(dbias + place * channels + d, moved, mask=live)
    if dstate is not None:
        if part == 0:
            write(dstate + b * size, g_re, g_im, orders, d, channels, n, first, TILES, BN, COMPLEX)
