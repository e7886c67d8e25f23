"""X with X Q X = P, the geometric mean P # Q⁻¹: the gradient of Σσ is ½ X⁻¹ with respect to P and ½ X to Q.

X = T Tᴴ and X⁻¹ = W Wᴴ for the balancing T and W, but neither they nor σ are needed one by one. States below floor·σ₁
count for less, down to nothing: their share of Σσ is below n·floor, while they are what makes the Gramians singular.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Inexact
from torch import Tensor

from compressm.control.side_by_side import each

# Where σ is below this share of the floor, rounding has taken its directions: σ² is known to ε σ₁².
_LOST = 1e-2


class Mean(NamedTuple):
    """X, X⁻¹ and Σσ = tr(Q X) = tr(P X⁻¹), each member's own, with the small states damped."""

    mean: Inexact[Tensor, "m n n"]
    inverse: Inexact[Tensor, "m n n"]
    trace: Float[Tensor, " m"]


def geometric_mean(P: Inexact[Tensor, "m n n"], Q: Inexact[Tensor, "m n n"], floor: float) -> Mean:
    """By products alone on a GPU, where nothing waits for anything, and by factors of low rank on a CPU.

    Modes are best scaled so that Pᵢᵢ = Qᵢᵢ.
    """
    if P.is_cuda:
        return mean_by_products(P, Q, floor)
    members = each(lambda pair: _mean_by_factors(*pair, floor), list(zip(P, Q, strict=True)))
    return Mean(*(torch.stack(parts) for parts in zip(*members, strict=True)))


def mean_by_products(P: Inexact[Tensor, "m n n"], Q: Inexact[Tensor, "m n n"], floor: float) -> Mean:
    """The sign of [[0, P], [Q, 0]] is [[0, X], [X⁻¹, 0]]: odd polynomials of degree 5 take all of [floor, 1] to 1.

    Four products a step, and twelve steps for a floor of 1e-5. Polynomials keep Y = T f(Σ) Tᴴ and Z = W f(Σ) Wᴴ, so
    that what has not yet come to 1 is damped and nothing divides.
    """
    product = Q @ P
    # (Σσ⁴)^¼, at least σ₁ and on LRU systems at most 1.5 σ₁.
    scale = (product * product.mT).sum((-2, -1)).real.clamp_min(torch.finfo(torch.float64).tiny).pow(0.25)
    Y, Z = P / scale[:, None, None], Q / scale[:, None, None]
    for linear, cubic, quintic in sign_polynomials(floor):
        square = Z @ Y
        # linear + cubic S + quintic S² = rest + quintic (S + shift)²: two sums on diagonals in the place of four on
        # whole matrices, each of which a GPU launches.
        shift = cubic / (2 * quintic)
        square.diagonal(dim1=-2, dim2=-1).add_(shift)
        change = torch.baddbmm(square, square, square, beta=0, alpha=quintic)
        change.diagonal(dim1=-2, dim2=-1).add_(linear - quintic * shift**2)
        Y, Z = Y @ change, change @ Z
    Y, Z = (Y + Y.mH) / 2, (Z + Z.mH) / 2
    return Mean(Y, Z, (P.conj() * Z).sum((-2, -1)).real)


@cache
def sign_polynomials(floor: float) -> tuple[tuple[float, float, float], ...]:
    """Coefficients of x, x³ and x⁵, step by step, that are best on what the steps before made of [floor, 1]."""
    low, high = floor, 1.0
    steps: list[tuple[float, float, float]] = []
    while high - low > 1e-2:
        linear, cubic, quintic, error = _equioscillating(low, high)
        steps.append((linear, cubic, quintic))
        low, high = 1 - error, 1 + error
    # Cubic from here, 1e-2 → 3e-6 → 1e-16: the Taylor polynomial of x (x²)^{-1/2} at 1.
    return (*steps, (1.875, -1.25, 0.375), (1.875, -1.25, 0.375))


def _equioscillating(low: float, high: float) -> tuple[float, float, float, float]:
    """The odd polynomial of degree 5 nearest to 1 on [low, high], and its distance (Remez 1934)."""
    points = np.linspace(low, high, 4)
    for _ in range(100):
        powers = np.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
        linear, cubic, quintic, error = np.linalg.solve(powers, np.ones(4))
        turns = np.roots([5 * quintic, 3 * cubic, linear]).real  # of the derivative, in x²
        found = np.array([low, *np.sort(np.sqrt(np.clip(turns, low**2, high**2))), high])
        if np.abs(found - points).max() < 1e-14:
            break
        points = found
    return float(linear), float(cubic), float(quintic), float(abs(error))


def _mean_by_factors(P: Inexact[Tensor, "n n"], Q: Inexact[Tensor, "n n"], floor: float) -> Mean:
    """From Lc and Lo of as many columns as the Gramians have rank: σ² are the eigenvalues of (Loᴴ Lc)ᴴ (Loᴴ Lc)."""
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
    """Cholesky's with complete pivoting, up to pivots of floor²: what is left moves only σ of the order of floor·σ₁."""
    from scipy.linalg import lapack  # takes a while to import

    factorise = lapack.zpstrf if gramian.is_complex() else lapack.dpstrf
    largest = float(gramian.diagonal().real.max())
    if not largest > 0:
        return gramian[:, :1] * 0
    # What LAPACK reads by columns is the transpose, that is the conjugate.
    factor, order, rank, _ = factorise(gramian.resolve_conj().numpy().T, tol=floor**2 * largest, lower=1)
    lower = np.zeros((len(factor), rank), dtype=factor.dtype)
    lower[order - 1] = np.tril(factor)[:, :rank].conj()
    return torch.from_numpy(lower)
