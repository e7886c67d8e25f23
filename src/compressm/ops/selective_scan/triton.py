"""The selective scan on the GPU: every program walks through time with tiles of channels × states in its registers.

A program has `TILES` tiles of BD channels and BN states each. Few states are tiles of four, all in one thread, whose
lanes are channels; many are one tile whose lanes are states. Time is cut into segments where channels alone would not
fill the GPU: their ends are found from zero first, joined, and every segment begins with what was left by those before.
Of the states one in every `SPAN` steps is stored; the backward pass computes the others again, and keeps those of `T`
steps in registers. All loads of `T` steps stand before what depends on them and all stores behind it, so that nothing
in between waits for memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _decay(w, rate, freq, COMPLEX: tl.constexpr):
    """exp(Δ a) as (Re, Im); rates come in units of log 2."""
    size = tl.exp2(w[:, None] * rate)
    if COMPLEX:
        turn = w[:, None] * freq
        return size * tl.cos(turn), size * tl.sin(turn)
    else:
        return size, 0.0


@triton.jit
def _times(a_re, a_im, h_re, h_im, COMPLEX: tl.constexpr):
    if COMPLEX:
        return a_re * h_re - a_im * h_im, a_re * h_im + a_im * h_re
    else:
        return a_re * h_re, 0.0


@triton.jit
def _part(parts, q: tl.constexpr, COMPLEX: tl.constexpr):
    """Imaginary parts, of which real systems have none."""
    if COMPLEX:
        return parts[q]
    else:
        return 0.0


@triton.jit
def _place(channels, BD: tl.constexpr):
    """The sequence and the channels of this program."""
    blocks = tl.cdiv(channels, BD)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    return b, (tl.program_id(0) % blocks) * BD + tl.arange(0, BD)


@triton.jit
def _there(orders, d, channels, n, first, q: tl.constexpr, BN: tl.constexpr):
    """The states of a tile, and which of them each channel has."""
    k = first + q * BN + tl.arange(0, BN)
    there = (k < n)[None, :] & (d < channels)[:, None]
    if orders is not None:
        there = there & (k[None, :] < tl.load(orders + d, mask=d < channels, other=0)[:, None])
    return k, there


@triton.jit
def _read(
    source, orders, d, channels, n, first, TILES: tl.constexpr, BN: tl.constexpr, COMPLEX: tl.constexpr
):  # fmt: skip
    """All tiles of a tensor ([2,] channels, n)."""
    re, im = (), ()
    for q in tl.static_range(TILES):
        k, there = _there(orders, d, channels, n, first, q, BN)
        at = source + d[:, None] * n + k[None, :]
        re = re + (tl.load(at, mask=there, other=0.0),)
        if COMPLEX:
            im = im + (tl.load(at + channels * n, mask=there, other=0.0),)
    return re, im


@triton.jit
def _write(
    target, re, im, orders, d, channels, n, first, TILES: tl.constexpr, BN: tl.constexpr, COMPLEX: tl.constexpr
):  # fmt: skip
    for q in tl.static_range(TILES):
        k, there = _there(orders, d, channels, n, first, q, BN)
        at = target + d[:, None] * n + k[None, :]
        tl.store(at, re[q], mask=there)
        if COMPLEX:
            tl.store(at + channels * n, im[q], mask=there)


@triton.jit
def _rates(A, orders, d, channels, n, first, TILES: tl.constexpr, BN: tl.constexpr, COMPLEX: tl.constexpr):
    re, freq = _read(A, orders, d, channels, n, first, TILES, BN, COMPLEX)
    rate = ()
    for q in tl.static_range(TILES):
        rate = rate + (re[q] * _LOG2E,)
    return rate, freq


@triton.jit
def _zeros(BD: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, THERE: tl.constexpr):
    tiles = ()
    if THERE:
        for _ in tl.static_range(TILES):
            tiles = tiles + (tl.zeros((BD, BN), tl.float32),)
    return tiles


@triton.jit
def _matrix_at(M, t, row, d, k, n, OWN: tl.constexpr, COMPLEX: tl.constexpr):
    """Where B or C of a step lies: one row for all channels, or a row a channel."""
    if OWN:
        return M + t * row + d[:, None] * (n * (2 if COMPLEX else 1)) + k[None, :]
    else:
        return M + t * row + k[None, :]


@triton.jit
def _matrix(
    M, t, length, row, orders, d, channels, n, first,
    TILES: tl.constexpr, BN: tl.constexpr, OWN: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """All tiles of B or C of a step; 0 where a channel has no such state."""
    re, im = (), ()
    for q in tl.static_range(TILES):
        k, there = _there(orders, d, channels, n, first, q, BN)
        some = (there if OWN else (k < n)[None, :]) & (t < length)
        at = _matrix_at(M, t, row, d, k, n, OWN, COMPLEX)
        part = tl.load(at, mask=some, other=0.0).to(tl.float32)
        if orders is not None:
            part = tl.where(there, part, 0.0)
        re = re + (part,)
        if COMPLEX:
            part = tl.load(at + n, mask=some, other=0.0).to(tl.float32)
            if orders is not None:
                part = tl.where(there, part, 0.0)
            im = im + (part,)
    return re, im


@triton.jit
def _advance(h_re, h_im, w, x, B_re, B_im, rate, freq, TILES: tl.constexpr, COMPLEX: tl.constexpr):
    """exp(Δ a) h + Δ x B."""
    new_re, new_im = (), ()
    drive = (w * x)[:, None]
    for q in tl.static_range(TILES):
        a_re, a_im = _decay(w, rate[q], _part(freq, q, COMPLEX), COMPLEX)
        re, im = _times(a_re, a_im, h_re[q], _part(h_im, q, COMPLEX), COMPLEX)
        new_re = new_re + (re + drive * B_re[q],)
        if COMPLEX:
            new_im = new_im + (im + drive * B_im[q],)
    return new_re, new_im


@triton.jit
def _add_heard(g_re, g_im, given, C_re, C_im, TILES: tl.constexpr, COMPLEX: tl.constexpr):
    """g + dy C̄."""
    new_re, new_im = (), ()
    for q in tl.static_range(TILES):
        new_re = new_re + (g_re[q] + given[:, None] * C_re[q],)
        if COMPLEX:
            new_im = new_im + (g_im[q] - given[:, None] * C_im[q],)
    return new_re, new_im


@triton.jit
def _go_back(g_re, g_im, w, rate, freq, TILES: tl.constexpr, COMPLEX: tl.constexpr):
    """exp(Δ ā) g."""
    new_re, new_im = (), ()
    for q in tl.static_range(TILES):
        a_re, a_im = _decay(w, rate[q], _part(freq, q, COMPLEX), COMPLEX)
        re, im = _times(a_re, -a_im, g_re[q], _part(g_im, q, COMPLEX), COMPLEX)
        new_re = new_re + (re,)
        if COMPLEX:
            new_im = new_im + (im,)
    return new_re, new_im


@triton.jit
def _inner(a_re, a_im, b_re, b_im, SIGN: tl.constexpr, TILES: tl.constexpr, COMPLEX: tl.constexpr):
    """Σ over states of Re a Re b + SIGN Im a Im b."""
    total = a_re[0] * b_re[0]
    for q in tl.static_range(1, TILES):
        total += a_re[q] * b_re[q]
    if COMPLEX:
        for q in tl.static_range(TILES):
            total += SIGN * a_im[q] * b_im[q]
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=["segments", "per_segment"])
def _ends(
    u, step, A, B, orders, ends, totals,
    length, channels, n, first, u_row, B_row, segments, per_segment,
    BD: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr,
    OWN: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """The state at the end of each segment but the last, if it began with zero, and Σ Δ over the segment."""
    b, d = _place(channels, BD)
    live, part = d < channels, tl.program_id(1)
    rate, freq = _rates(A, orders, d, channels, n, first, TILES, BN, COMPLEX)
    u += b * length * u_row
    step += b * length * channels
    B += b * length * B_row
    h_re, h_im = _zeros(BD, TILES, BN, True), _zeros(BD, TILES, BN, COMPLEX)
    total = tl.zeros((BD,), tl.float32)
    for g in range(part * per_segment, (part + 1) * per_segment, T):
        for j in tl.static_range(T):
            now = g + j < length
            x = tl.load(u + (g + j) * u_row + d, mask=live & now, other=0.0).to(tl.float32)
            w = tl.load(step + (g + j) * channels + d, mask=live & now, other=0.0)
            B_re, B_im = _matrix(
                B, g + j, length, B_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX
            )  # fmt: skip
            h_re, h_im = _advance(h_re, h_im, w, x, B_re, B_im, rate, freq, TILES, COMPLEX)
            total += w
    pair: tl.constexpr = 2 if COMPLEX else 1
    target = ends + (b * segments + part) * pair * channels * n
    _write(target, h_re, h_im, orders, d, channels, n, first, TILES, BN, COMPLEX)
    tl.store(totals + (b * segments + part) * channels + d, total, mask=live)


@triton.jit(do_not_specialize=["segments", "per_segment"])
def _ends_back(
    step, A, C, dy, orders, ends, totals,
    length, channels, n, first, C_row, segments, per_segment,
    BD: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr,
    OWN: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """The gradient that leaves each segment but the first at its beginning, if none entered at its end."""
    b, d = _place(channels, BD)
    live, part = d < channels, tl.program_id(1) + 1
    rate, freq = _rates(A, orders, d, channels, n, first, TILES, BN, COMPLEX)
    step += b * length * channels
    dy += b * length * channels
    C += b * length * C_row
    g_re, g_im = _zeros(BD, TILES, BN, True), _zeros(BD, TILES, BN, COMPLEX)
    total = tl.zeros((BD,), tl.float32)
    for i in range(0, per_segment, T):
        for j in tl.static_range(T):
            t = (part + 1) * per_segment - 1 - i - j
            w = tl.load(step + t * channels + d, mask=live & (t < length), other=0.0)
            given = tl.load(dy + t * channels + d, mask=live & (t < length), other=0.0).to(tl.float32)
            C_re, C_im = _matrix(C, t, length, C_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX)
            g_re, g_im = _add_heard(g_re, g_im, given, C_re, C_im, TILES, COMPLEX)
            g_re, g_im = _go_back(g_re, g_im, w, rate, freq, TILES, COMPLEX)
            total += w
    pair: tl.constexpr = 2 if COMPLEX else 1
    target = ends + (b * segments + part) * pair * channels * n
    _write(target, g_re, g_im, orders, d, channels, n, first, TILES, BN, COMPLEX)
    tl.store(totals + (b * segments + part) * channels + d, total, mask=live)


@triton.jit(do_not_specialize=["segments"])
def _join(
    A, orders, ends, totals, begin, starts,
    channels, n, first, segments,
    BD: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, BACK: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """What every segment begins with: all that was before, decayed; `BACK` begins at the last, with conjugate poles."""
    b, d = _place(channels, BD)
    rate, freq = _rates(A, orders, d, channels, n, first, TILES, BN, COMPLEX)
    size = (2 if COMPLEX else 1) * channels * n
    h_re, h_im = _zeros(BD, TILES, BN, True), _zeros(BD, TILES, BN, COMPLEX)
    if begin is not None:
        h_re, h_im = _read(begin + b * size, orders, d, channels, n, first, TILES, BN, COMPLEX)
    for i in range(0, segments):
        s = segments - 1 - i if BACK else i
        place = b * segments + s
        _write(starts + place * size, h_re, h_im, orders, d, channels, n, first, TILES, BN, COMPLEX)
        if i < segments - 1:
            w = tl.load(totals + place * channels + d, mask=d < channels, other=0.0)
            e_re, e_im = _read(ends + place * size, orders, d, channels, n, first, TILES, BN, COMPLEX)
            new_re, new_im = (), ()
            for q in tl.static_range(TILES):
                a_re, a_im = _decay(w, rate[q], _part(freq, q, COMPLEX), COMPLEX)
                re, im = _times(a_re, -a_im if BACK else a_im, h_re[q], _part(h_im, q, COMPLEX), COMPLEX)
                new_re = new_re + (re + e_re[q],)
                if COMPLEX:
                    new_im = new_im + (im + e_im[q],)
            h_re, h_im = new_re, new_im


@triton.jit(do_not_specialize=["segments", "per_segment"])
def _forward(
    u, step, A, B, C, D, orders, starts, y, marks, last,
    length, channels, n, first, u_row, B_row, C_row, segments, per_segment,
    BD: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr,
    OWN: tl.constexpr, COMPLEX: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """y of one segment; `ADD` to what other states have put there."""
    b, d = _place(channels, BD)
    live, part = d < channels, tl.program_id(1)
    if orders is not None:
        if ADD:
            if tl.max(tl.load(orders + d, mask=live, other=0)) <= first:
                return
    rate, freq = _rates(A, orders, d, channels, n, first, TILES, BN, COMPLEX)
    size = (2 if COMPLEX else 1) * channels * n
    u += b * length * u_row
    step += b * length * channels
    y += b * length * channels
    B += b * length * B_row
    C += b * length * C_row
    h_re, h_im = _zeros(BD, TILES, BN, True), _zeros(BD, TILES, BN, COMPLEX)
    if starts is not None:
        h_re, h_im = _read(starts + (b * segments + part) * size, orders, d, channels, n, first, TILES, BN, COMPLEX)
    skip = tl.zeros((BD,), tl.float32)
    if D is not None:
        if not ADD:
            skip = tl.load(D + d, mask=live, other=0.0).to(tl.float32)
    for s in range(part * per_segment, tl.minimum((part + 1) * per_segment, length), SPAN):
        if marks is not None:
            mark = marks + (b * tl.cdiv(length, SPAN) + s // SPAN) * size
            _write(mark, h_re, h_im, orders, d, channels, n, first, TILES, BN, COMPLEX)
        for g in range(s, s + SPAN, T):
            xs, ws, Bs, Cs = (), (), (), ()
            for j in tl.static_range(T):
                t = g + j
                xs = xs + (tl.load(u + t * u_row + d, mask=live & (t < length), other=0.0).to(tl.float32),)
                ws = ws + (tl.load(step + t * channels + d, mask=live & (t < length), other=0.0),)
                Bs = Bs + (_matrix(B, t, length, B_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX),)
                Cs = Cs + (_matrix(C, t, length, C_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX),)
            outs = ()
            for j in tl.static_range(T):
                h_re, h_im = _advance(h_re, h_im, ws[j], xs[j], Bs[j][0], Bs[j][1], rate, freq, TILES, COMPLEX)
                outs = outs + (_inner(h_re, h_im, Cs[j][0], Cs[j][1], -1, TILES, COMPLEX) + skip * xs[j],)
            for j in tl.static_range(T):
                at = y + (g + j) * channels + d
                out = outs[j]
                if ADD:
                    out += tl.load(at, mask=live & (g + j < length), other=0.0).to(tl.float32)
                tl.store(at, out.to(y.dtype.element_ty), mask=live & (g + j < length))
    if last is not None:
        if part == segments - 1:
            _write(last + b * size, h_re, h_im, orders, d, channels, n, first, TILES, BN, COMPLEX)


@triton.jit
def _keep(target, re, im, BD: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, COMPLEX: tl.constexpr):
    """Tiles into scratch memory, one after the other."""
    inside = tl.arange(0, BD)[:, None] * BN + tl.arange(0, BN)[None, :]
    for q in tl.static_range(TILES):
        tl.store(target + q * BD * BN + inside, re[q])
        if COMPLEX:
            tl.store(target + (TILES + q) * BD * BN + inside, im[q])


@triton.jit
def _kept(source, BD: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, COMPLEX: tl.constexpr):
    """And back."""
    inside = tl.arange(0, BD)[:, None] * BN + tl.arange(0, BN)[None, :]
    re, im = (), ()
    for q in tl.static_range(TILES):
        re = re + (tl.load(source + q * BD * BN + inside),)
        if COMPLEX:
            im = im + (tl.load(source + (TILES + q) * BD * BN + inside),)
    return re, im


@triton.jit
def _shared(v_re, v_im, weight, sign, TILES: tl.constexpr, OWN: tl.constexpr, COMPLEX: tl.constexpr):
    """weight v, summed over the channels of the program where B and C are those of all; Im times `sign`."""
    re, im = (), ()
    for q in tl.static_range(TILES):
        part = weight[:, None] * v_re[q]
        re = re + (part if OWN else tl.sum(part, 0)[None, :],)
        if COMPLEX:
            part = weight[:, None] * v_im[q] * sign
            im = im + (part if OWN else tl.sum(part, 0)[None, :],)
    return re, im


@triton.jit
def _hand_out(
    target, parts, t, length, row, orders, d, channels, n, first,
    TILES: tl.constexpr, BN: tl.constexpr, OWN: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """Gradients of B or C of a step: added to those of other programs, or a channel's own."""
    for q in tl.static_range(TILES):
        k, there = _there(orders, d, channels, n, first, q, BN)
        at = _matrix_at(target, t, row, d, k, n, OWN, COMPLEX)
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
def _slopes(g_re, g_im, h_re, h_im, w, rate, freq, A_re, A_im, TILES: tl.constexpr, COMPLEX: tl.constexpr):
    """Of ā g and h[t−1]: the part of dΔ that goes through the decay, and the sums for dA."""
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


@triton.jit(do_not_specialize=["segments", "per_segment"])
def _backward(
    u, step, A, B, C, D, orders, dy, marks, starts, scratch, du, dstep, dA, dB, dC, dD, dstate,
    length, channels, n, first, u_row, B_row, C_row, segments, per_segment,
    BD: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr,
    OWN: tl.constexpr, COMPLEX: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """All gradients of one segment: dA and dD as sums over it, dB and dC added up over programs; `ADD` as above."""
    b, d = _place(channels, BD)
    live, part = d < channels, tl.program_id(1)
    if orders is not None:
        if ADD:
            if tl.max(tl.load(orders + d, mask=live, other=0)) <= first:
                return
    rate, freq = _rates(A, orders, d, channels, n, first, TILES, BN, COMPLEX)
    pair: tl.constexpr = 2 if COMPLEX else 1
    size = pair * channels * n
    own_row = n * pair * (channels if OWN else 1)
    u += b * length * u_row
    step += b * length * channels
    dy += b * length * channels
    du += b * length * channels
    dstep += b * length * channels
    B += b * length * B_row
    C += b * length * C_row
    dB += b * length * own_row
    dC += b * length * own_row
    GROUPS: tl.constexpr = SPAN // T
    KEPT: tl.constexpr = TILES * BN * BD * pair
    scratch += (tl.program_id(0).to(tl.int64) * segments + part) * (GROUPS * KEPT)
    g_re, g_im = _zeros(BD, TILES, BN, True), _zeros(BD, TILES, BN, COMPLEX)
    if starts is not None:
        g_re, g_im = _read(starts + (b * segments + part) * size, orders, d, channels, n, first, TILES, BN, COMPLEX)
    A_re, A_im = _zeros(BD, TILES, BN, True), _zeros(BD, TILES, BN, COMPLEX)
    skip, skipped = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
    if D is not None:
        if not ADD:
            skip = tl.load(D + d, mask=live, other=0.0).to(tl.float32)
    spans = tl.cdiv(tl.minimum((part + 1) * per_segment, length) - part * per_segment, SPAN)
    for i in range(0, spans):
        s = part * per_segment + (spans - 1 - i) * SPAN
        mark = marks + (b * tl.cdiv(length, SPAN) + s // SPAN) * size
        h_re, h_im = _read(mark, orders, d, channels, n, first, TILES, BN, COMPLEX)
        for r in range(0, GROUPS - 1):
            _keep(scratch + r * KEPT, h_re, h_im, BD, TILES, BN, COMPLEX)
            for j in tl.static_range(T):
                t = s + r * T + j
                x = tl.load(u + t * u_row + d, mask=live & (t < length), other=0.0).to(tl.float32)
                w = tl.load(step + t * channels + d, mask=live & (t < length), other=0.0)
                B_re, B_im = _matrix(B, t, length, B_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX)
                h_re, h_im = _advance(h_re, h_im, w, x, B_re, B_im, rate, freq, TILES, COMPLEX)
        _keep(scratch + (GROUPS - 1) * KEPT, h_re, h_im, BD, TILES, BN, COMPLEX)
        for r in range(0, GROUPS):
            begin = s + (GROUPS - 1 - r) * T
            h_re, h_im = _kept(scratch + (GROUPS - 1 - r) * KEPT, BD, TILES, BN, COMPLEX)
            hs = ((h_re, h_im),)
            xs, ws, ys, Bs, Cs = (), (), (), (), ()
            for j in tl.static_range(T):
                t = begin + j
                xs = xs + (tl.load(u + t * u_row + d, mask=live & (t < length), other=0.0).to(tl.float32),)
                ws = ws + (tl.load(step + t * channels + d, mask=live & (t < length), other=0.0),)
                ys = ys + (tl.load(dy + t * channels + d, mask=live & (t < length), other=0.0).to(tl.float32),)
                Bs = Bs + (_matrix(B, t, length, B_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX),)
                Cs = Cs + (_matrix(C, t, length, C_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX),)
            for j in tl.static_range(T):
                h_re, h_im = _advance(h_re, h_im, ws[j], xs[j], Bs[j][0], Bs[j][1], rate, freq, TILES, COMPLEX)
                hs = hs + ((h_re, h_im),)
            du_s, dstep_s, dB_s, dC_s = (), (), (), ()
            for j in tl.static_range(T - 1, -1, -1):
                x, w, given = xs[j], ws[j], ys[j]
                g_re, g_im = _add_heard(g_re, g_im, given, Cs[j][0], Cs[j][1], TILES, COMPLEX)
                into = _inner(g_re, g_im, Bs[j][0], Bs[j][1], 1, TILES, COMPLEX)
                dB_s = dB_s + (_shared(g_re, g_im, w * x, 1.0, TILES, OWN, COMPLEX),)
                dC_s = dC_s + (_shared(hs[j + 1][0], hs[j + 1][1], given, -1.0, TILES, OWN, COMPLEX),)
                g_re, g_im = _go_back(g_re, g_im, w, rate, freq, TILES, COMPLEX)
                turned, A_re, A_im = _slopes(
                    g_re, g_im, hs[j][0], hs[j][1], w, rate, freq, A_re, A_im, TILES, COMPLEX
                )  # fmt: skip
                skipped += given * x
                du_s, dstep_s = du_s + (w * into + skip * given,), dstep_s + (x * into + turned,)
            for i_j in tl.static_range(T):
                t = begin + T - 1 - i_j
                du_t, dstep_t = du_s[i_j], dstep_s[i_j]
                at = t * channels + d
                if ADD:
                    du_t += tl.load(du + at, mask=live & (t < length), other=0.0).to(tl.float32)
                    dstep_t += tl.load(dstep + at, mask=live & (t < length), other=0.0)
                tl.store(du + at, du_t.to(du.dtype.element_ty), mask=live & (t < length))
                tl.store(dstep + at, dstep_t, mask=live & (t < length))
                _hand_out(
                    dB, dB_s[i_j], t, length, own_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX
                )  # fmt: skip
                _hand_out(
                    dC, dC_s[i_j], t, length, own_row, orders, d, channels, n, first, TILES, BN, OWN, COMPLEX
                )  # fmt: skip
    place = b * segments + part
    _write(dA + place * size, A_re, A_im, orders, d, channels, n, first, TILES, BN, COMPLEX)
    if dD is not None:
        if not ADD:
            tl.store(dD + place * channels + d, skipped, mask=live)
    if dstate is not None:
        if part == 0:
            _write(dstate + b * size, g_re, g_im, orders, d, channels, n, first, TILES, BN, COMPLEX)
