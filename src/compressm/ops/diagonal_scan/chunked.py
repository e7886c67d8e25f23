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
from compressm.ops.diagonal_scan.two_level import accumulate_, logarithmic, mirrored


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
        ends = from_interleaved(blocks @ matrices.collect).unflatten(0, (len(u), -1))
        start = torch.zeros_like(ends[:, 0]) if state is None else to_complex(state, 1).to(ends.dtype)
        before = torch.cat([start[:, None], ends[:, :-1]], dim=1)
        strides = log_poles.to(torch.float64) * chunk
        accumulate_(before, strides)
        y = (blocks @ matrices.own).addmm_(_rows(before), matrices.emit.mT)
        ctx.save_for_backward(blocks, before, strides, *modes, *matrices)
        ctx.shape, ctx.dtype, ctx.has_state, ctx.has_skip = u.shape, log_poles.dtype, state is not None, D is not None
        return y.reshape(*u.shape[:2], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        blocks, before, strides, *rest = ctx.saved_tensors
        modes, matrices = Modes(*rest[:3]), ChunkMatrices(*rest[3:])
        dy = grads[0].reshape(len(blocks), -1)
        g = from_interleaved(dy @ matrices.emit).unflatten(0, before.shape[:2])
        accumulate_(g, mirrored(strides), backwards=True)
        added = pad(g[:, 1:], (0, 0, 0, 1))
        du = (dy @ matrices.own.mT).addmm_(_rows(added), matrices.collect.mT)
        of_matrices = ChunkMatrices(blocks.mT @ _rows(added), blocks.mT @ dy, dy.mT @ _rows(before))
        pulled, responses = pulled_back(modes, of_matrices)
        logs = _by_exponent(pulled.powers, (added.conj() * before).sum((0, 1)), modes.powers)
        start = to_pair(g[:, 0], 1) if ctx.has_state else None
        skip = responses.diagonal() if ctx.has_skip else None
        return du.view(ctx.shape), logs.to(ctx.dtype), to_pair(pulled.B.mT, 0), to_pair(pulled.C, 0), start, skip, None


def _rows(states: Complex[Tensor, "batch count n"]) -> Float[Tensor, "chunks n2"]:
    return interleaved(states).flatten(0, 1)


def _by_exponent(
    grads: Complex[Tensor, "T1 n"], carried: Complex[Tensor, " n"], table: Complex[Tensor, "T1 n"]
) -> Float[Tensor, "2 n"]:
    """∂L/∂log λ = Σⱼ j conj(∂L/∂λʲ) λʲ, with what the carries add for λᵀ."""
    pulls = grads.conj()
    pulls[-1] += carried
    return logarithmic((torch.arange(len(table), device=table.device)[:, None] * pulls * table).sum(0))
