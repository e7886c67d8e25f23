"""A layer as matrix products over chunks of T steps, which form only one state a chunk."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.nn.functional import pad

from compressm.ops.dispatch import once_differentiable
from compressm.ops.lti.recurrence import (
    accumulate_,
    from_interleaved,
    interleaved,
    logarithmic,
    powers,
    short_powers,
    to_complex,
    to_pair,
)


class ModePowers(NamedTuple):
    """The powers of the poles, the input matrix B and the output matrix C."""

    powers: Complex[Tensor, "T1 n"]  # λ⁰ … λᵀ
    B: Complex[Tensor, "p n"]
    C: Complex[Tensor, "q n"]


class ChunkMatrices(NamedTuple):
    """The maps of a chunk: inputs to its last state, inputs to its outputs, and the state before it to its outputs."""

    collect: Float[Tensor, "Tp n2"]  # Λᵀ⁻¹⁻ˢ B
    own: Float[Tensor, "Tp Tq"]  # K[t − s] = Re(C Λᵗ⁻ˢ B), and D on the diagonal
    emit: Float[Tensor, "Tq n2"]  # C Λᵗ⁺¹, conjugated: Re(C h) is the product of [re, −im] of C with [re, im] of h


def chunk_matrices(modes: ModePowers, D: Float[Tensor, " q"] | None) -> ChunkMatrices:
    """The matrices of a chunk of T steps, from T + 1 powers."""
    powers, B, C = modes
    T, p, q = len(powers) - 1, len(B), len(C)
    collect = interleaved(powers[:-1].flip(0)[:, None] * B).flatten(0, 1)
    read = interleaved((powers[:, None] * C).conj())
    responses = (interleaved(B) @ read[:-1].flatten(0, 1).mT).reshape(p, T, q).transpose(0, 1)
    if D is not None:
        responses[0].diagonal().add_(D)
    # Windows of T lags, with zeros before lag 0; the last window begins at lag 0.
    windows = pad(responses, (0, 0, 0, 0, T - 1, 0)).unfold(0, T, 1)
    own = windows.permute(0, 1, 3, 2).flip(0).reshape(T * p, T * q)
    return ChunkMatrices(collect, own, read[1:].flatten(0, 1))


def pulled_back(modes: ModePowers, grads: ChunkMatrices) -> tuple[ModePowers, Float[Tensor, "p q"]]:
    """∂L/∂(powers, B, C) and ∂L/∂K[0], whose diagonal is ∂L/∂D, from the gradients of the matrices."""
    powers, B, C = modes
    T, p, q = len(powers) - 1, len(B), len(C)
    causal = grads.own.reshape(T, p, T, q).permute(1, 3, 0, 2).triu()
    # Read in rows of T + 1, the entries t − s beside the diagonal stand in column t − s.
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
    return ModePowers(grad_powers, grad_B, (reading * powers[:, None].conj()).sum(0)), responses[0]


def chunked(
    u: Float[Tensor, "batch length p"],
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    C: Float[Tensor, "2 q n"],
    state: Float[Tensor, "batch 2 n"] | None,
    D: Float[Tensor, " q"] | None,
    chunk: int,
) -> Float[Tensor, "batch length q"]:
    """Compute y by three products a chunk: its own Toeplitz block, its last state, and the carried state's outputs."""
    length, missing = u.shape[1], -u.shape[1] % chunk
    padded = pad(u, (0, 0, 0, missing)) if missing else u
    y: Tensor = ChunkedLayer.apply(padded, log_poles, B, C, state, D, chunk)
    return y[:, :length]


class ChunkedLayer(torch.autograd.Function):
    """A layer over whole chunks: s[k+1] = λᵀ s[k] + e[k] with s[k] the state before chunk k and e[k] its contribution.

    Let g[k] = ∂L/∂s[k] + λ̄ᵀ g[k+1]. Then ∂L/∂e[k] = g[k+1], ∂L/∂s[0] = g[0], and ∂L/∂log λ is Σ conj(g[k+1]) T λᵀ s[k]
    plus the gradient from the matrices.
    """

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, log_poles: Tensor, B: Tensor, C: Tensor, state: Tensor | None, D: Tensor | None, chunk: int
    ) -> Tensor:
        driven, read = to_complex(B, 0).mT.contiguous(), to_complex(C, 0)
        modes = ModePowers(powers(log_poles, chunk + 1, dtype=read.dtype), driven, read)
        matrices = chunk_matrices(modes, D)
        blocks = u.reshape(-1, len(matrices.own))
        states = _one_row_more(blocks, matrices.collect)
        # The contribution of a chunk stands one row later, where the next chunk begins.
        torch.mm(blocks, matrices.collect, out=states[1:])
        before = from_interleaved(states[:-1]).view(len(u), -1, len(log_poles[0]))
        before[:, 0] = 0 if state is None else to_complex(state, 1)
        table = short_powers(log_poles.to(torch.float64) * chunk, before.shape[1])
        accumulate_(before, table)
        y = (blocks @ matrices.own).addmm_(states[:-1], matrices.emit.mT)
        ctx.save_for_backward(blocks, before, table, *modes, *matrices)
        ctx.shape, ctx.dtype, ctx.has_state, ctx.has_skip = u.shape, log_poles.dtype, state is not None, D is not None
        return y.reshape(*u.shape[:2], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        blocks, before, table, *rest = ctx.saved_tensors
        modes, matrices = ModePowers(*rest[:3]), ChunkMatrices(*rest[3:])
        dy = grads[0].reshape(len(blocks), -1)
        pulls = _one_row_more(dy, matrices.emit)
        torch.mm(dy, matrices.emit, out=pulls[:-1])
        g, added = (from_interleaved(rows).view_as(before) for rows in (pulls[:-1], pulls[1:]))
        accumulate_(g, table.conj_physical(), backwards=True)
        start = to_pair(g[:, 0], 1) if ctx.has_state else None
        added[:, -1] = 0  # nothing reads the last state of a sequence
        du = (dy @ matrices.own.mT).addmm_(pulls[1:], matrices.collect.mT)
        of_matrices = ChunkMatrices(_outer(blocks, pulls[1:]), _outer(blocks, dy), _outer(dy, _rows(before)))
        pulled, responses = pulled_back(modes, of_matrices)
        carried = added.conj_physical_().mul_(before).sum((0, 1))
        logs = _by_exponent(pulled.powers, carried, modes.powers)
        skip = responses.diagonal() if ctx.has_skip else None
        return du.view(ctx.shape), logs.to(ctx.dtype), to_pair(pulled.B.mT, 0), to_pair(pulled.C, 0), start, skip, None


def _one_row_more(rows: Float[Tensor, "chunks m"], matrix: Float[Tensor, "m n2"]) -> Float[Tensor, "one_more n2"]:
    """Memory for rows @ matrix and one row more: a view from the second row on is shifted by a chunk without a copy."""
    return torch.empty(len(rows) + 1, matrix.shape[1], dtype=rows.dtype, device=rows.device)


def _outer(a: Float[Tensor, "chunks m"], b: Float[Tensor, "chunks k"]) -> Float[Tensor, "m k"]:
    """aᵀ b, with the narrower factor first, which takes four fifths of the time."""
    return a.mT @ b if a.shape[1] <= b.shape[1] else (b.mT @ a).mT.contiguous()


def _rows(states: Complex[Tensor, "batch count n"]) -> Float[Tensor, "chunks n2"]:
    return interleaved(states).flatten(0, 1)


def _by_exponent(
    grads: Complex[Tensor, "T1 n"], carried: Complex[Tensor, " n"], table: Complex[Tensor, "T1 n"]
) -> Float[Tensor, "2 n"]:
    """∂L/∂log λ = Σⱼ j conj(∂L/∂λʲ) λʲ, where `carried` adds to the gradient of λᵀ."""
    pulls = grads.conj() * table
    pulls[-1] += carried * table[-1]
    steps = torch.arange(len(table), dtype=pulls.real.dtype, device=table.device)
    return logarithmic(from_interleaved(steps @ interleaved(pulls)))
