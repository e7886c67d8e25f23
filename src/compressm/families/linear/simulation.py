"""Simulation of a linear system on real inputs, in double precision: its states at some steps, and its outputs."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from compressm.control import DiagonalSystem
from compressm.control.linear_algebra import exponential, logarithm
from compressm.ops import lti_bank, lti_layer
from compressm.ops.memory import keep_freed_memory

_NO_POLE = -700.0  # log |λ| of a pole at 0
# A state costs a CPU as much as this many inputs of a product; fitted to systems of 1 to 512 inputs.
_STATE_COST = 32
_LONGEST_CHUNK = 32


def chunk_of(samples: int, length: int, inputs: int, *, gpu: bool) -> int:
    """The steps of a chunk: long ones carry fewer states, but each sample then takes a longer product.

    A GPU waits for launches, a chunk each, and does products in no time.
    """
    stride = max(1, length // samples)
    best = 4 * stride if gpu else round(math.sqrt(_STATE_COST * stride / inputs))
    return max(1, min(length, max(2, best), _LONGEST_CHUNK))


class _Modes(NamedTuple):
    """A system as a bank of m members with q inputs each; m is 1 without a bank, and with one q is 1."""

    powers: Complex[Tensor, "m T1 n"]  # λ⁰ … λᵀ
    drive: Float[Tensor, "m T q n2"]  # λʲ B


def _modes(system: DiagonalSystem, chunk: int) -> _Modes:
    logs, B = torch.complex(*log_poles(system)).reshape(-1, system.order), system.B.to(torch.complex128)
    lags = torch.arange(chunk + 1, dtype=torch.float64, device=logs.device)
    powers = exponential(lags[:, None] * logs[:, None, :])
    inputs = B.reshape(len(logs), *B.shape[-2:]).mT
    return _Modes(powers, torch.view_as_real(powers[:, :-1, None] * inputs[:, None]).flatten(-2))


def sampled_states(
    system: DiagonalSystem,
    u: Float[Tensor, "batch length channels"],
    steps: Int[Tensor, "batch samples"],
    chunk: int | None = None,
) -> Complex[Tensor, "*bank batch_samples n"]:
    """The states at these steps of every sequence, of a system or of a bank with one channel each.

    No others are formed. With chunks of T steps, h[kT + j] = λʲ⁺¹ h[kT − 1] + Σᵢ λⁱ B u[kT + j − i], i ≤ j: products
    give all sums, and only the states at the ends of chunks are carried one after the other.
    """
    if not u.is_cuda:
        keep_freed_memory()
    batch, length, channels = u.shape
    chunk = chunk or chunk_of(steps.shape[1], length, 1 if system.bank else channels, gpu=u.is_cuda)
    modes, inputs = _modes(system, chunk), u.movedim(-1, 0).contiguous()[..., None] if system.bank else u[None]
    place, offset = steps // chunk, steps % chunk
    rows, lags = torch.arange(batch, device=u.device)[:, None], torch.arange(chunk, device=u.device)
    index = (steps + rows * length)[..., None] - lags
    inside = (lags <= offset[..., None]).to(u.dtype)
    windows = _rows(inputs.flatten(1, 2), index.clamp_min(0)).mul_(inside[..., None])
    h = _driven(windows, modes.drive)
    if length > chunk:
        count = (length - 1) // chunk
        blocks = inputs[:, :, : count * chunk].reshape(len(inputs), batch, count, chunk, -1)
        ends = _driven(blocks, modes.drive.flip(1))
        for before, after in pairwise(ends.unbind(2)):
            after.add_(before * modes.powers[:, -1:])
        carried = _rows(ends.flatten(1, 2), (place - 1).clamp_min(0) + rows * count)
        modes.powers[:, 0] = 0  # nothing comes into the first chunk
        h.add_(carried.mul_(_rows(modes.powers, (offset + 1) * (place > 0))))
    return h.flatten(1, 2).reshape(*system.bank, -1, system.order)


def _driven(
    windows: Float[Tensor, "m batch count T q"], drive: Float[Tensor, "m T q n2"]
) -> Complex[Tensor, "m batch count n"]:
    """Σⱼ λʲ B u[j] of every window."""
    products = windows.flatten(3).flatten(1, 2) @ drive.flatten(1, 2)
    return torch.view_as_complex(products.reshape(*windows.shape[:3], -1, 2))


def _rows(table: Tensor, index: Int[Tensor, "*shape"]) -> Tensor:
    """The rows (axis 1) at these places; far faster than `table[:, index]` on a CPU."""
    return table.index_select(1, index.flatten()).reshape(len(table), *index.shape, *table.shape[2:])


def outputs(system: DiagonalSystem, u: Float[Tensor, "batch length channels"]) -> Float[Tensor, "batch length q"]:
    """Re(C h), the layer's output without its skip."""
    if u.is_cuda and not system.bank:
        return outputs_by_products(system, u)
    B, C = (torch.stack([part.real, part.imag]) for part in (system.B + 0j, system.C + 0j))
    logs = torch.stack(log_poles(system))
    if system.bank:
        return lti_bank(u, logs, B[..., 0], C[..., 0, :], keep_state=False)[0]
    return lti_layer(u, logs, B, C, keep_state=False)[0]


def outputs_by_products(system: DiagonalSystem, u: Float[Tensor, "batch length p"]) -> Float[Tensor, "batch length q"]:
    """Re(C h) in two dozen launches: each mode has a triangular matrix of powers that serves all chunks of time.

    The training kernels have no float64. Complex exponentials and `addcmul`, which a plain scan needs, are compiled at
    their first use.
    """
    batch, length, _ = u.shape
    steps = round(math.sqrt(length))
    chunks = -(-length // steps)
    logs, n = torch.complex(*log_poles(system)), system.order
    driven = pad(u, (0, 0, 0, steps * chunks - length)) @ torch.view_as_real(system.B.mT + 0j).flatten(-2)
    # From here on the axes are mode, step in the chunk, batch and chunk.
    x = torch.view_as_complex(driven.reshape(batch, chunks, steps, n, 2)).permute(3, 2, 0, 1)
    h = _powers(logs, steps) @ x.reshape(n, steps, -1)
    # The state before a chunk comes from the ends of all earlier ones.
    ends = h[:, -1].reshape(n, batch, chunks).mT
    before = pad(_powers(steps * logs, chunks) @ ends, (0, 0, 1, 0))[:, :-1].mT.reshape(n, 1, -1)
    first = torch.arange(1, steps + 1, dtype=torch.float64, device=u.device)
    h = h + exponential(first[:, None] * logs[:, None, None]) * before
    # Re(C h) is the product of [re, −im] of C with [re, im] of h.
    read = torch.view_as_real((system.C + 0j).conj().resolve_conj()).flatten(-2)
    parts = torch.view_as_real(h).permute(0, 3, 1, 2).reshape(2 * n, -1)
    y = (read @ parts).reshape(-1, steps, batch, chunks).permute(2, 3, 1, 0)
    return y.reshape(batch, steps * chunks, -1)[:, :length]


def _powers(logs: Complex[Tensor, " n"], size: int) -> Complex[Tensor, "n {size} {size}"]:
    """λ^(i − j) for i ≥ j, and 0 above the diagonal."""
    steps = torch.arange(size, dtype=torch.float64, device=logs.device)
    distance = steps[:, None] - steps
    table = exponential(distance.clamp_min(0) * logs[:, None, None])
    return torch.where(distance >= 0, table, 0)


def log_poles(system: DiagonalSystem) -> tuple[Float[Tensor, "*bank n"], Float[Tensor, "*bank n"]]:
    """log |λ| and arg λ, both finite."""
    logs = system.log_poles
    modulus, phase = logarithm(system.poles + 0j) if logs is None else (logs.real, (logs + 0j).imag)
    return torch.nan_to_num(modulus, neginf=_NO_POLE), torch.nan_to_num(phase)
