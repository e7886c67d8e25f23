"""Tiles of channels × states in the registers of a program: the building blocks of selective scan kernels.

One tuple holds the real parts of all tiles, another the imaginary parts; the latter is empty if the system is real.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
