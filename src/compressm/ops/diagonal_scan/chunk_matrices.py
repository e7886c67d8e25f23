"""The matrices of a chunk of T steps, and the gradients of the system from theirs."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Complex, Float
from torch import Tensor
from torch.nn.functional import pad

from compressm.ops.diagonal_scan.pairs import from_interleaved, interleaved


class Modes(NamedTuple):
    """Powers of the poles, and what drives and reads them."""

    powers: Complex[Tensor, "T1 n"]  # λ⁰ … λᵀ
    B: Complex[Tensor, "p n"]
    C: Complex[Tensor, "q n"]


class ChunkMatrices(NamedTuple):
    """From a chunk's inputs to the state at its end and to its outputs, and from the state before it to its outputs."""

    collect: Float[Tensor, "Tp n2"]  # Λᵀ⁻¹⁻ˢ B
    own: Float[Tensor, "Tp Tq"]  # K[t − s] = Re(C Λᵗ⁻ˢ B), and D on the diagonal
    emit: Float[Tensor, "Tq n2"]  # C Λᵗ⁺¹, conjugated: Re(C h) is the product of [re, −im] of C with [re, im] of h


def chunk_matrices(modes: Modes, D: Float[Tensor, " q"] | None) -> ChunkMatrices:
    """Of T steps where there are T + 1 powers."""
    powers, B, C = modes
    T, p, q = len(powers) - 1, len(B), len(C)
    collect = interleaved(powers[:-1].flip(0)[:, None] * B).flatten(0, 1)
    read = interleaved((powers[:, None] * C).conj())
    responses = (interleaved(B) @ read[:-1].flatten(0, 1).mT).reshape(p, T, q).transpose(0, 1)
    if D is not None:
        responses[0].diagonal().add_(D)
    # Windows of T lags, from zeros before the first on: the last begins at lag 0.
    windows = pad(responses, (0, 0, 0, 0, T - 1, 0)).unfold(0, T, 1)
    own = windows.permute(0, 1, 3, 2).flip(0).reshape(T * p, T * q)
    return ChunkMatrices(collect, own, read[1:].flatten(0, 1))


def pulled_back(modes: Modes, grads: ChunkMatrices) -> tuple[Modes, Float[Tensor, "p q"]]:
    """∂L/∂(powers, B, C) and ∂L/∂K[0], whose diagonal is ∂L/∂D, from the gradients of the matrices."""
    powers, B, C = modes
    T, p, q = len(powers) - 1, len(B), len(C)
    causal = grads.own.reshape(T, p, T, q).permute(1, 3, 0, 2).triu()
    # Read in rows of T + 1, what stands t − s beside the diagonal stands in column t − s.
    responses = pad(causal.reshape(p, q, T * T), (0, T)).view(p, q, T, T + 1).sum(2)[..., :T].permute(2, 0, 1)
    rows = responses.mT.reshape(T * q, p)
    read = pad(grads.emit.reshape(T, q, -1), (0, 0, 0, 0, 1, 0))
    read[:-1].view(T * q, -1).addmm_(rows, interleaved(B))
    collected = from_interleaved(grads.collect).reshape(T, p, -1).flip(0)
    reading = from_interleaved(read).conj()
    from_responses = rows.mT @ interleaved((powers[:-1, None] * C).conj()).flatten(0, 1)
    grad_powers = (reading * C.conj()).sum(1)
    grad_powers[:-1] += (collected * B.conj()).sum(1)
    grad_B = (collected * powers[:-1, None].conj()).sum(0) + from_interleaved(from_responses)
    return Modes(grad_powers, grad_B, (reading * powers[:, None].conj()).sum(0)), responses[0]
