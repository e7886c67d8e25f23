"""Square-root balancing: T = Lc V Σ^{-1/2} and W = Lo U Σ^{-1/2} with Loᴴ Lc = U Σ Vᴴ, so that Wᴴ T = I.

Then Wᴴ P W = Σ = Tᴴ Q T. No large matrix is inverted, and only the kept columns are formed. Two routes give the same
numbers: the SVD of Loᴴ Lc, always accurate, and the eigenvectors of Lcᴴ Q Lc, twice as fast. Error bounds, shares and
the numerical rank of a spectrum follow below.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Inexact, Int
from torch import Tensor

from compressm.control import validation
from compressm.control.factors import gramian_factor
from compressm.control.gramians import gramians
from compressm.control.linear_algebra import eigh, eigvalsh, largest_part, power_of_two, square_modulus, svd, svdvals
from compressm.control.system import DiagonalSystem
from compressm.control.validation import NonFiniteError, OrderError, ShapeError

# Lcᴴ Q Lc holds σ², so small σ drown in the rounding of large ones. With states sorted as in `GramianPair`, values
# above 1e-4 σ₁ stay within 1e-14 σ₁ of the SVD's on LRU systems (5e-14 σ₁ and more unsorted); smaller ones use an SVD.
_TRUSTED = 1e-4


@dataclass(frozen=True)
class Balancing:
    """σ of all n states, and the two projections onto the kept ones."""

    sigma: Float[Tensor, "m n"]
    left: Inexact[Tensor, "m n r"]
    right: Inexact[Tensor, "m n r"]

    def rescaled(self, input_scale: Float[Tensor, " m"], output_scale: Float[Tensor, " m"]) -> Balancing:
        """The balancing of the system whose B and C were divided by these scales before."""
        stretch = (torch.sqrt(input_scale) / torch.sqrt(output_scale))[:, None, None]
        sigma = self.sigma * (input_scale * output_scale)[:, None]
        return Balancing(sigma, self.left / stretch, self.right * stretch)


@dataclass(frozen=True)
class GramianPair:
    """P and Q with states sorted by falling Pᵢᵢ Qᵢᵢ: `eigh` then loses far less of the small values.

    `order[i]` is the original index of sorted state i. `system` is the diagonal system of these Gramians, sorted too,
    or None; it helps where they are singular. Q is always exact, P may be measured. B and C, or the states that P was
    measured on, were divided by the powers of two `input_scale` and `output_scale`: P holds squares, which underflow in
    float64 for B below 1e-154.
    """

    P: Inexact[Tensor, "m n n"]
    Q: Inexact[Tensor, "m n n"]
    order: Int[Tensor, "m n"]
    input_scale: Float[Tensor, " m"]
    output_scale: Float[Tensor, " m"]
    system: DiagonalSystem | None = None
    P_is_measured: bool = False

    @classmethod
    def of(
        cls, P: Inexact[Tensor, "m n n"], Q: Inexact[Tensor, "m n n"], system: DiagonalSystem | None = None
    ) -> GramianPair:
        """Scale and sort the given Gramians; with a `system`, P is measured and Q is the system's own."""
        # Exponents are multiples of 4, so that B and C have scales with exact roots: σ, T and W are scaled exactly.
        squares = [power_of_two(largest_part(gramian.detach()), step=4) for gramian in (P, Q)]
        P, Q = (gramian / square[:, None, None] for gramian, square in zip((P, Q), squares, strict=True))
        input_scale, output_scale = (torch.sqrt(square) for square in squares)
        weight = P.diagonal(dim1=-2, dim2=-1).real * Q.diagonal(dim1=-2, dim2=-1).real
        order = weight.detach().argsort(dim=-1, descending=True, stable=True)
        index = (torch.arange(len(order), device=order.device)[:, None, None], order[:, :, None], order[:, None, :])
        if system is not None:
            system = system.detach().divided(torch.ones_like(output_scale), output_scale).reordered(order)
        return cls(P[index], Q[index], order, input_scale, output_scale, system, P_is_measured=True)

    @classmethod
    def of_system(cls, system: DiagonalSystem) -> GramianPair:
        """The exact Gramians of a diagonal system, sorted before they are formed: this moves n numbers, not n²."""
        input_scale, output_scale = system.scales()
        system = system.divided(input_scale, output_scale)
        square = system.decay * system.decay
        weight = square_modulus(system.B).sum(-1) * square_modulus(system.C).sum(-2) / square
        order = weight.detach().argsort(dim=-1, descending=True, stable=True)
        system = system.reordered(order)
        P, Q = gramians(system)
        return cls(P, Q, order, input_scale, output_scale, system.detach())

    @cached_property
    def controllability_factor(self) -> tuple[Inexact[Tensor, "m n n"], bool]:
        """Lc, and True if it is lower triangular."""
        return gramian_factor(self.P, None if self.P_is_measured else self.system, "P")

    @cached_property
    def eigenvectors(self) -> tuple[Float[Tensor, "m n"], Inexact[Tensor, "m n n"]]:
        """σ, blurred where it is small, and the eigenvectors V of Lcᴴ Q Lc: all that depends on no choice of states."""
        squares, V = eigh(_squared_hankel(*self.controllability_factor, self.Q))
        return torch.sqrt(squares.clamp_min(0)).flip(-1), V.flip(-1)

    @cached_property
    def values(self) -> Float[Tensor, "m n"]:
        """σ of the scaled pair, as in `hankel_values`, for those who need the eigenvectors too."""
        return _with_accurate_tail(self)

    def observability_factor(self) -> Inexact[Tensor, "m n n"]:
        """Lo, the controllability factor of the adjoint."""
        return gramian_factor(self.Q, None if self.system is None else self.system.adjoint(), "Q")[0]

    def __getitem__(self, members: Bool[Tensor, " m"] | Int[Tensor, " k"]) -> GramianPair:
        system = None if self.system is None else self.system[members]
        input_scale, output_scale = self.input_scale[members], self.output_scale[members]
        P, Q, order = self.P[members], self.Q[members], self.order[members]
        chosen = GramianPair(P, Q, order, input_scale, output_scale, system, self.P_is_measured)
        # Everything that is known of all members is known of these.
        known = ("controllability_factor", "eigenvectors", "values")
        vars(chosen).update({name: _selected(vars(self)[name], members) for name in known if name in vars(self)})
        return chosen

    @property
    def sigma_scale(self) -> Float[Tensor, "m 1"]:
        """The factor that turns σ of these scaled Gramians into σ of the system."""
        return (self.input_scale * self.output_scale)[:, None]


def _selected(known: Any, members: Tensor) -> Any:
    if isinstance(known, tuple):
        return tuple(_selected(part, members) for part in known)
    return known[members] if isinstance(known, Tensor) else known


def hankel_values(pair: GramianPair) -> Float[Tensor, "m n"]:
    """σ of the scaled pair, falling; the caller multiplies by `sigma_scale`.

    The error is within 1e-14 σ₁ on LRU systems; at worst the fast route is off by ε σ₁²/σₙ, 1e-12 σ₁.
    """
    Lc, triangular = pair.controllability_factor
    if not triangular or bool((_smallest_value_guess(pair, Lc) <= _TRUSTED).any()):
        return svdvals(pair.observability_factor().mH @ Lc)
    squares = eigvalsh(_squared_hankel(Lc, triangular, pair.Q))
    sigma = torch.sqrt(squares.clamp_min(0)).flip(-1)
    blurred = sigma[:, -1] <= _TRUSTED * sigma[:, 0]
    if bool(blurred.any()):
        sigma[blurred] = svdvals(pair[blurred].observability_factor().mH @ Lc[blurred])
    return sigma


def _smallest_value_guess(pair: GramianPair, Lc: Tensor) -> Float[Tensor, " m"]:
    """Estimate σₙ/σ₁, within a factor 3 on LRU systems; the estimate only decides which route to try first.

    σₙ ≈ min |Lcᵢᵢ Loᵢᵢ|, assuming Loᵢᵢ²/Qᵢᵢ = Lcᵢᵢ²/Pᵢᵢ, and σ₁ ≥ ‖Loᴴ l‖ for the first column l of Lc.
    """
    P, Q = (gramian.diagonal(dim1=-2, dim2=-1).real for gramian in (pair.P, pair.Q))
    smallest = (square_modulus(Lc.diagonal(dim1=-2, dim2=-1)) * torch.sqrt(Q / P)).amin(-1)
    first = Lc[..., :1]
    return smallest / torch.sqrt((first.mH @ (pair.Q @ first)).real[:, 0, 0])


def balance(pair: GramianPair, states: Int[Tensor, "m r"]) -> Balancing:
    """Balance each member onto the given states, by the fast route where it is accurate."""
    result = balance_sorted(pair, states)
    back = torch.argsort(pair.order, dim=-1)[..., None].expand_as(result.left)
    sorted_back = Balancing(result.sigma, result.left.gather(-2, back), result.right.gather(-2, back))
    return sorted_back.rescaled(pair.input_scale, pair.output_scale)


def balance_sorted(pair: GramianPair, states: Int[Tensor, "m r"]) -> Balancing:
    """Balance like `balance`, but keep the order and scale of the pair."""
    sigma, _ = pair.eigenvectors
    trusted = (sigma.gather(-1, states) > _TRUSTED * sigma[:, :1]).all(-1)
    if bool(trusted.all()):
        return _from_eigenvectors(pair, states)
    unsure = pair[~trusted]
    exact = balance_factors(unsure.controllability_factor[0], unsure.observability_factor(), states[~trusted])
    if not bool(trusted.any()):
        return exact
    return _merge(trusted, _from_eigenvectors(pair[trusted], states[trusted]), exact)


def balance_factors(
    Lc: Inexact[Tensor, "m n n"], Lo: Inexact[Tensor, "m n n"], states: Int[Tensor, "m r"]
) -> Balancing:
    """Balance by the SVD of Loᴴ Lc, P = Lc Lcᴴ, Q = Lo Loᴴ; states whose σ is rounding noise get zero columns."""
    U, sigma, Vh = svd(Lo.mH @ Lc)
    noise = torch.arange(sigma.shape[-1], device=sigma.device) >= numerical_rank(sigma)[:, None]
    scale = torch.rsqrt(sigma).masked_fill(noise, 0).gather(-1, states)[:, None, :]
    left, right = Lo @ (_columns(U, states) * scale), Lc @ (_columns(Vh.mH, states) * scale)
    return Balancing(sigma, _biorthogonal(left, right, empty=noise.gather(-1, states)), right)


def _biorthogonal(left: Tensor, right: Tensor, empty: Bool[Tensor, "m r"] | None = None) -> Tensor:
    """W (Wᴴ T)^{-ᴴ}: Wᴴ T = I to the last bit, and W keeps the range of Q T, so A stays a contraction."""
    gram = left.mH @ right
    if empty is not None:
        gram = gram + torch.diag_embed(empty.to(gram.dtype))
    return torch.linalg.solve(gram, left.mH).mH


def _from_eigenvectors(pair: GramianPair, states: Tensor) -> Balancing:
    """Balance by the eigenvectors V of Lcᴴ Q Lc."""
    (Lc, _), (sigma, V) = pair.controllability_factor, pair.eigenvectors
    kept = sigma.gather(-1, states)[:, None, :]
    right = Lc @ (_columns(V, states) * torch.rsqrt(kept))
    left = _biorthogonal(pair.Q @ right / kept, right)
    return Balancing(pair.values, left, right)


def _with_accurate_tail(pair: GramianPair) -> Tensor:
    """Replace the small σᵢ, which squaring has blurred, by the singular values of Loᴴ Lc on their subspace."""
    (Lc, _), (sigma, V) = pair.controllability_factor, pair.eigenvectors
    tail = int((sigma <= _TRUSTED * sigma[:, :1]).sum(-1).amax())
    if tail == 0:
        return sigma
    head = sigma.shape[-1] - tail
    accurate = svdvals(pair.observability_factor().mH @ (Lc @ V[..., head:]))
    return torch.cat([sigma[:, :head], accurate], dim=-1).sort(dim=-1, descending=True).values


def _squared_hankel(Lc: Tensor, triangular: bool, Q: Tensor) -> Inexact[Tensor, "m n n"]:
    """Lcᴴ Q Lc, its lower triangle, which eigh reads; a triangular Lc halves the work (8 of 16 half-size blocks)."""
    if not triangular:
        return Lc.mH @ (Q @ Lc)
    half = Lc.shape[-1] // 2
    first, last = Lc[..., :half], Lc[..., half:, half:]
    moved = Q @ first
    lower = torch.zeros_like(Q)
    lower[..., :half, :half] = first.mH @ moved
    lower[..., half:, :half] = last.mH @ moved[..., half:, :]
    lower[..., half:, half:] = last.mH @ (Q[..., half:, half:] @ last)
    return lower


def _merge(first: Bool[Tensor, " m"], yes: Balancing, no: Balancing) -> Balancing:
    """Merge two results into one bank: `yes` holds the members where `first` is True, `no` the others."""
    place = torch.argsort(torch.cat([torch.nonzero(first), torch.nonzero(~first)]).flatten())
    return Balancing(*(torch.cat([getattr(yes, f.name), getattr(no, f.name)])[place] for f in fields(Balancing)))


def _columns(matrix: Tensor, states: Tensor) -> Tensor:
    return matrix.gather(-1, states[:, None, :].expand(*matrix.shape[:-1], states.shape[-1]))


# A share of σ₁: singular values computed by different routes are sorted up to rounding.
_RISE = 1e-12


def error_bounds(sigma: Float[Tensor, "*bank n"]) -> Float[Tensor, "*bank n+1"]:
    """bounds[r] = 2 Σ_{i>r} σᵢ bounds the H∞ error of keeping r states, r = 0 … n (Enns 1984; Glover 1984).

    This is the formula for exact arithmetic, which policies compare; `Truncation.error_bound` adds `rounding_floor`.
    """
    _require_spectrum(sigma)
    _require_falling(sigma.detach())
    tails = sigma.flip(-1).cumsum(-1).flip(-1)  # smallest first: small tails keep their digits
    return 2 * torch.cat([tails, torch.zeros_like(tails[..., :1])], dim=-1)


# Over 10,000 systems the error exceeded 2 Σ of the dropped σ by at most 4.6 max(n, κ) ε σ₁ / (1 − ρ), whether 1 − ρ was
# 1 or 1e-8 (benchmarks/results/error_bound_floor.json); 16 leaves a margin of more than 3.
_ROUNDING = 16.0


def rounding_floor(
    sigma: Float[Tensor, "*bank n"], margin: Float[Tensor, "*bank"], condition: Float[Tensor, "*bank"] | float = 1.0
) -> Float[Tensor, "*bank"]:
    """16 max(n, κ) ε σ₁ / (1 − ρ): the H∞ error that rounding adds to a truncation; `margin` is 1 − ρ.

    Poles of a reduced system are exact to ε. That changes a resonance, of width 1 − |λ| and a height of about 2 σ₁, by
    the share ε / (1 − |λ|). `condition` is κ, that of the eigenvectors if A was made diagonal.
    """
    n, eps = sigma.shape[-1], torch.finfo(torch.float64).eps
    amplified = torch.as_tensor(condition, dtype=torch.float64, device=sigma.device).clamp_min(n)
    return _ROUNDING * eps * amplified / margin * sigma.amax(-1)


def bottom_shares(sigma: Float[Tensor, "*bank n"]) -> Float[Tensor, "*bank n+1"]:
    """shares[r] = the sum of the r smallest values over Σσ, r = 0 … n; all zero for a spectrum of zeros."""
    _require_spectrum(sigma)
    smallest_first = sigma.sort(dim=-1).values.cumsum(-1)
    total = smallest_first[..., -1:]
    shares = smallest_first / torch.where(total > 0, total, 1)
    return torch.cat([torch.zeros_like(total), shares], dim=-1)


def numerical_rank(sigma: Float[Tensor, "*bank n"]) -> Int[Tensor, "*bank"]:
    """The number of σᵢ above rounding noise, σᵢ > n ε σ₁."""
    _require_spectrum(sigma)
    # Scaled, because ε σ₁ underflows for σ₁ below 1e-308.
    sigma = validation.to_double(sigma)
    scaled = sigma / power_of_two(sigma.amax(-1, keepdim=True))
    return (scaled > sigma.shape[-1] * torch.finfo(torch.float64).eps * scaled.amax(-1, keepdim=True)).sum(-1)


def _require_spectrum(sigma: Tensor) -> None:
    if not isinstance(sigma, Tensor):
        raise ShapeError(f"sigma is a {type(sigma).__name__}, expected a tensor (*bank, n)")
    if sigma.ndim == 0:
        raise ShapeError("sigma has shape (), expected (*bank, n)")
    validation.require_real("sigma", sigma)
    validation.require_values("sigma", sigma)
    if sigma.shape[-1] == 0 or not bool((sigma >= 0).all()) or not bool(torch.isfinite(sigma).all()):
        raise NonFiniteError(
            f"sigma is {sigma.detach().cpu().tolist()!r:.200}, expected at least one value, all finite and >= 0"
        )


def _require_falling(sigma: Tensor) -> None:
    rise = sigma[..., 1:] - sigma[..., :-1]
    rising = torch.nonzero(rise > _RISE * sigma.amax(-1, keepdim=True))
    if len(rising):
        *member, i = (int(k) for k in rising[0])
        values = sigma[tuple(member)]
        raise OrderError(
            f"sigma{[*member, i + 1]} is {values[i + 1]:.6g} after {values[i]:.6g}, expected falling values: sort them"
        )
