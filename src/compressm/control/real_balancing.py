"""Balancing of the real system of order 2n that a complex layer with output Re(C h) really is.

A little better than folding (up to 20 % in H₂ at equal order) and two to three times as costly: an option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import SupportsIndex

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressm.control import validation
from compressm.control.balancing import Balancing, GramianPair, balance, balance_factors
from compressm.control.bounds import error_bounds, numerical_rank
from compressm.control.diagonalisation import diagonalise
from compressm.control.factors import cauchy_factor, cholesky_strength
from compressm.control.folding import conjugate_pairs, real_form
from compressm.control.gramians import gramians
from compressm.control.system import DenseSystem, DiagonalSystem


@dataclass(frozen=True)
class RealTruncation:
    """Complex modes, a conjugate pair counting as one; σ and the bound are those of the real system."""

    system: DiagonalSystem
    sigma: Float[Tensor, "*bank n2"]
    real_order: Int[Tensor, "*bank"]
    error_bound: Float[Tensor, "*bank"]


def real_balanced_truncation(system: DiagonalSystem, order: SupportsIndex) -> RealTruncation:
    """Keep the largest real order whose conjugate pairs and real poles fit into `order` complex modes.

    ‖Re G − Re G_r‖∞ ≤ `error_bound` for real inputs. A mode of a bank member that is not needed is left at zero.
    """
    validation.require_kind("real_balanced_truncation", system, DiagonalSystem, hint="call diagonalise first")
    order = validation.require_order(order, system.order)
    n = system.order
    with torch.no_grad():
        flat = system.detach().flat()
        count = len(flat.poles)
        balancing = _balance(flat, torch.arange(2 * order, device=system.device).expand(count, -1))
        members = [_fit(_reduced(real_form(flat[i]), balancing, i), order, balancing.sigma[i]) for i in range(count)]
        reduced = DiagonalSystem(*(torch.stack(parts) for parts in zip(*(modes for modes, _ in members), strict=True)))
        real_order = torch.tensor([size for _, size in members], device=system.device)
        bound = error_bounds(balancing.sigma).gather(-1, real_order[:, None])[:, 0]
        bank = system.bank
        shaped = reduced._map(lambda tensor: tensor.reshape(*bank, *tensor.shape[1:]))
        return RealTruncation(
            shaped, balancing.sigma.reshape(*bank, 2 * n), real_order.reshape(bank), bound.reshape(bank)
        )


def _balance(system: DiagonalSystem, states: Tensor) -> Balancing:
    """By the real Gramians, or, where they are nearly singular, by factors made from the poles."""
    P, Q = _real_gramians(system)
    if not bool((cholesky_strength(P)[2] | cholesky_strength(Q)[2]).any()):
        return balance(GramianPair.of(P, Q), states)
    pairs = conjugate_pairs(system)
    return balance_factors(_real_factor(pairs, 0.5), _real_factor(pairs.adjoint(), 1.0), states)


def _real_factor(pairs: DiagonalSystem, scale: float) -> Float[Tensor, "m n2 n2"]:
    """L with L Lᵀ the Gramian of (Re h, Im h) for scale ½, of their adjoints for 1, from the factor of (h, h̄)."""
    upper, lower = cauchy_factor(pairs).chunk(2, dim=-2)
    mixed = scale * torch.cat([upper + lower, (upper - lower) / 1j], dim=-2)
    return torch.linalg.qr(torch.cat([mixed.real, mixed.imag], dim=-1).mT, mode="r").R.mT


def _real_gramians(system: DiagonalSystem) -> tuple[Tensor, Tensor]:
    """Of the states (Re h, Im h), from the closed form of the conjugate pairs (h, h̄) = S (Re h, Im h)."""
    n = system.order
    P, Q = gramians(conjugate_pairs(system))
    (Phh, Phc), (Qhh, Qhc) = ((matrix[..., :n, :n], matrix[..., :n, n:]) for matrix in (P, Q))
    # Re h = (h + h̄)/2 and Im h = (h − h̄)/2i.
    real_P = _blocks((Phh + Phc).real, (Phc - Phh).imag, (Phc + Phh).imag, (Phh - Phc).real) / 2
    real_Q = _blocks((Qhh + Qhc).real, -(Qhh - Qhc).imag, (Qhh + Qhc).imag, (Qhh - Qhc).real) * 2
    return real_P, real_Q


def _blocks(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return torch.cat([torch.cat([a, b], dim=-1), torch.cat([c, d], dim=-1)], dim=-2)


def _reduced(real: DenseSystem, balancing: Balancing, member: int) -> DenseSystem:
    left, right = balancing.left[member], balancing.right[member]
    return DenseSystem._unchecked(left.mT @ real.A @ right, left.mT @ real.B, real.C @ right)


def _fit(balanced: DenseSystem, order: int, sigma: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """The largest leading part with (pairs + real poles) ≤ order, as modes padded with zeros to `order`."""
    size = max(1, min(balanced.order, int(numerical_rank(sigma))))
    while True:
        A, B, C = balanced.A[:size, :size], balanced.B[:size], balanced.C[:, :size]
        modal = diagonalise(DenseSystem._unchecked(A, B, C))
        # LAPACK returns exact conjugate pairs and exactly real eigenvalues for a real matrix.
        upper, real = modal.poles.imag > 0, modal.poles.imag == 0
        if int(upper.sum() + real.sum()) <= order:
            break
        size -= 1
    kept = torch.cat([torch.nonzero(upper), torch.nonzero(real)]).flatten()
    weight = torch.where(upper[kept], 2.0, 1.0)  # Re(2c h) carries a pair
    missing = order - len(kept)
    pad = torch.nn.functional.pad
    modes = (
        pad(modal.poles[kept], (0, missing)),
        pad(modal.B[kept], (0, 0, 0, missing)),
        pad(modal.C[:, kept] * weight, (0, missing)),
    )
    return modes, size
