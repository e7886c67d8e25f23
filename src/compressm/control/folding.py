"""Folding of conjugate modes, and the real system with its balanced truncation: layers read y = Re(C h), u is real."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, SupportsIndex

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from compressm.control import validation
from compressm.control.balancing import (
    Balancing,
    GramianPair,
    balance,
    balance_factors,
    error_bounds,
    numerical_rank,
    rounding_floor,
)
from compressm.control.factors import cauchy_factor, cholesky_strength
from compressm.control.gramians import gramians
from compressm.control.hankel import dense_factors, gramian_pair
from compressm.control.linear_algebra import exponential
from compressm.control.system import DenseSystem, DiagonalSystem
from compressm.control.truncation import condition_number, eigenbasis, in_eigenbasis
from compressm.control.validation import PrecisionError

# The difference between 2π and its float64 value.
_TWO_PI_REST = 2.4492935982947064e-16


def fold(system: DiagonalSystem) -> DiagonalSystem:
    """Replace every mode (λ, b, c) with Im λ < 0 by (λ̄, b̄, c̄): Re(C h) is the same for every real input.

    All poles then lie in the upper half disc, where fewer balanced states give the same real output. An optimizer's
    relative step on θ is small near 0; near 2π it would be large.
    """
    _require_diagonal("fold", system)
    if not system.poles.is_complex():
        return system
    log_poles: Tensor | None = None
    if system.log_poles is not None:
        log_poles, below = _folded_logarithms(system.log_poles)
        poles = exponential(log_poles)
    else:
        below = lower_half(system)
        poles = torch.where(below, system.poles.conj(), system.poles)
    B = torch.where(below[..., :, None], system.B.conj(), system.B)
    C = torch.where(below[..., None, :], system.C.conj(), system.C)
    folded = DiagonalSystem._unchecked(poles, log_poles, B, C)
    folded._assign(_decay=system.decay)  # conjugate poles have the same decay
    return folded


def lower_half(system: DiagonalSystem) -> Bool[Tensor, "*bank n"]:
    """The modes that `fold` conjugates."""
    if not system.poles.is_complex():
        return torch.zeros_like(system.poles, dtype=torch.bool)
    return system.poles.imag < 0 if system.log_poles is None else _folded_logarithms(system.log_poles)[1]


def _folded_logarithms(log_poles: Tensor) -> tuple[Tensor, Tensor]:
    """Phases folded into [0, π], and a mask of the changed ones: −θ for θ in [−π, 0), 2π − θ for θ in (π, 2π).

    Layers store phases in (π, 2π). 2π − (θ + 2π) instead of −θ would cost 2e-16, at |log λ| = 1e-4 2e-12 of the output.
    """
    phase = log_poles.imag
    size = phase.detach().abs()
    turns = torch.where(size <= math.pi, 0, torch.floor((size + math.pi) / (2 * math.pi))) * torch.sign(phase.detach())
    phase = (phase - turns * (2 * math.pi)) - turns * _TWO_PI_REST
    below = phase < 0
    folded = torch.where(below, -phase, phase).clamp_max(math.pi)
    return torch.complex(log_poles.real, folded), below


def _require_diagonal(function: str, system: object) -> None:
    validation.require_kind(function, system, DiagonalSystem, hint="call diagonalise first")


def conjugate_pairs(system: DiagonalSystem) -> DiagonalSystem:
    """The complex system of order 2n with the output Re(C h): its modes are (λ, b, c/2) and (λ̄, b̄, c̄/2)."""
    _require_diagonal("conjugate_pairs", system)
    if not system.poles.is_complex():
        raise PrecisionError(
            f"conjugate_pairs got a {system.poles.dtype} system, expected complex poles: it is real already"
        )
    log_poles = None if system.log_poles is None else torch.cat([system.log_poles, system.log_poles.conj()], dim=-1)
    poles = torch.cat([system.poles, system.poles.conj()], dim=-1)
    B = torch.cat([system.B, system.B.conj()], dim=-2)
    C = torch.cat([system.C, system.C.conj()], dim=-1) / 2
    return DiagonalSystem._unchecked(poles, log_poles, B, C)


def real_form(system: DiagonalSystem) -> DenseSystem:
    """The real system of order 2n with states (Re h, Im h) and output Re(C h)."""
    _require_diagonal("real_form", system)
    poles, B, C = system.poles, system.B, system.C
    if not poles.is_complex():
        raise PrecisionError(f"real_form got a {poles.dtype} system, expected complex poles: it is real already")
    re, im = torch.diag_embed(poles.real), torch.diag_embed(poles.imag)
    A = torch.cat([torch.cat([re, -im], dim=-1), torch.cat([im, re], dim=-1)], dim=-2)
    return DenseSystem._unchecked(A, torch.cat([B.real, B.imag], dim=-2), torch.cat([C.real, -C.imag], dim=-1))


@dataclass(frozen=True)
class RealTruncation:
    """A reduced system of complex modes, one for each conjugate pair; σ and the bound belong to the real system."""

    system: DiagonalSystem
    sigma: Float[Tensor, "*bank n2"]
    real_order: Int[Tensor, "*bank"]
    error_bound: Float[Tensor, "*bank"]


def real_balanced_truncation(system: DiagonalSystem, order: SupportsIndex) -> RealTruncation:
    """Keep the largest real order whose conjugate pairs and real poles fit into `order` complex modes.

    ‖Re G − Re G_r‖∞ ≤ `error_bound` for real inputs. Modes that a member of the bank does not need are zero.
    """
    validation.require_kind("real_balanced_truncation", system, DiagonalSystem, hint="call diagonalise first")
    order = validation.require_order(order, system.order)
    n = system.order
    with torch.no_grad():
        flat = system.detach().flat()
        count = len(flat.poles)
        balancing = _balance(flat, torch.arange(2 * order, device=system.device).expand(count, -1))
        members = [_fit(_reduced(real_form(flat[i]), balancing, i), order, balancing.sigma[i]) for i in range(count)]
        reduced = _stacked(members)
        real_order = torch.tensor([one.size for one in members], device=system.device)
        bound = error_bounds(balancing.sigma).gather(-1, real_order[:, None])[:, 0]
        condition = torch.stack([one.condition for one in members])
        bound = bound + rounding_floor(balancing.sigma, flat.stability_margin, condition)
        bank = system.bank
        shaped = reduced._map(lambda tensor: tensor.reshape(*bank, *tensor.shape[1:]))
        return RealTruncation(
            shaped, balancing.sigma.reshape(*bank, 2 * n), real_order.reshape(bank), bound.reshape(bank)
        )


def _balance(system: DiagonalSystem, states: Tensor) -> Balancing:
    """Balance by the real Gramians or, if they are nearly singular, by factors computed from the poles."""
    input_scale, output_scale = system.scales(step=2)
    system = system.divided(input_scale, output_scale)
    P, Q = _real_gramians(system)
    if not bool((cholesky_strength(P)[2] | cholesky_strength(Q)[2]).any()):
        found = balance(GramianPair.of(P, Q), states)
    else:
        pairs = conjugate_pairs(system)
        found = balance_factors(_real_factor(pairs, 0.5), _real_factor(pairs.adjoint(), 1.0), states)
    return found.rescaled(input_scale, output_scale)


def _real_factor(pairs: DiagonalSystem, scale: float) -> Float[Tensor, "m n2 n2"]:
    """L from the factor of (h, h̄); L Lᵀ is the Gramian of (Re h, Im h) for scale ½, of the adjoint for scale 1."""
    upper, lower = cauchy_factor(pairs).chunk(2, dim=-2)
    mixed = scale * torch.cat([upper + lower, (upper - lower) / 1j], dim=-2)
    return torch.linalg.qr(torch.cat([mixed.real, mixed.imag], dim=-1).mT, mode="r").R.mT


def _real_gramians(system: DiagonalSystem) -> tuple[Tensor, Tensor]:
    """P and Q of the states (Re h, Im h), from the closed form for the conjugate pairs (h, h̄) = S (Re h, Im h)."""
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


class _Fitted(NamedTuple):
    """Modes padded with zeros, the size of the part that they are, its eigenvectors and the dual ones as rows."""

    poles: Complex[Tensor, " r"]
    B: Complex[Tensor, "r p"]
    C: Complex[Tensor, "q r"]
    size: int
    columns: Complex[Tensor, "size r"]
    rows: Complex[Tensor, "r size"]
    condition: Tensor


def _stacked(members: Sequence[_Fitted]) -> DiagonalSystem:
    return DiagonalSystem(*(torch.stack([getattr(one, name) for one in members]) for name in ("poles", "B", "C")))


def _fit(balanced: DenseSystem, order: int, sigma: Tensor) -> _Fitted:
    """The modes of the largest leading part with (pairs + real poles) ≤ order; Re(C h) is the output of a pair."""
    size = max(1, min(balanced.order, int(numerical_rank(sigma))))
    while True:
        A, B, C = balanced.A[:size, :size], balanced.B[:size], balanced.C[:, :size]
        part = DenseSystem._unchecked(A, B, C)
        X, poles = eigenbasis(part)
        # LAPACK returns exact conjugate pairs and exactly real eigenvalues for a real matrix.
        upper, real = poles.imag > 0, poles.imag == 0
        if int(upper.sum() + real.sum()) <= order:
            break
        size -= 1
    kept = torch.cat([torch.nonzero(upper), torch.nonzero(real)]).flatten()
    weight = torch.where(upper[kept], 2.0, 1.0)  # Re(2c h) is the output of a conjugate pair
    missing = order - len(kept)
    modal = in_eigenbasis(part, X, poles)
    rows = torch.linalg.inv(X)[kept]
    return _Fitted(
        pad(modal.poles[kept], (0, missing)),
        pad(modal.B[kept], (0, 0, 0, missing)),
        pad(modal.C[:, kept] * weight, (0, missing)),
        size,
        pad(X[:, kept] * weight, (0, missing)),
        pad(rows, (0, 0, 0, missing)),
        condition_number(X),
    )


@dataclass(frozen=True)
class PairTruncation:
    """A real system reduced to complex modes h = left z, with z ≈ Re(right h) and the output Re(C h)."""

    system: DiagonalSystem
    left: Complex[Tensor, "*bank r n"]
    right: Complex[Tensor, "*bank n r"]
    sigma: Float[Tensor, "*bank n"]
    error_bound: Float[Tensor, "*bank"] | None


def pair_truncation(system: DenseSystem, order: int, *, P: Float[Tensor, "*bank n n"] | None = None) -> PairTruncation:
    """Balance a real system of full matrices, and keep the largest part that fits into `order` complex modes.

    A itself is never diagonalised: HiPPO-LegS has eigenvectors of condition 8e20, its reduced models of less than 10.
    Modes that a member of the bank does not need are zero. A measured P gives no bound.
    """
    if system.is_complex:
        raise PrecisionError(f"pair_truncation got a {system.dtype} system, expected a real one")
    n, bank = system.order, system.bank
    with torch.no_grad():
        system = system.detach()
        states = torch.arange(min(2 * order, n), device=system.device).expand(bank.numel(), -1)
        if P is None:
            Lc, Lo = (factor.reshape(-1, n, n) for factor in dense_factors(system))
            balancing = balance_factors(Lc, Lo, states)
        else:
            balancing = balance(gramian_pair(system, P), states)
        flat = DenseSystem._unchecked(
            *(part.reshape(-1, *part.shape[len(bank) :]) for part in (system.A, system.B, system.C))
        )
        members = [_fit(_reduced(flat[i], balancing, i), order, balancing.sigma[i]) for i in range(bank.numel())]
        reduced = _stacked(members)
        left = torch.stack(
            [one.rows @ balancing.left[i, :, : one.size].mT.to(one.rows.dtype) for i, one in enumerate(members)]
        )
        right = torch.stack(
            [balancing.right[i, :, : one.size].to(one.rows.dtype) @ one.columns for i, one in enumerate(members)]
        )
        bound = None
        if P is None:
            sizes = torch.tensor([one.size for one in members], device=system.device)
            condition = torch.stack([one.condition for one in members])
            bound = error_bounds(balancing.sigma).gather(-1, sizes[:, None])[:, 0]
            bound = (bound + rounding_floor(balancing.sigma, flat.stability_margin, condition)).reshape(bank)

        def shaped(part: Tensor) -> Tensor:
            return part.reshape(*bank, *part.shape[1:])

        return PairTruncation(reduced._map(shaped), shaped(left), shaped(right), shaped(balancing.sigma), bound)
