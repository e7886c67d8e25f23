"""The recurrence on the CPU: short loops inside chunks, all chunks side by side, then the carries between them."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from compressm.ops.diagonal_scan.pairs import complex_dtype, powers, to_complex, to_pair

# Inside a chunk λ is multiplied up to 31 times, which costs 31 · 6e-8 at worst; carries between chunks are float64.
_LONGEST_CHUNK = 32


def two_level_recurrence(
    x: Float[Tensor, "batch length 2 n"],
    log_poles: Float[Tensor, "2 n"],
    state: Float[Tensor, "batch 2 n"] | None = None,
) -> tuple[Float[Tensor, "batch length 2 n"], Float[Tensor, "batch 2 n"]]:
    """All h and the last; the gradient runs the same recurrence backwards in time."""
    if state is None:
        state = x.new_zeros(x.shape[0], 2, x.shape[-1])
    history: Tensor = TwoLevelRecurrence.apply(x, log_poles, state)
    return history, history[:, -1]


class TwoLevelRecurrence(torch.autograd.Function):
    """With g[t] = ∂L/∂h[t] + λ̄ g[t+1]: ∂L/∂x = g, ∂L/∂h₀ = λ̄ g[1], ∂L/∂log λ = Σ conj(g[t]) λ h[t−1]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_poles: Tensor, state: Tensor) -> Tensor:
        dtype = complex_dtype(x.dtype)
        before = to_complex(state, -2).to(dtype)
        h = scan(to_complex(x, -2).to(dtype), log_poles, before)
        ctx.save_for_backward(h, log_poles, before)
        ctx.real = x.dtype
        return to_pair(h, -2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, log_poles, before = ctx.saved_tensors
        poles = powers(log_poles, 1, first=1, dtype=h.dtype)[0]
        mirrored = log_poles * log_poles.new_tensor([1.0, -1.0])[:, None]
        given = to_complex(grads[0], -2).to(h.dtype).flip(1)
        g = scan(given, mirrored, torch.zeros_like(before)).flip(1)
        previous = torch.cat([before[:, None], h[:, :-1]], dim=1)
        pull = (g.conj() * previous).sum((0, 1)) * poles
        grad_logs = torch.stack([pull.real, -pull.imag]).to(log_poles.dtype)
        return to_pair(g, -2).to(ctx.real), grad_logs, to_pair(poles.conj() * g[:, 0], -2).to(ctx.real)


def scan(
    x: Complex[Tensor, "batch length n"], log_poles: Float[Tensor, "2 n"], state: Complex[Tensor, "batch n"]
) -> Complex[Tensor, "batch length n"]:
    """h[t] = λ h[t−1] + x[t], without gradients."""
    batch, length, n = x.shape
    size = min(_LONGEST_CHUNK, round(length**0.5))  # as many steps inside a chunk as chunks, for short sequences
    chunks = -(-length // size)
    h = torch.nn.functional.pad(x, (0, 0, 0, chunks * size - length)).reshape(batch, chunks, size, n)
    h = h.clone() if h.data_ptr() == x.data_ptr() else h
    table = powers(log_poles, size, first=1, dtype=x.dtype)
    for t in range(1, size):
        h[:, :, t].addcmul_(h[:, :, t - 1], table[0])
    stride = powers(log_poles, 1, first=size, dtype=torch.complex128)[0]
    carry = state.to(torch.complex128)
    carries = []
    for k in range(chunks):
        carries.append(carry)
        carry = h[:, k, -1] + stride * carry
    before = torch.stack(carries, dim=1).to(x.dtype)
    h.addcmul_(before[:, :, None], table[None, None])
    return h.reshape(batch, chunks * size, n)[:, :length]
