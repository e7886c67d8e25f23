"""The selective scan on the GPU: every program walks through time with tiles of channels × states in its registers.

A program has `TILES` tiles of BD channels and BN states each. Few states are tiles of four, all in one thread, with
channels as lanes; many states are one tile with states as lanes. If channels alone would not fill the GPU, time is cut
into segments: one kernel finds their ends from zero, another joins them, and every segment then starts with the state
that the earlier ones leave. One state in every `SPAN` steps is stored; the backward pass computes the others again and
keeps those of `T` steps in registers. Loads come before work that does not depend on them, `T` steps at a time forward
and one step ahead backward, so that little waits for memory.

One tuple holds the real parts of all tiles, another the imaginary parts; the latter is empty if the system is real.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compressm.ops.launching_triton import launched

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def decay(w, rate, freq, COMPLEX: tl.constexpr):
    """exp(Δ a) as (Re, Im); rates come in units of log 2."""
    size = tl.exp2(w[:, None] * rate)
    if COMPLEX:
        turn = w[:, None] * freq
        return size * tl.cos(turn), size * tl.sin(turn)
    else:
        return size, 0.0


@triton.jit
def times(a_re, a_im, h_re, h_im, COMPLEX: tl.constexpr):
    """The product a h as (Re, Im)."""
    if COMPLEX:
        return a_re * h_re - a_im * h_im, a_re * h_im + a_im * h_re
    else:
        return a_re * h_re, 0.0


@triton.jit
def imaginary(parts, q: tl.constexpr, COMPLEX: tl.constexpr):
    """The imaginary part of tile q; 0 for real systems."""
    if COMPLEX:
        return parts[q]
    else:
        return 0.0


@triton.jit
def program_place(channels, BD: tl.constexpr):
    """The sequence and the channels of this program."""
    blocks = tl.cdiv(channels, BD)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    return b, (tl.program_id(0) % blocks) * BD + tl.arange(0, BD)


@triton.jit
def softplus(x):
    """log(1 + exp x); the polynomial is log(1 + e) / e for e in [0, 1], to 2e-8."""
    e = tl.exp(-tl.abs(x))
    p = -0.0289919564 + e * 0.0051058258
    p = 0.190713096 + e * (-0.135906002 + e * (0.0773807384 + e * p))
    p = 0.999999965 + e * (-0.499994357 + e * (0.333179343 + e * (-0.248339455 + e * p)))
    return tl.maximum(x, 0.0) + e * p


@triton.jit
def share_of_step(w):
    """The slope of softplus where its value is w: 1 − exp(−w), by its series where the difference would cancel."""
    series = w * (1.0 - w * (0.5 - w * (0.16666667 - w * 0.041666668)))
    return tl.where(w < 0.06, series, 1.0 - tl.exp(-w))


@triton.jit
def states_of(orders, d, channels, n, first, q: tl.constexpr, BN: tl.constexpr):
    """The states of a tile, and a mask of the states that each channel has."""
    k = first + q * BN + tl.arange(0, BN)
    there = (k < n)[None, :] & (d < channels)[:, None]
    if orders is not None:
        there = there & (k[None, :] < tl.load(orders + d, mask=d < channels, other=0)[:, None])
    return k, there


@triton.jit
def read(
    source, orders, d, channels, n, first, TILES: tl.constexpr, BN: tl.constexpr, COMPLEX: tl.constexpr
):  # fmt: skip
    """Load all tiles of a tensor ([2,] channels, n)."""
    re, im = (), ()
    for q in tl.static_range(TILES):
        k, there = states_of(orders, d, channels, n, first, q, BN)
        at = source + d[:, None] * n + k[None, :]
        re = re + (tl.load(at, mask=there, other=0.0),)
        if COMPLEX:
            im = im + (tl.load(at + channels * n, mask=there, other=0.0),)
    return re, im


@triton.jit
def write(
    target, re, im, orders, d, channels, n, first, TILES: tl.constexpr, BN: tl.constexpr, COMPLEX: tl.constexpr
):  # fmt: skip
    """Store all tiles of a tensor ([2,] channels, n)."""
    for q in tl.static_range(TILES):
        k, there = states_of(orders, d, channels, n, first, q, BN)
        at = target + d[:, None] * n + k[None, :]
        tl.store(at, re[q], mask=there)
        if COMPLEX:
            tl.store(at + channels * n, im[q], mask=there)


@triton.jit
def rates(A, orders, d, channels, n, first, TILES: tl.constexpr, BN: tl.constexpr, COMPLEX: tl.constexpr):
    """Re a in units of log 2, and Im a."""
    re, freq = read(A, orders, d, channels, n, first, TILES, BN, COMPLEX)
    rate = ()
    for q in tl.static_range(TILES):
        rate = rate + (re[q] * _LOG2E,)
    return rate, freq


@triton.jit
def zeros(BD: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, THERE: tl.constexpr):
    """Tiles of zeros; no tiles without THERE."""
    tiles = ()
    if THERE:
        for _ in tl.static_range(TILES):
            tiles = tiles + (tl.zeros((BD, BN), tl.float32),)
    return tiles


@triton.jit
def matrix_at(M, t, row, d, k, n, OWN: tl.constexpr, COMPLEX: tl.constexpr):
    """Pointers to B or C of a step: one row for all channels, or a row a channel."""
    if OWN:
        return M + t * row + d[:, None] * (n * (2 if COMPLEX else 1)) + k[None, :]
    else:
        return M + t * row + k[None, :]


@triton.jit
def matrix(
    M, t, length, row, orders, d, channels, n, first,
    TILES: tl.constexpr, BN: tl.constexpr, OWN: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """Load all tiles of B or C of a step; 0 where a channel has no such state."""
    re, im = (), ()
    for q in tl.static_range(TILES):
        k, there = states_of(orders, d, channels, n, first, q, BN)
        # Rows that all channels share are as long as all tiles: only steps after the end are masked.
        some = (there if OWN else (k >= 0)[None, :]) & (t < length)
        at = matrix_at(M, t, row, d, k, n, OWN, COMPLEX)
        part = tl.load(at, mask=some, other=0.0).to(tl.float32)
        if orders is not None:
            part = tl.where(there, part, 0.0)
        re = re + (part,)
        if COMPLEX:
            part = tl.load(at + (n if OWN else row // 2), mask=some, other=0.0).to(tl.float32)
            if orders is not None:
                part = tl.where(there, part, 0.0)
            im = im + (part,)
    return re, im


@triton.jit
def advance(h_re, h_im, w, x, B_re, B_im, rate, freq, TILES: tl.constexpr, COMPLEX: tl.constexpr):
    """Advance the states by a step: exp(Δ a) h + Δ x B."""
    new_re, new_im = (), ()
    drive = (w * x)[:, None]
    for q in tl.static_range(TILES):
        a_re, a_im = decay(w, rate[q], imaginary(freq, q, COMPLEX), COMPLEX)
        re, im = times(a_re, a_im, h_re[q], imaginary(h_im, q, COMPLEX), COMPLEX)
        new_re = new_re + (re + drive * B_re[q],)
        if COMPLEX:
            new_im = new_im + (im + drive * B_im[q],)
    return new_re, new_im


@triton.jit
def add_heard(g_re, g_im, given, C_re, C_im, TILES: tl.constexpr, COMPLEX: tl.constexpr):
    """Add the gradient of the output: g + dy C̄."""
    new_re, new_im = (), ()
    for q in tl.static_range(TILES):
        new_re = new_re + (g_re[q] + given[:, None] * C_re[q],)
        if COMPLEX:
            new_im = new_im + (g_im[q] - given[:, None] * C_im[q],)
    return new_re, new_im


@triton.jit
def go_back(g_re, g_im, w, rate, freq, TILES: tl.constexpr, COMPLEX: tl.constexpr):
    """Take the gradient of states one step back: exp(Δ ā) g."""
    new_re, new_im = (), ()
    for q in tl.static_range(TILES):
        a_re, a_im = decay(w, rate[q], imaginary(freq, q, COMPLEX), COMPLEX)
        re, im = times(a_re, -a_im, g_re[q], imaginary(g_im, q, COMPLEX), COMPLEX)
        new_re = new_re + (re,)
        if COMPLEX:
            new_im = new_im + (im,)
    return new_re, new_im


@triton.jit
def inner(a_re, a_im, b_re, b_im, SIGN: tl.constexpr, TILES: tl.constexpr, COMPLEX: tl.constexpr):
    """Σ over states of Re a Re b + SIGN Im a Im b."""
    total = a_re[0] * b_re[0]
    for q in tl.static_range(1, TILES):
        total += a_re[q] * b_re[q]
    if COMPLEX:
        for q in tl.static_range(TILES):
            total += SIGN * a_im[q] * b_im[q]
    return tl.sum(total, 1)


@triton.jit
def numbers(channels, TILES: tl.constexpr, BN: tl.constexpr, COMPLEX: tl.constexpr):
    """The count of numbers that `keep` writes for all channels."""
    return (2 if COMPLEX else 1) * TILES * BN * channels


@triton.jit
def keep(target, re, im, d, channels, TILES: tl.constexpr, BN: tl.constexpr, COMPLEX: tl.constexpr):
    """Store whole tiles, with the states of a channel side by side: ([2,] TILES, channels, BN)."""
    inside = d[:, None] * BN + tl.arange(0, BN)[None, :]
    live = (d < channels)[:, None]
    for q in tl.static_range(TILES):
        tl.store(target + q * channels * BN + inside, re[q], mask=live)
        if COMPLEX:
            tl.store(target + (TILES + q) * channels * BN + inside, im[q], mask=live)


@triton.jit
def kept(source, d, channels, TILES: tl.constexpr, BN: tl.constexpr, COMPLEX: tl.constexpr):
    """Load the tiles that `keep` stored."""
    inside = d[:, None] * BN + tl.arange(0, BN)[None, :]
    live = (d < channels)[:, None]
    re, im = (), ()
    for q in tl.static_range(TILES):
        re = re + (tl.load(source + q * channels * BN + inside, mask=live, other=0.0),)
        if COMPLEX:
            im = im + (tl.load(source + (TILES + q) * channels * BN + inside, mask=live, other=0.0),)
    return re, im


@triton.jit
def shared(v_re, v_im, weight, sign, TILES: tl.constexpr, OWN: tl.constexpr, COMPLEX: tl.constexpr):
    """weight v, summed over the program's channels unless B and C are OWN; Im times `sign`."""
    re, im = (), ()
    for q in tl.static_range(TILES):
        part = weight[:, None] * v_re[q]
        re = re + (part if OWN else tl.sum(part, 0)[None, :],)
        if COMPLEX:
            part = weight[:, None] * v_im[q] * sign
            im = im + (part if OWN else tl.sum(part, 0)[None, :],)
    return re, im


@triton.jit
def hand_out(
    target, parts, t, length, row, orders, d, channels, n, first,
    TILES: tl.constexpr, BN: tl.constexpr, OWN: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """Store a channel's OWN gradients of B or C of a step, or add shared ones to those of other programs."""
    for q in tl.static_range(TILES):
        k, there = states_of(orders, d, channels, n, first, q, BN)
        at = matrix_at(target, t, row, d, k, n, OWN, COMPLEX)
        if OWN:
            tl.store(at, parts[0][q].to(target.dtype.element_ty), mask=there & (t < length))
            if COMPLEX:
                tl.store(at + n, parts[1][q].to(target.dtype.element_ty), mask=there & (t < length))
        else:
            seen = (k < n)[None, :] & (t < length)
            tl.atomic_add(at, parts[0][q], mask=seen, sem="relaxed")
            if COMPLEX:
                tl.atomic_add(at + n, parts[1][q], mask=seen, sem="relaxed")


@triton.jit
def slopes(g_re, g_im, h_re, h_im, w, rate, freq, A_re, A_im, TILES: tl.constexpr, COMPLEX: tl.constexpr):
    """The part of dΔ that goes through the decay, and the sums for dA, from ā g and h[t−1]."""
    new_re, new_im = (), ()
    for q in tl.static_range(TILES):
        slope = g_re[q] * h_re[q]
        if COMPLEX:
            slope += g_im[q] * h_im[q]
            across = g_im[q] * h_re[q] - g_re[q] * h_im[q]
            new_im = new_im + (A_im[q] + w[:, None] * across,)
            felt = slope * rate[q] * _LN2 + across * freq[q]
        else:
            felt = slope * rate[q]
        new_re = new_re + (A_re[q] + w[:, None] * slope,)
        if q == 0:
            total = felt
        else:
            total += felt
    turned = tl.sum(total, 1)
    if not COMPLEX:
        turned *= _LN2
    return turned, new_re, new_im


@triton.jit
def weighted(v, weight, TILES: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
    """weight v, summed over the channels in the same lane of 32."""
    parts = ()
    for q in tl.static_range(TILES):
        part = weight[:, None] * v[q]
        if BD > 32:
            part = tl.sum(tl.reshape(part, (BD // 32, 32, BN)), 0)
        parts = parts + (part,)
    return parts


@triton.jit
def places(begin, t, length, row, first, TILES: tl.constexpr, BN: tl.constexpr):
    """Offsets of the sums of a step, and a mask of steps inside the sequence: the same in all 32 lanes."""
    at, there = (), ()
    lane = tl.arange(0, 32)
    for q in tl.static_range(TILES):
        at = at + (begin + t * row + first + q * BN + lane * 0,)
        there = there + ((lane >= 0) & (t < length),)
    return at, there


@triton.jit
def add_over_lanes(target, parts, at, there, BN: tl.constexpr):
    """Add the sum of each part over all 32 lanes to memory at its place.

    Parts exchange halves in pairs: the lower lanes continue with the sum of one, the upper lanes with the sum of the
    other, so that twelve parts take 13 exchanges instead of 60.
    """
    lane = tl.arange(0, 32)
    for stage in tl.static_range(5):
        upper = (lane & (16 >> stage)) != 0
        partner = tl.broadcast_to((lane ^ (16 >> stage))[:, None], (32, BN))
        new, new_at, new_there = (), (), ()
        for i in tl.static_range(len(parts) // 2):
            one, other = parts[2 * i], parts[2 * i + 1]
            sent = tl.where(upper[:, None], one, other)
            new = new + (tl.where(upper[:, None], other, one) + tl.gather(sent, partner, 0),)
            new_at = new_at + (tl.where(upper, at[2 * i + 1], at[2 * i]),)
            new_there = new_there + (tl.where(upper, there[2 * i + 1], there[2 * i]),)
        if len(parts) % 2 == 1:
            alone = parts[len(parts) - 1]
            new = new + (alone + tl.gather(alone, partner, 0),)
            new_at = new_at + (at[len(parts) - 1],)
            new_there = new_there + (there[len(parts) - 1] & ~upper,)
        parts, at, there = new, new_at, new_there
    k = tl.arange(0, BN)[None, :]
    for i in tl.static_range(len(parts)):
        tl.atomic_add(target + at[i][:, None] + k, parts[i], mask=there[i][:, None], sem="relaxed")


@launched
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


@launched
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


@launched
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


@launched
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


@launched
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
