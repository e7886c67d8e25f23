"""The recurrence over pairs on the CPU, and its gradients, each in one pass through memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from compressm.ops.diagonal_scan.cost import WIDE
from compressm.ops.diagonal_scan.pairs import powers, to_complex, to_pair
from compressm.ops.diagonal_scan.two_level import logarithmic
from compressm.ops.diagonal_scan.walk import walk, walk_in_spans
from compressm.ops.fresh_memory import empty_in_large_pages


def pair_recurrence(
    x: Float[Tensor, "batch length 2 n"],
    log_poles: Float[Tensor, "2 n"],
    state: Float[Tensor, "batch 2 n"] | None = None,
) -> tuple[Float[Tensor, "batch length 2 n"], Float[Tensor, "batch 2 n"]]:
    """All h and the last."""
    h, last = PairRecurrence.apply(x, log_poles, state)
    return h, last


class PairRecurrence(torch.autograd.Function):
    """With g[t] = ∂L/∂h[t] + λ̄ g[t+1]: ∂L/∂x = g, ∂L/∂h₀ = λ̄ g[1], ∂L/∂log λ = Σ conj(g[t]) λ h[t−1]."""

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
        g = empty_in_large_pages(tuple(h.shape), h.dtype)
        pull = torch.zeros(2, h.shape[-1], dtype=torch.float64)
        for times in _walk(h)(dh, g, log_poles, dlast, backwards=True):
            if ctx.needs_input_grad[1]:
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
