"""The sum of the Hankel singular values as a differentiable penalty (app:hnn_det).

Its fast form needs X, the geometric mean of P and Q⁻¹, by matrix products on a GPU and by low-rank factors on a CPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Inexact
from torch import Tensor

from compressm.control import validation
from compressm.control.hankel import hankel_singular_values
from compressm.control.linear_algebra import column_norms, each, row_norms
from compressm.control.poles import reciprocal_products
from compressm.control.system import DiagonalSystem, LinearSystem, require_system
from compressm.control.validation import ControlError

# σ² has an error of ε σ₁²: smaller σ and their directions are rounding noise.
_LEAST_FLOOR = 1e-6


def hankel_nuclear_norm(system: LinearSystem, *, floor: float = 0.0) -> Float[Tensor, "*bank"]:
    """Σσᵢ, the penalty of Hankel-nuclear-norm regularisation; its gradients are finite at ties and at zero.

    With a floor of at least 1e-6, states of a diagonal system below floor·σ₁ count less in value and gradient. This
    takes a tenth of the time where the Gramians are nearly singular, and only matrix products on a GPU.
    """
    require_system("hankel_nuclear_norm", system)
    if validation.is_number(floor) and floor == 0:
        return hankel_singular_values(system).sum(-1)
    validation.require_kind("a floor", system, DiagonalSystem, hint="call diagonalise first")
    if not validation.is_number(floor) or not _LEAST_FLOOR <= floor < 1:
        raise ControlError(f"floor is {floor!r}, expected 0, or a number from {_LEAST_FLOOR:g} to below 1")
    assert isinstance(system, DiagonalSystem)
    flat = system.flat()
    return FlooredNorm.apply(flat.poles, flat.B, flat.C, flat.decay.detach(), float(floor)).reshape(system.bank)  # type: ignore[no-untyped-call]


def hankel_nuclear_norm_majoriser(system: DiagonalSystem) -> Float[Tensor, "*bank"]:
    """Σᵢ √(Pᵢᵢ Qᵢᵢ) = Σᵢ ‖bᵢ‖ ‖cᵢ‖ / (1 − |λᵢ|²) ≥ Σσᵢ, in O(n(p + q)) without a Gramian."""
    validation.require_kind("hankel_nuclear_norm_majoriser", system, DiagonalSystem, hint="call diagonalise first")
    return (row_norms(system.B) * column_norms(system.C) / system.decay).sum(-1)


class FlooredNorm(torch.autograd.Function):
    """(λ, B, C) ↦ Σσ with a closed-form gradient: X⁻¹ for P and X for Q, then by the chain rule for λ, B and C.

    With V = 1/(1 − λᵢλ̄ⱼ), P = (B Bᴴ)∘V and Q = (Cᴴ C)∘V̄: g_B = (X⁻¹∘V̄) B, g_C = C (X∘V), and
    g_λ = (V̄∘(X⁻¹∘P̄ + X̄∘Q)) λ. If a gradient is needed, it is computed together with the value. `decay` is
    1 − |λ|², which the system has: in doubled precision it takes forty operations.
    """

    @staticmethod
    def forward(
        ctx: Any,
        poles: Inexact[Tensor, "m n"],
        B: Inexact[Tensor, "m n p"],
        C: Inexact[Tensor, "m q n"],
        decay: Float[Tensor, "m n"],
        floor: float,
    ) -> Float[Tensor, " m"]:
        # The scale of each mode is free: Pᵢᵢ = Qᵢᵢ gives the least rounding.
        scale = _balanced_scale(B, C)
        B, C = B * scale[:, :, None], C / scale[:, None, :]
        weights, conjugates = reciprocal_products(poles, None, decay)
        P, Q = (B @ B.mH).mul_(weights), (C.mH @ C).mul_(conjugates)
        mean, inverse, trace = geometric_mean(P, Q, floor)
        if any(ctx.needs_input_grad):
            inward = (P.conj_physical_().mul_(inverse) + Q.mul_(mean.conj_physical())).mul_(conjugates)
            by_B, by_C = inverse.mul_(conjugates) @ B, C @ mean.mul_(weights)
            ctx.save_for_backward(
                (inward @ poles[..., None])[..., 0], by_B * scale[:, :, None], by_C / scale[:, None, :]
            )
        return trace

    @staticmethod
    def backward(ctx: Any, *grads: Float[Tensor, " m"]) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # The saved tensors are constants: a second derivative through them would be wrong.
            raise RuntimeError("the Hankel nuclear norm has first derivatives only: leave out create_graph=True")
        poles, B, C = ctx.saved_tensors
        weight = grads[0][:, None]
        return weight * poles, weight[..., None] * B, weight[..., None] * C, None, None


def _balanced_scale(B: Tensor, C: Tensor) -> Float[Tensor, "m n"]:
    """The scale s with ‖s b‖ = ‖c/s‖ for every mode; 1 where b or c is zero."""
    b, c = row_norms(B), column_norms(C)
    both = (b > 0) & (c > 0)
    return torch.where(both, torch.where(both, c, 1) / torch.where(both, b, 1), 1).sqrt()


# Below this share of the floor the directions of σ are rounding noise: σ² has an error of ε σ₁².
_LOST = 1e-2


class Mean(NamedTuple):
    """X, X⁻¹ and Σσ = tr(Q X) = tr(P X⁻¹) of each member, with small states damped."""

    mean: Inexact[Tensor, "m n n"]
    inverse: Inexact[Tensor, "m n n"]
    trace: Float[Tensor, " m"]


def geometric_mean(P: Inexact[Tensor, "m n n"], Q: Inexact[Tensor, "m n n"], floor: float) -> Mean:
    """Compute X, X⁻¹ and Σσ: by products alone on a GPU, which then never waits, and by low-rank factors on a CPU.

    Accuracy is best with modes scaled to Pᵢᵢ = Qᵢᵢ.
    """
    if P.is_cuda:
        return mean_by_products(P, Q, floor)
    members = each(lambda pair: _mean_by_factors(*pair, floor), list(zip(P, Q, strict=True)))
    return Mean(*(torch.stack(parts) for parts in zip(*members, strict=True)))


def mean_by_products(P: Inexact[Tensor, "m n n"], Q: Inexact[Tensor, "m n n"], floor: float) -> Mean:
    """Find [[0, X], [X⁻¹, 0]] as the sign of [[0, P], [Q, 0]]: odd polynomials of degree 5 map [floor, 1] to 1.

    A step takes four products; a floor of 1e-5 takes twelve steps. Polynomials keep the forms Y = T f(Σ) Tᴴ and
    Z = W f(Σ) Wᴴ: values that have not reached 1 are damped, and nothing is divided.
    """
    product = Q @ P
    # (Σσ⁴)^¼ is at least σ₁, and at most 1.5 σ₁ on LRU systems.
    scale = (product * product.mT).sum((-2, -1)).real.clamp_min(torch.finfo(torch.float64).tiny).pow(0.25)
    Y, Z = P / scale[:, None, None], Q / scale[:, None, None]
    for linear, cubic, quintic in sign_polynomials(floor):
        square = Z @ Y
        # linear + cubic S + quintic S² = rest + quintic (S + shift)²: two sums on diagonals replace four on whole
        # matrices, each of which is a kernel launch.
        shift = cubic / (2 * quintic)
        square.diagonal(dim1=-2, dim2=-1).add_(shift)
        change = torch.baddbmm(square, square, square, beta=0, alpha=quintic)
        change.diagonal(dim1=-2, dim2=-1).add_(linear - quintic * shift**2)
        Y, Z = Y @ change, change @ Z
    Y, Z = (Y + Y.mH) / 2, (Z + Z.mH) / 2
    return Mean(Y, Z, (P.conj() * Z).sum((-2, -1)).real)


@cache
def sign_polynomials(floor: float) -> tuple[tuple[float, float, float], ...]:
    """Coefficients of x, x³ and x⁵ for every step, each optimal on the image of [floor, 1] under the steps before."""
    low, high = floor, 1.0
    steps: list[tuple[float, float, float]] = []
    while high - low > 1e-2:
        linear, cubic, quintic, error = _equioscillating(low, high)
        steps.append((linear, cubic, quintic))
        low, high = 1 - error, 1 + error
    # From here convergence is cubic, 1e-2 → 3e-6 → 1e-16, with the Taylor polynomial of x (x²)^{-1/2} at 1.
    return (*steps, (1.875, -1.25, 0.375), (1.875, -1.25, 0.375))


def _equioscillating(low: float, high: float) -> tuple[float, float, float, float]:
    """The odd polynomial of degree 5 nearest to 1 on [low, high], and its distance (Remez 1934)."""
    points = np.linspace(low, high, 4)
    for _ in range(100):
        powers = np.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
        linear, cubic, quintic, error = np.linalg.solve(powers, np.ones(4))
        turns = np.roots([5 * quintic, 3 * cubic, linear]).real  # roots of the derivative, in x²
        found = np.array([low, *np.sort(np.sqrt(np.clip(turns, low**2, high**2))), high])
        if np.abs(found - points).max() < 1e-14:
            break
        points = found
    return float(linear), float(cubic), float(quintic), float(abs(error))


def _mean_by_factors(P: Inexact[Tensor, "n n"], Q: Inexact[Tensor, "n n"], floor: float) -> Mean:
    """Compute the mean from Lc and Lo, with one column per rank: σ² are the eigenvalues of (Loᴴ Lc)ᴴ (Loᴴ Lc)."""
    Lc, Lo = _pivoted_factor(P, floor), _pivoted_factor(Q, floor)
    cross = Lo.mH @ Lc
    squares, V = torch.linalg.eigh(cross.mH @ cross)
    sigma = torch.sqrt(squares.clamp_min(0))
    least = floor * sigma[-1]
    kept = sigma > _LOST * least
    sigma, V = sigma[kept], V[:, kept]
    weight = 1 / torch.maximum(sigma, least)
    right, left = Lc @ V, Lo @ (cross @ V / sigma)
    return Mean((right * weight) @ right.mH, (left * weight) @ left.mH, sigma.sum())


def _pivoted_factor(gramian: Inexact[Tensor, "n n"], floor: float) -> Inexact[Tensor, "n r"]:
    """Cholesky with complete pivoting, down to pivots of floor²: the rest only changes σ of about floor·σ₁."""
    from scipy.linalg import lapack  # takes a while to import

    factorise = lapack.zpstrf if gramian.is_complex() else lapack.dpstrf
    largest = float(gramian.diagonal().real.max())
    if not largest > 0:
        return gramian[:, :1] * 0
    # LAPACK reads by columns, so it gets the transpose, which is the conjugate.
    factor, order, rank, _ = factorise(gramian.resolve_conj().numpy().T, tol=floor**2 * largest, lower=1)
    lower = np.zeros((len(factor), rank), dtype=factor.dtype)
    lower[order - 1] = np.tril(factor)[:, :rank].conj()
    return torch.from_numpy(lower)
