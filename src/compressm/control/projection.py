"""Projections for selective layers, contractive for every step size, one per channel or one shared by all.

A reduced layer has B ← E_B B, C ← C E_C and rates a_r: exp(Δ a_r) stays a diagonal recurrence. `Modes` diagonalise any
projection, with complex modes where needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import SupportsIndex

import torch
from jaxtyping import Bool, Float, Inexact, Int
from torch import Tensor

from compressm.control import validation
from compressm.control.balancing import GramianPair, balance
from compressm.control.factors import require_semidefinite
from compressm.control.linear_algebra import eig
from compressm.control.selective import require_negative_rates
from compressm.control.truncation import require_eigenvectors
from compressm.control.validation import ControlError, DefectiveSystemError, OrderError, ShapeError


@dataclass(frozen=True)
class Projection:
    """E_B (r × n) and E_C (n × r) with E_B E_C = I, and the rates of the reduced states."""

    E_B: Float[Tensor, "*bank r n"]
    E_C: Float[Tensor, "*bank n r"]
    rates: Float[Tensor, "*channels r"]


def galerkin_projection(
    rates: Float[Tensor, "*bank n"],
    P: Float[Tensor, "*bank n n"],
    Q: Float[Tensor, "*bank n n"],
    order: SupportsIndex,
    *,
    states: Int[Tensor, "*each r"] | None = None,
) -> Projection:
    """Project symmetrically onto the leading eigenvectors V of the sum of both Gramians.

    Scaling by s = (Qᵢᵢ/Pᵢᵢ)^¼ makes the diagonals of P and Q equal. V is orthonormal, so A_r = Vᵀ diag(a) V is
    symmetric and negative: its poles are real and exp(Δ A_r) is a contraction for every Δ > 0. `states` names the
    eigenvectors to keep, for all members of the bank or for each; by default the first ones.
    """
    rates = require_negative_rates(rates)
    kept = kept_states(order, states, rates)
    P, Q = (_checked_gramian(name, matrix, rates) for name, matrix in (("P", P), ("Q", Q)))
    scale, V = symmetric_subspace(P, Q, kept)
    reduced, Y = torch.linalg.eigh(V.mT @ (rates[..., :, None] * V))
    return Projection(Y.mT @ V.mT * scale[..., None, :], (V @ Y) / scale[..., :, None], reduced)


def shared_projection(
    rates: Float[Tensor, "channels n"],
    P: Float[Tensor, "channels n n"],
    Q: Float[Tensor, "channels n n"],
    order: SupportsIndex,
    *,
    states: Int[Tensor, " r"] | None = None,
    two_sided: bool = False,
) -> Projection:
    """One pair E_B, E_C for all channels, multiplied into the layer's own projections: no extra work at run time.

    Gramians are averaged over the channels at equal trace, the rates geometrically; channel i then has the rates
    diag(E_B diag(aⁱ) E_C), convex combinations of its own and so still negative. `two_sided` balances instead of
    projecting symmetrically: often more accurate, but its rates can turn complex or positive, which is refused.
    `states` names the directions to keep; by default the first ones.
    """
    rates = require_negative_rates(rates)
    if not isinstance(two_sided, bool):
        raise ControlError(f"two_sided is {two_sided!r:.100}, expected True or False")
    if rates.ndim != 2:
        raise ShapeError(f"rates have shape {tuple(rates.shape)}, expected (channels, n)")
    kept = kept_states(order, states, rates)
    mean_P, mean_Q = shared_gramians(rates, P, Q)
    mean_rates = -torch.exp(torch.log(-rates).mean(0))
    build = _two_sided if two_sided else galerkin_projection
    shared = build(mean_rates, mean_P, mean_Q, len(kept), states=kept)
    channel_rates = torch.einsum("rn,cn,nr->cr", shared.E_B, rates, shared.E_C)
    if bool((channel_rates >= 0).any()):
        raise DefectiveSystemError(
            f"the projection gives a rate of {channel_rates.max().item():.3g}, expected < 0; use two_sided=False"
        )
    return Projection(shared.E_B, shared.E_C, channel_rates)


def shared_gramians(
    rates: Float[Tensor, "channels n"], P: Float[Tensor, "channels n n"], Q: Float[Tensor, "channels n n"]
) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n n"]]:
    """The means of P and of Q over the channels, each scaled to trace 1: no channel dominates."""
    P, Q = (_checked_gramian(name, matrix, rates) for name, matrix in (("P", P), ("Q", Q)))
    return unit_trace(P).mean(0), unit_trace(Q).mean(0)


def kept_states(order: SupportsIndex, states: Tensor | None, rates: Tensor) -> Int[Tensor, "*each r"]:
    """The indices of the directions to keep, checked; 0 is the strongest direction."""
    n = rates.shape[-1]
    order = validation.require_order(order, n)
    if states is None:
        return torch.arange(order, device=rates.device)
    if states.shape not in ((order,), (*rates.shape[:-1], order)) or not bool(
        (states >= 0).all() and (states < n).all()
    ):
        raise OrderError(f"states are {states.tolist()}, expected {order} indices from 0 to {n - 1}")
    return states.to(rates.device)


def _checked_gramian(name: str, matrix: Tensor, rates: Tensor) -> Tensor:
    """Require a real semi-definite Gramian for each member: a mean over channels could hide an indefinite one."""
    matrix = validation.require_gramian(name, matrix, rates.shape[:-1], rates.shape[-1], rates.device)
    validation.require_real(name, matrix)
    require_semidefinite(name, matrix)
    return matrix


def symmetric_subspace(
    P: Float[Tensor, "*bank n n"], Q: Float[Tensor, "*bank n n"], kept: Int[Tensor, "*each r"]
) -> tuple[Float[Tensor, "*bank n"], Float[Tensor, "*bank n r"]]:
    """s = (Qᵢᵢ/Pᵢᵢ)^¼, and the kept eigenvectors of s P s + s⁻¹ Q s⁻¹, both at unit trace."""
    p, q = P.diagonal(dim1=-2, dim2=-1), Q.diagonal(dim1=-2, dim2=-1)
    usable = (p > 0) & (q > 0)
    scale = torch.where(usable, torch.where(usable, q / torch.where(usable, p, 1), 1) ** 0.25, 1)
    grid = scale[..., :, None] * scale[..., None, :]
    _, vectors = torch.linalg.eigh(unit_trace(P * grid) + unit_trace(Q / grid))
    return scale, vectors.flip(-1).gather(-1, kept[..., None, :].expand(*vectors.shape[:-1], kept.shape[-1]))


def _two_sided(rates: Tensor, P: Tensor, Q: Tensor, order: int, *, states: Tensor) -> Projection:
    result = balance(GramianPair.of(P[None], Q[None]), states[None])
    left, right = result.left[0], result.right[0]
    reduced, X = torch.linalg.eig(left.mT @ (rates[:, None] * right))
    if bool((reduced.imag != 0).any()) or bool((reduced.real >= 0).any()):
        raise DefectiveSystemError(
            f"two-sided balancing gives rates {reduced.tolist()}, expected real and < 0; use two_sided=False"
        )
    X = X.real
    return Projection(torch.linalg.solve(X, left.mT), right @ X, reduced.real)


def unit_trace(matrix: Float[Tensor, "*bank n n"]) -> Float[Tensor, "*bank n n"]:
    """The matrix divided by its trace; zeros stay zeros."""
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    return matrix / torch.where(trace > 0, trace, 1)[..., None, None]


@dataclass(frozen=True)
class Modes:
    """The diagonal values, E_B and E_C; the first `count` of every member are modes, the rest are zeros.

    E_B A E_C is diagonal on the modes. One mode stands for a conjugate pair: E_C counts it `twice` in y = Re(C E_C h).
    """

    values: Inexact[Tensor, "*bank r"]
    E_B: Inexact[Tensor, "*bank r n"]
    E_C: Inexact[Tensor, "*bank n r"]
    twice: Bool[Tensor, "*bank r"]
    count: Int[Tensor, "*bank"]


def diagonal_modes(
    A: Inexact[Tensor, "*bank r r"], left: Inexact[Tensor, "*bank n r"], right: Inexact[Tensor, "*bank n r"]
) -> Modes:
    """The projection onto `right` along `left`, in the basis that makes the projected A = leftᴴ A right diagonal.

    A real system with real eigenvalues stays real. Each row of E_B has the same norm as its column of E_C.
    """
    values, X = eig(A)
    require_eigenvectors(X)
    E_B, E_C = torch.linalg.solve(X, left.mH.to(X.dtype)), right.to(X.dtype) @ X
    twice = torch.zeros_like(values, dtype=torch.bool)
    count = torch.full_like(values[..., 0].real, values.shape[-1], dtype=torch.int64)
    if not A.is_complex() and not bool((values.imag != 0).any()):
        values, E_B, E_C = values.real, E_B.real, E_C.real
    elif not A.is_complex():
        twice, stays = values.imag > 0, values.imag >= 0
        E_C = torch.where(twice[..., None, :], 2 * E_C, E_C)
        first = torch.argsort(~stays, dim=-1, stable=True)
        values, twice, count = values.gather(-1, first), twice.gather(-1, first), stays.sum(-1)
        E_B = E_B.gather(-2, first[..., :, None].expand_as(E_B))
        E_C = E_C.gather(-1, first[..., None, :].expand_as(E_C))
    there = torch.arange(values.shape[-1], device=values.device) < count[..., None]
    E_B, E_C = torch.where(there[..., :, None], E_B, 0), torch.where(there[..., None, :], E_C, 0)
    length = _balanced_length(E_B, E_C)
    return Modes(values, E_B * length[..., :, None], E_C / length[..., None, :], twice & there, count)


def _balanced_length(E_B: Tensor, E_C: Tensor) -> Float[Tensor, "*bank r"]:
    rows, columns = torch.linalg.vector_norm(E_B, dim=-1), torch.linalg.vector_norm(E_C, dim=-2)
    usable = (rows > 0) & (columns > 0)
    return torch.where(usable, torch.sqrt(columns / torch.where(usable, rows, 1)), 1)
