"""The recurrence over pairs as they lie in memory: step by step in float64, or in spans of steps side by side.

Both are generators: they yield each stretch of time as soon as it is written, so that it is read while in the cache.
`entering` is added to the first h. `backwards`, they begin at the end, with λ̄.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from compressm.ops.diagonal_scan.pairs import powers

# Numbers of a stretch that is written before it is read: x and h, of one megabyte each, stay in the cache.
_STRETCH = 2**18
# Inside a span λ is multiplied up to 31 times, which costs 31 · 6e-8 at worst; carries between spans are float64.
_SPAN = 32
# Numbers of a step of all spans side by side: of fewer a call costs more than what it does.
_STEP = 2**15
# A processor takes ten times as long over products with numbers below 1e-38; 1e-19 · 1e-19 is not below.
_SMALLEST = 1e-19


class _Pole(NamedTuple):
    """λ, as products of pairs need it."""

    re: Float[Tensor, " n"]
    im: Float[Tensor, " n"]
    minus_im: Float[Tensor, " n"]


class _Pair(NamedTuple):
    """Both parts and each."""

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
    """h[t] = λ h[t−1] + x[t] with the state in float64: nothing is lost, however long the sequence."""
    batch, length, _, n = x.shape
    order = _order(backwards)
    pole = _pole(powers(log_poles, 1, first=1, dtype=torch.complex128)[0], torch.float64, backwards)
    before, after = (_pair(state) for state in torch.zeros(2, batch, 2, n, dtype=torch.float64))
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
    """The same where a step holds few states: spans begin with nothing, many at once, and get their carries after."""
    batch, length, _, n = x.shape
    table = powers(log_poles, _SPAN, first=1, dtype=torch.complex128)
    step, leap = (_pole(table[k], dtype, backwards) for k, dtype in ((0, x.dtype), (-1, torch.float64)))
    near = _tables(table, x.dtype, backwards)
    carry = torch.zeros(batch, 2, n, dtype=torch.float64)
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
    """Through all spans at once, each begun with nothing but the first with what enters."""
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
    """The states between spans in float64, from what came in on: each is the one before it a span later, and an end."""
    batch, count, _, n = ends.shape
    states = torch.empty(batch, count + 1, 2, n, dtype=torch.float64)
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
    """h[s] += λˢ⁺¹ c."""
    straight = carries.to(spans.dtype)[:, :, None]
    turned = torch.stack([-straight[..., 1, :], straight[..., 0, :]], dim=-2)  # i c
    spans.addcmul_(straight, tables[0]).addcmul_(turned, tables[1])


def _add_product_(after: _Pair, pole: _Pole, before: _Pair) -> None:
    after.both.addcmul_(pole.re, before.both)
    after.re.addcmul_(pole.minus_im, before.im)
    after.im.addcmul_(pole.im, before.re)


def _tables(table: Complex[Tensor, "size n"], dtype: torch.dtype, conjugate: bool) -> Float[Tensor, "2 size 2 n"]:
    """Real and imaginary parts, each for both parts of a pair; 0 for what is below 1e-19."""
    parts = torch.view_as_real(torch.where(table.abs() < _SMALLEST, 0, table.conj() if conjugate else table))
    return parts.to(dtype).permute(2, 0, 1)[:, :, None].expand(-1, -1, 2, -1).contiguous()


def _pole(value: Complex[Tensor, " n"], dtype: torch.dtype, conjugate: bool) -> _Pole:
    im = -value.imag if conjugate else value.imag
    return _Pole(*(part.to(dtype).contiguous() for part in (value.real, im, -im)))


def _pair(both: Float[Tensor, "*rest 2 n"]) -> _Pair:
    return _Pair(both, both.select(-2, 0), both.select(-2, 1))


def _order(backwards: bool) -> slice:
    return slice(None, None, -1 if backwards else None)


def _stretches(length: int, span: int, longest: int, backwards: bool) -> Iterator[slice]:
    """Whole spans, up to `longest` steps of them at a time, and what is left; from the end where `backwards`."""
    whole = length // span * span
    for start, stop in pairwise([*range(0, whole, longest), whole, length]):
        if start < stop:
            yield slice(length - stop, length - start) if backwards else slice(start, stop)
