"""The recurrence on the CPU: short loops inside chunks, all chunks side by side, then the carries between them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from compressm.ops.diagonal_scan.pairs import powers, to_complex, to_pair

# Inside a chunk λ is multiplied up to 31 times, which costs 31 · 6e-8 at worst; carries between chunks are float64.
_LONGEST_CHUNK = 32


def two_level_recurrence(
    x: Float[Tensor, "batch length 2 n"],
    log_poles: Float[Tensor, "2 n"],
    state: Float[Tensor, "batch 2 n"] | None = None,
) -> tuple[Float[Tensor, "batch length 2 n"], Float[Tensor, "batch 2 n"]]:
    """All h and the last, as pairs."""
    start = None if state is None else to_complex(state, -2)
    history = to_pair(recurrence(to_complex(x, -2), log_poles, start), -2)
    return history, history[:, -1]


def recurrence(
    x: Complex[Tensor, "batch length n"], log_poles: Float[Tensor, "2 n"], state: Complex[Tensor, "batch n"] | None
) -> Complex[Tensor, "batch length n"]:
    """All h; the gradient runs the same recurrence backwards in time."""
    start = x.new_zeros(x.shape[0], x.shape[-1]) if state is None else state.to(x.dtype)
    history: Tensor = TwoLevelRecurrence.apply(x, log_poles, start)
    return history


class TwoLevelRecurrence(torch.autograd.Function):
    """With g[t] = ∂L/∂h[t] + λ̄ g[t+1]: ∂L/∂x = g, ∂L/∂h₀ = λ̄ g[1], ∂L/∂log λ = Σ conj(g[t]) λ h[t−1]."""

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
        h, log_poles, state = ctx.saved_tensors
        poles = powers(log_poles, 1, first=1, dtype=h.dtype)[0]
        g = grads[0].clone(memory_format=torch.contiguous_format)
        accumulate_(g, short_powers(log_poles, g.shape[1]).conj_physical(), backwards=True)
        pull = (g[:, 1:].conj() * h[:, :-1]).sum((0, 1)) + (g[:, 0].conj() * state).sum(0)
        return g, logarithmic(pull * poles).to(log_poles.dtype), poles.conj() * g[:, 0]


def short_powers(log_poles: Float[Tensor, "2 n"], length: int) -> Complex[Tensor, "size n"]:
    """λ, λ², … over one chunk of a sequence."""
    return powers(log_poles, _chunk_size(length), first=1, dtype=torch.complex128)


@cache
def _chunk_size(length: int) -> int:
    """With the fewest steps one after the other: inside a chunk, between chunks, and after the last whole one."""
    return min(range(1, _LONGEST_CHUNK + 1), key=lambda size: size + length // size + length % size)


def accumulate_(
    h: Complex[Tensor, "batch length n"], table: Complex[Tensor, "size n"], *, backwards: bool = False
) -> None:
    """h[t] += λ h[t−1] for t = 1, 2, … in place, by `short_powers` of λ; `backwards`, h[t] += λ h[t+1] from the end."""
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
