"""A layer as matrix products over chunks of time; of the states only one a chunk is formed."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from compressm.ops.diagonal_scan.chunk_matrices import ChunkMatrices, Modes, chunk_matrices, pulled_back
from compressm.ops.diagonal_scan.pairs import from_interleaved, interleaved, powers, to_complex, to_pair
from compressm.ops.diagonal_scan.two_level import accumulate_, logarithmic, short_powers


def chunked(
    u: Float[Tensor, "batch length p"],
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    C: Float[Tensor, "2 q n"],
    state: Float[Tensor, "batch 2 n"] | None,
    D: Float[Tensor, " q"] | None,
    chunk: int,
) -> Float[Tensor, "batch length q"]:
    """Three products a chunk of T steps: its own Toeplitz block, its last state, and what the carried state adds."""
    length, missing = u.shape[1], -u.shape[1] % chunk
    padded = pad(u, (0, 0, 0, missing)) if missing else u
    y: Tensor = ChunkedLayer.apply(padded, log_poles, B, C, state, D, chunk)
    return y[:, :length]


class ChunkedLayer(torch.autograd.Function):
    """Of whole chunks. With s the states before them and e what each adds: s[k+1] = λᵀ s[k] + e[k].

    With g[k] = ∂L/∂s[k] + λ̄ᵀ g[k+1]: ∂L/∂e[k] = g[k+1], ∂L/∂log λ = Σ conj(g[k+1]) T λᵀ s[k] beside that of the
    matrices, and ∂L/∂s[0] = g[0].
    """

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        log_poles: Tensor,
        B: Tensor,
        C: Tensor,
        state: Tensor | None,
        D: Tensor | None,
        chunk: int,
    ) -> Tensor:
        driven, read = to_complex(B, 0).mT.contiguous(), to_complex(C, 0)
        modes = Modes(powers(log_poles, chunk + 1, dtype=read.dtype), driven, read)
        matrices = chunk_matrices(modes, D)
        blocks = u.reshape(-1, len(matrices.own))
        states = _one_row_more(blocks, matrices.collect)
        # What a chunk adds stands a row later, where the next begins.
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
        modes, matrices = Modes(*rest[:3]), ChunkMatrices(*rest[3:])
        dy = grads[0].reshape(len(blocks), -1)
        pulls = _one_row_more(dy, matrices.emit)
        torch.mm(dy, matrices.emit, out=pulls[:-1])
        g, added = (from_interleaved(rows).view_as(before) for rows in (pulls[:-1], pulls[1:]))
        accumulate_(g, table.conj_physical(), backwards=True)
        start = to_pair(g[:, 0], 1) if ctx.has_state else None
        added[:, -1] = 0  # the last state of a sequence is read by nothing
        du = (dy @ matrices.own.mT).addmm_(pulls[1:], matrices.collect.mT)
        of_matrices = ChunkMatrices(_outer(blocks, pulls[1:]), _outer(blocks, dy), _outer(dy, _rows(before)))
        pulled, responses = pulled_back(modes, of_matrices)
        carried = added.conj_physical_().mul_(before).sum((0, 1))
        logs = _by_exponent(pulled.powers, carried, modes.powers)
        skip = responses.diagonal() if ctx.has_skip else None
        return du.view(ctx.shape), logs.to(ctx.dtype), to_pair(pulled.B.mT, 0), to_pair(pulled.C, 0), start, skip, None


def _one_row_more(rows: Float[Tensor, "chunks m"], matrix: Float[Tensor, "m n2"]) -> Float[Tensor, "one_more n2"]:
    """Room for their product: read from its second row on, it is shifted by a chunk without a copy."""
    return torch.empty(len(rows) + 1, matrix.shape[1], dtype=rows.dtype, device=rows.device)


def _outer(a: Float[Tensor, "chunks m"], b: Float[Tensor, "chunks k"]) -> Float[Tensor, "m k"]:
    """aᵀ b; with the narrower of the two first it takes four fifths of the time."""
    return a.mT @ b if a.shape[1] <= b.shape[1] else (b.mT @ a).mT.contiguous()


def _rows(states: Complex[Tensor, "batch count n"]) -> Float[Tensor, "chunks n2"]:
    return interleaved(states).flatten(0, 1)


def _by_exponent(
    grads: Complex[Tensor, "T1 n"], carried: Complex[Tensor, " n"], table: Complex[Tensor, "T1 n"]
) -> Float[Tensor, "2 n"]:
    """∂L/∂log λ = Σⱼ j conj(∂L/∂λʲ) λʲ, with what the carries add for λᵀ."""
    pulls = grads.conj() * table
    pulls[-1] += carried * table[-1]
    steps = torch.arange(len(table), dtype=pulls.real.dtype, device=table.device)
    return logarithmic(from_interleaved(steps @ interleaved(pulls)))
