"""The recurrence in plain torch: powers of poles, a two-level scan of complex numbers, and a CPU walk over pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from compressm.ops.dispatch import once_differentiable
from compressm.ops.lti.cost import WIDE
from compressm.ops.memory import empty_in_large_pages

# Up to this many powers are exponentiated one by one; more are products of two tables, 2 √L exponentials instead of L.
_SINGLE_TABLE = 64


def to_complex(pair: Float[Tensor, "..."], axis: int) -> Complex[Tensor, "..."]:
    """Join the pair on `axis` into one complex number."""
    re, im = pair.unbind(axis)
    return torch.complex(re, im)


def to_pair(number: Complex[Tensor, "..."], axis: int) -> Float[Tensor, "..."]:
    """Split complex numbers into real and imaginary parts on a new axis."""
    return torch.stack([number.real, number.imag], dim=axis)


def interleaved(number: Complex[Tensor, "*rest n"]) -> Float[Tensor, "*rest n2"]:
    """Real and imaginary parts side by side, as complex numbers lie in memory: products with them need no copies."""
    return torch.view_as_real(number.resolve_conj()).flatten(-2)


def from_interleaved(pairs: Float[Tensor, "*rest n2"]) -> Complex[Tensor, "*rest n"]:
    """The inverse of `interleaved`."""
    return torch.view_as_complex(pairs.reshape(*pairs.shape[:-1], -1, 2))


def complex_dtype(real: torch.dtype) -> torch.dtype:
    """complex128 for float64, complex64 for everything else."""
    return torch.complex128 if real == torch.float64 else torch.complex64


def powers(
    log_poles: Float[Tensor, "2 *modes"], count: int, *, first: int = 0, dtype: torch.dtype
) -> Complex[Tensor, "count *modes"]:
    """λ^first … λ^(first + count − 1), each right to rounding in `dtype`.

    Exponents are formed in float64: in float32 the phase 16384 · 6.28 alone would be off by 6e-3.
    """
    logs = torch.complex(*log_poles.to(torch.float64).unbind(0))
    if count <= _SINGLE_TABLE:
        return torch.exp(_exponents(count, first, logs) * logs).to(dtype)
    inner = round(count**0.5) + 1
    outer = -(-count // inner)
    small = torch.exp(_exponents(inner, first, logs) * logs).to(dtype)
    large = torch.exp(inner * _exponents(outer, 0, logs) * logs).to(dtype)
    return (large[:, None] * small[None, :]).flatten(0, 1)[:count]


def _exponents(count: int, first: int, logs: Tensor) -> Tensor:
    steps = torch.arange(first, first + count, dtype=torch.float64, device=logs.device)
    return steps.reshape(-1, *([1] * logs.ndim))


# Inside a chunk λ is multiplied up to 31 times, which costs 31 · 6e-8 at worst; carries between chunks are float64.
_LONGEST_CHUNK = 32


def two_level_recurrence(
    x: Float[Tensor, "batch length 2 n"],
    log_poles: Float[Tensor, "2 n"],
    state: Float[Tensor, "batch 2 n"] | None = None,
) -> tuple[Float[Tensor, "batch length 2 n"], Float[Tensor, "batch 2 n"]]:
    """Return every h and the last one, as pairs, by a scan in two levels of chunks."""
    start = None if state is None else to_complex(state, -2)
    history = to_pair(recurrence(to_complex(x, -2), log_poles, start), -2)
    return history, history[:, -1]


def recurrence(
    x: Complex[Tensor, "batch length n"], log_poles: Float[Tensor, "2 n"], state: Complex[Tensor, "batch n"] | None
) -> Complex[Tensor, "batch length n"]:
    """Return every h as complex numbers; the gradient runs the same recurrence backwards in time."""
    start = x.new_zeros(x.shape[0], x.shape[-1]) if state is None else state.to(x.dtype)
    history: Tensor = TwoLevelRecurrence.apply(x, log_poles, start)
    return history


def by_doublings(
    x: Float[Tensor, "batch length 2 n"],
    log_poles: Float[Tensor, "2 n"],
    state: Float[Tensor, "batch 2 n"] | None,
    lengths: Int[Tensor, " batch"] | None = None,
) -> tuple[Float[Tensor, "batch length 2 n"], Float[Tensor, "batch 2 n"]]:
    """Return every h and the one at each sequence's end, by log₂ L sums h[t] + λˢ h[t − s] with s = 1, 2, 4, …

    These are operations on real numbers, which torch.func can transform in every way.
    """
    h = x
    if state is not None:
        h = torch.cat([x[:, :1] + _times_power(log_poles, 1, state.to(x.dtype))[:, None], x[:, 1:]], dim=1)
    shift = 1
    while shift < x.shape[1]:
        h = torch.cat([h[:, :shift], h[:, shift:] + _times_power(log_poles, shift, h[:, :-shift])], dim=1)
        shift *= 2
    if lengths is None:
        return h, h[:, -1]
    ends = (lengths - 1)[:, None, None, None].expand(-1, 1, *h.shape[2:])
    return h, h.gather(1, ends)[:, 0]


def _times_power(
    log_poles: Float[Tensor, "2 n"], exponent: int, h: Float[Tensor, "*rest 2 n"]
) -> Float[Tensor, "*rest 2 n"]:
    decay, phase = exponent * log_poles.double()
    a, b = ((torch.exp(decay) * part).to(h.dtype) for part in (torch.cos(phase), torch.sin(phase)))
    re, im = h.unbind(-2)
    return torch.stack([a * re - b * im, b * re + a * im], dim=-2)


class TwoLevelRecurrence(torch.autograd.Function):
    """Every h; g[t] = ∂L/∂h[t] + λ̄ g[t+1] gives ∂L/∂x = g, ∂L/∂h₀ = λ̄ g[1], ∂L/∂log λ = Σ conj(g[t]) λ h[t−1]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_poles: Tensor, state: Tensor) -> Tensor:
        h = x.clone(memory_format=torch.contiguous_format)
        h[:, 0].addcmul_(state, powers(log_poles, 1, first=1, dtype=h.dtype)[0])
        accumulate_(h, short_powers(log_poles, h.shape[1]))
        ctx.save_for_backward(h, log_poles, state)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _gradient_(grads[0].clone(memory_format=torch.contiguous_format), *ctx.saved_tensors)


def _gradient_(
    g: Complex[Tensor, "batch length n"],
    h: Complex[Tensor, "batch length n"],
    log_poles: Float[Tensor, "2 n"],
    state: Complex[Tensor, "batch n"],
) -> tuple[Complex[Tensor, "batch length n"], Float[Tensor, "2 n"], Complex[Tensor, "batch n"]]:
    """∂L/∂x, which replaces ∂L/∂h in g, ∂L/∂log λ and ∂L/∂h₀."""
    poles = powers(log_poles, 1, first=1, dtype=h.dtype)[0]
    accumulate_(g, short_powers(log_poles, g.shape[1]).conj_physical(), backwards=True)
    pull = (g[:, 1:].conj() * h[:, :-1]).sum((0, 1)) + (g[:, 0].conj() * state).sum(0)
    return g, logarithmic(pull * poles).to(log_poles.dtype), poles.conj() * g[:, 0]


def two_level_gradient(
    dh: Float[Tensor, "batch length 2 n"],
    dlast: Float[Tensor, "batch 2 n"] | None,
    h: Float[Tensor, "batch length 2 n"],
    log_poles: Float[Tensor, "2 n"],
    state: Float[Tensor, "batch 2 n"] | None,
) -> tuple[Float[Tensor, "batch length 2 n"], Float[Tensor, "2 n"], Float[Tensor, "batch 2 n"]]:
    """∂L/∂x, ∂L/∂log λ and ∂L/∂h₀ from the gradients of what `two_level_recurrence` returns."""
    g, every = to_complex(dh, -2), to_complex(h, -2)
    if dlast is not None:
        g[:, -1] += to_complex(dlast, -2)
    start = torch.zeros_like(g[:, 0]) if state is None else to_complex(state, -2).to(g.dtype)
    dx, dlog, dstate = _gradient_(g, every, log_poles, start)
    return to_pair(dx, -2), dlog, to_pair(dstate, -2)


def short_powers(log_poles: Float[Tensor, "2 n"], length: int) -> Complex[Tensor, "size n"]:
    """The powers λ, λ², … that one chunk of a sequence needs."""
    return powers(log_poles, _chunk_size(length), first=1, dtype=torch.complex128)


@cache
def _chunk_size(length: int) -> int:
    """The chunk with the fewest steps one after the other: inside it, between chunks, and after the last whole one."""
    return min(range(1, _LONGEST_CHUNK + 1), key=lambda size: size + length // size + length % size)


def accumulate_(
    h: Complex[Tensor, "batch length n"], table: Complex[Tensor, "size n"], *, backwards: bool = False
) -> None:
    """Add λ h[t−1] to h[t] for t = 1, 2, …, or `backwards` λ h[t+1] from the end; `table` is `short_powers` of λ."""
    length, size = h.shape[1], len(table)
    left = length % size
    near, order = table.to(h.dtype), slice(None, None, -1 if backwards else None)
    chunks = (h[:, left:] if backwards else h[:, : length - left]).view(len(h), -1, size, h.shape[2])
    _chain_(chunks.unbind(2)[order], near[0])
    ends = chunks[:, :, 0 if backwards else -1].to(torch.complex128, copy=True)
    _chain_(ends.unbind(1)[order], table[-1])
    carries = ends.to(h.dtype)[:, :, None]
    if backwards:
        chunks[:, :-1].addcmul_(carries[:, 1:], near.flip(0))
    else:
        chunks[:, 1:].addcmul_(carries[:, :-1], near)
    remainder = h[:, : left + 1] if backwards else h[:, length - left - 1 :]
    _chain_(remainder.unbind(1)[order], near[0])


def _chain_(steps: Sequence[Tensor], pole: Tensor) -> None:
    for before, after in pairwise(steps):
        after.addcmul_(before, pole)


def logarithmic(pull: Complex[Tensor, " n"]) -> Float[Tensor, "2 n"]:
    """∂L/∂(log |λ|, arg λ) from Σ conj(g) λ ∂h/∂λ."""
    return torch.stack([pull.real, -pull.imag])


# Numbers in a tile that is read right after it is written: x and h, one megabyte each, stay in the cache.
_STRETCH = 2**18
# Inside a span λ is multiplied up to 31 times, which costs 31 · 6e-8 at worst; carries between spans are float64.
_SPAN = 32
# Numbers in one step of all spans side by side: with fewer, a call costs more than its arithmetic.
_STEP = 2**15
# Products with numbers below 1e-38 take a processor ten times as long; 1e-19 · 1e-19 is not below.
_SMALLEST = 1e-19


class _Pole(NamedTuple):
    """The parts of λ that a product of pairs needs."""

    re: Float[Tensor, " n"]
    im: Float[Tensor, " n"]
    minus_im: Float[Tensor, " n"]


class _Pair(NamedTuple):
    """Views of a pair: both parts, the real part, and the imaginary part."""

    both: Float[Tensor, "*rest 2 n"]
    re: Float[Tensor, "*rest n"]
    im: Float[Tensor, "*rest n"]


def walk(
    x: Float[Tensor, "batch length 2 n"],
    h: Float[Tensor, "batch length 2 n"],
    log_poles: Float[Tensor, "2 n"],
    entering: Float[Tensor, "batch 2 n"] | None,
    *,
    backwards: bool,
) -> Iterator[slice]:
    """Write h[t] = λ h[t−1] + x[t] and yield each finished tile; the float64 state loses nothing in long sequences."""
    batch, length, _, n = x.shape
    order = _order(backwards)
    pole = _split_pole(powers(log_poles, 1, first=1, dtype=torch.complex128)[0], torch.float64, backwards)
    before, after = (_pair(state) for state in torch.zeros(2, batch, 2, n, dtype=torch.float64, device=x.device))
    for times in _stretches(length, 1, -(-_STRETCH // (batch * 2 * n)), backwards):
        for source, target in zip(x[:, times].unbind(1)[order], h[:, times].unbind(1)[order], strict=True):
            after.both.copy_(source)
            if entering is not None:
                after.both.add_(entering)
                entering = None
            _add_product_(after, pole, before)
            target.copy_(after.both)
            before, after = after, before
        yield times


def walk_in_spans(
    x: Float[Tensor, "batch length 2 n"],
    h: Float[Tensor, "batch length 2 n"],
    log_poles: Float[Tensor, "2 n"],
    entering: Float[Tensor, "batch 2 n"] | None,
    *,
    backwards: bool,
) -> Iterator[slice]:
    """Do the same as `walk` for few states a step: many spans start from zero at once, then get their carries."""
    batch, length, _, n = x.shape
    table = powers(log_poles, _SPAN, first=1, dtype=torch.complex128)
    step, leap = (_split_pole(table[k], dtype, backwards) for k, dtype in ((0, x.dtype), (-1, torch.float64)))
    near = _tables(table, x.dtype, backwards)
    carry = torch.zeros(batch, 2, n, dtype=torch.float64, device=x.device)
    for times in _stretches(length, _SPAN, _SPAN * -(-_STEP // (batch * 2 * n)), backwards):
        size = min(_SPAN, times.stop - times.start)
        sources, spans = (z[:, times].unflatten(1, (-1, size)) for z in (x, h))
        _walk_all(sources, spans, step, entering, backwards)
        entering = None
        carries = _carried(spans[:, :, 0 if backwards else -1], carry, leap, backwards)
        carry = carries[:, 0 if backwards else -1]
        tables = near[:, :size].flip(1) if backwards else near[:, :size]
        _add_carries_(spans, carries[:, 1:] if backwards else carries[:, :-1], tables)
        yield times


def _walk_all(
    sources: Float[Tensor, "batch spans size 2 n"],
    spans: Float[Tensor, "batch spans size 2 n"],
    pole: _Pole,
    entering: Float[Tensor, "batch 2 n"] | None,
    backwards: bool,
) -> None:
    """Walk through all spans at once, each from zero; `entering` is added to the very first step."""
    order = _order(backwards)
    steps = [
        _Pair(*views) for views in zip(spans.unbind(2), *(spans[..., k, :].unbind(2) for k in (0, 1)), strict=True)
    ]
    steps = steps[order]
    first, *rest = sources.unbind(2)[order]
    steps[0].both.copy_(first)
    if entering is not None:
        steps[0].both[:, -1 if backwards else 0].add_(entering)
    for source, (before, after) in zip(rest, pairwise(steps), strict=True):
        torch.addcmul(source, pole.re, before.both, out=after.both)
        after.re.addcmul_(pole.minus_im, before.im)
        after.im.addcmul_(pole.im, before.re)


def _carried(
    ends: Float[Tensor, "batch spans 2 n"], carry: Float[Tensor, "batch 2 n"], leap: _Pole, backwards: bool
) -> Float[Tensor, "batch one_more 2 n"]:
    """The float64 states between spans, from `carry` on: each is the previous one times `leap` plus a span's end."""
    batch, count, _, n = ends.shape
    states = torch.empty(batch, count + 1, 2, n, dtype=torch.float64, device=ends.device)
    (states[:, :-1] if backwards else states[:, 1:]).copy_(ends)
    states[:, -1 if backwards else 0] = carry
    for before, after in pairwise(states.unbind(1)[_order(backwards)]):
        _add_product_(_pair(after), leap, _pair(before))
    return states


def _add_carries_(
    spans: Float[Tensor, "batch spans size 2 n"],
    carries: Float[Tensor, "batch spans 2 n"],
    tables: Float[Tensor, "2 size 2 n"],
) -> None:
    """Add the carries to every step: h[s] += λˢ⁺¹ c."""
    straight = carries.to(spans.dtype)[:, :, None]
    turned = torch.stack([-straight[..., 1, :], straight[..., 0, :]], dim=-2)  # i c
    spans.addcmul_(straight, tables[0]).addcmul_(turned, tables[1])


def _add_product_(after: _Pair, pole: _Pole, before: _Pair) -> None:
    after.both.addcmul_(pole.re, before.both)
    after.re.addcmul_(pole.minus_im, before.im)
    after.im.addcmul_(pole.im, before.re)


def _tables(table: Complex[Tensor, "size n"], dtype: torch.dtype, conjugate: bool) -> Float[Tensor, "2 size 2 n"]:
    """The real and imaginary parts of a table, each for both parts of a pair; numbers below 1e-19 are 0."""
    parts = torch.view_as_real(torch.where(table.abs() < _SMALLEST, 0, table.conj() if conjugate else table))
    return parts.to(dtype).permute(2, 0, 1)[:, :, None].expand(-1, -1, 2, -1).contiguous()


def _split_pole(value: Complex[Tensor, " n"], dtype: torch.dtype, conjugate: bool) -> _Pole:
    im = -value.imag if conjugate else value.imag
    return _Pole(*(part.to(dtype).contiguous() for part in (value.real, im, -im)))


def _pair(both: Float[Tensor, "*rest 2 n"]) -> _Pair:
    return _Pair(both, both.select(-2, 0), both.select(-2, 1))


def _order(backwards: bool) -> slice:
    return slice(None, None, -1 if backwards else None)


def _stretches(length: int, span: int, longest: int, backwards: bool) -> Iterator[slice]:
    """Tiles of time: whole spans, up to `longest` steps at a time, then the rest; from the end if `backwards`."""
    whole = length // span * span
    for start, stop in pairwise([*range(0, whole, longest), whole, length]):
        if start < stop:
            yield slice(length - stop, length - start) if backwards else slice(start, stop)


def pair_recurrence(
    x: Float[Tensor, "batch length 2 n"],
    log_poles: Float[Tensor, "2 n"],
    state: Float[Tensor, "batch 2 n"] | None = None,
) -> tuple[Float[Tensor, "batch length 2 n"], Float[Tensor, "batch 2 n"]]:
    """Return every h and the last one, by a walk over pairs."""
    h, last = PairRecurrence.apply(x, log_poles, state)
    return h, last


class PairRecurrence(torch.autograd.Function):
    """Every h and the last one, by a walk over pairs; gradients are as in `TwoLevelRecurrence`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_poles: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        entering = None if state is None else to_pair(_pole(log_poles) * to_complex(state.double(), 1), 1)
        h = empty_in_large_pages(tuple(x.shape), x.dtype)
        for _ in _walk(x)(x, h, log_poles, entering, backwards=False):
            pass
        ctx.save_for_backward(h, log_poles, state)
        ctx.set_materialize_grads(False)
        return h, h[:, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        h, log_poles, state = ctx.saved_tensors
        if dh is None and dlast is None:
            return None, None, None
        dh = h.new_zeros(()).expand_as(h) if dh is None else dh
        return pair_gradient(dh, dlast, h, log_poles, state, of_poles=ctx.needs_input_grad[1])


def pair_gradient(
    dh: Float[Tensor, "batch length 2 n"],
    dlast: Float[Tensor, "batch 2 n"] | None,
    h: Float[Tensor, "batch length 2 n"],
    log_poles: Float[Tensor, "2 n"],
    state: Float[Tensor, "batch 2 n"] | None,
    *,
    of_poles: bool = True,
) -> tuple[Float[Tensor, "batch length 2 n"], Float[Tensor, "2 n"], Float[Tensor, "batch 2 n"] | None]:
    """∂L/∂x, ∂L/∂log λ (0 if not `of_poles`) and ∂L/∂h₀ from the gradients of what `pair_recurrence` returns."""
    g = empty_in_large_pages(tuple(h.shape), h.dtype)
    pull = torch.zeros(2, h.shape[-1], dtype=torch.float64, device=h.device)
    for times in _walk(h)(dh, g, log_poles, dlast, backwards=True):
        if of_poles:
            later = slice(max(times.start, 1), times.stop)
            pull += _pull(g[:, later], h[:, later.start - 1 : later.stop - 1])
    if state is not None:
        pull += _pull(g[:, :1], state[:, None].to(h.dtype))
    pole, first = _pole(log_poles), to_complex(g[:, 0].double(), 1)
    dstate = None if state is None else to_pair(pole.conj() * first, 1).to(state.dtype)
    return g, logarithmic(to_complex(pull, 0) * pole).to(log_poles.dtype), dstate


def _walk(x: Float[Tensor, "batch length 2 n"]) -> Callable[..., Iterator[slice]]:
    return walk if len(x) * x.shape[3] >= WIDE else walk_in_spans


def _pole(log_poles: Float[Tensor, "2 n"]) -> Complex[Tensor, " n"]:
    return powers(log_poles, 1, first=1, dtype=torch.complex128)[0]


def _pull(g: Float[Tensor, "batch steps 2 n"], h: Float[Tensor, "batch steps 2 n"]) -> Float[Tensor, "2 n"]:
    """Σ conj(g) h."""
    (g_re, g_im), (h_re, h_im) = g.unbind(2), h.unbind(2)
    re = (g_re * h_re).addcmul_(g_im, h_im).sum((0, 1))
    return torch.stack([re, (g_re * h_im).addcmul_(g_im, h_re, value=-1).sum((0, 1))])
