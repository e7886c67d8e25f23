"""Square-root balancing: T = Lc V Σ^{-1/2} and W = Lo U Σ^{-1/2} with Loᴴ Lc = U Σ Vᴴ, so that Wᴴ T = I.

Then Wᴴ P W = Σ = Tᴴ Q T. No large matrix is inverted, and only the kept columns are formed. Two routes give the same
numbers: the SVD of Loᴴ Lc, always accurate, and the eigenvectors of Lcᴴ Q Lc, twice as fast. Error bounds, shares and
the numerical rank of a spectrum follow below.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Inexact, Int
from torch import Tensor

from compressm.control import validation
from compressm.control.factors import gramian_factor
from compressm.control.gramians import gramians
from compressm.control.linear_algebra import eigh, eigvalsh, largest_part, square_modulus, svd, svdvals
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


@dataclass(frozen=True)
class GramianPair:
    """P and Q with states sorted by falling Pᵢᵢ Qᵢᵢ: `eigh` then loses far less of the small values.

    `order[i]` is the original index of sorted state i. `system` is the diagonal system of these Gramians, sorted too,
    or None; it helps where they are singular. Q is always exact, P may be measured. B and C were divided by the powers
    of two `input_scale` and `output_scale`: P holds squares, which underflow in float64 for B below 1e-154.
    """

    P: Inexact[Tensor, "m n n"]
    Q: Inexact[Tensor, "m n n"]
    order: Int[Tensor, "m n"]
    system: DiagonalSystem | None = None
    P_is_measured: bool = False
    input_scale: Float[Tensor, " m"] | float = 1.0
    output_scale: Float[Tensor, " m"] | float = 1.0

    @classmethod
    def of(
        cls, P: Inexact[Tensor, "m n n"], Q: Inexact[Tensor, "m n n"], system: DiagonalSystem | None = None
    ) -> GramianPair:
        """Sort the given Gramians; with a `system`, P is measured and Q is the system's own."""
        weight = P.diagonal(dim1=-2, dim2=-1).real * Q.diagonal(dim1=-2, dim2=-1).real
        order = weight.detach().argsort(dim=-1, descending=True, stable=True)
        index = (torch.arange(len(order), device=order.device)[:, None, None], order[:, :, None], order[:, None, :])
        system = None if system is None else system.detach().reordered(order)
        return cls(P[index], Q[index], order, system, P_is_measured=True)

    @classmethod
    def of_system(cls, system: DiagonalSystem) -> GramianPair:
        """The exact Gramians of a diagonal system, sorted before they are formed: this moves n numbers, not n²."""
        input_scale, output_scale = power_of_two(system.B), power_of_two(system.C)
        B, C = system.B / input_scale[:, None, None], system.C / output_scale[:, None, None]
        system = DiagonalSystem._unchecked(system.poles, system.log_poles, B, C)
        square = system.decay * system.decay
        weight = square_modulus(system.B).sum(-1) * square_modulus(system.C).sum(-2) / square
        order = weight.detach().argsort(dim=-1, descending=True, stable=True)
        system = system.reordered(order)
        P, Q = gramians(system)
        return cls(P, Q, order, system.detach(), input_scale=input_scale, output_scale=output_scale)

    def controllability_factor(self) -> tuple[Inexact[Tensor, "m n n"], bool]:
        """Lc, and True if it is lower triangular."""
        return gramian_factor(self.P, None if self.P_is_measured else self.system, "P")

    def observability_factor(self) -> Inexact[Tensor, "m n n"]:
        """Lo, the controllability factor of the adjoint."""
        return gramian_factor(self.Q, None if self.system is None else self.system.adjoint(), "Q")[0]

    def __getitem__(self, members: Bool[Tensor, " m"]) -> GramianPair:
        system = None if self.system is None else self.system[members]
        return GramianPair(self.P[members], self.Q[members], self.order[members], system, self.P_is_measured)

    @property
    def sigma_scale(self) -> Tensor | float:
        """The factor that turns σ of these scaled Gramians into σ of the system."""
        scale = self.input_scale * self.output_scale
        return scale[:, None] if isinstance(scale, Tensor) else scale


def power_of_two(matrix: Inexact[Tensor, "m i j"]) -> Float[Tensor, " m"]:
    """The next power of two above the largest real or imaginary part of each member; 1 for zeros."""
    largest = largest_part(matrix.detach())
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent), 1)


def hankel_values(pair: GramianPair) -> Float[Tensor, "m n"]:
    """σ of the scaled pair, falling; the caller multiplies by `sigma_scale`.

    The error is within 1e-14 σ₁ on LRU systems; at worst the fast route is off by ε σ₁²/σₙ, 1e-12 σ₁.
    """
    Lc, triangular = pair.controllability_factor()
    if not triangular or bool((_smallest_value_guess(pair, Lc) <= _TRUSTED).any()):
        return svdvals(pair.observability_factor().mH @ Lc)
    squares = eigvalsh(_squared_hankel(Lc, pair.Q, triangular))
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
    left, right = result.left.gather(-2, back), result.right.gather(-2, back)
    if isinstance(pair.input_scale, Tensor) and isinstance(pair.output_scale, Tensor):
        stretch = (torch.sqrt(pair.input_scale) / torch.sqrt(pair.output_scale))[:, None, None]
        left, right = left / stretch, right * stretch
    return Balancing(result.sigma * pair.sigma_scale, left, right)


def balance_sorted(pair: GramianPair, states: Int[Tensor, "m r"]) -> Balancing:
    """Balance like `balance`, but keep the order and scale of the pair."""
    Lc, triangular = pair.controllability_factor()
    squares, V = eigh(_squared_hankel(Lc, pair.Q, triangular))
    sigma, V = torch.sqrt(squares.clamp_min(0)).flip(-1), V.flip(-1)
    trusted = (sigma.gather(-1, states) > _TRUSTED * sigma[:, :1]).all(-1)
    if bool(trusted.all()):
        return _from_eigenvectors(pair, sigma, V, Lc, states)
    exact = balance_factors(Lc[~trusted], pair[~trusted].observability_factor(), states[~trusted])
    if not bool(trusted.any()):
        return exact
    fast = _from_eigenvectors(pair[trusted], *(part[trusted] for part in (sigma, V, Lc, states)))
    return _merge(trusted, fast, exact)


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


def _from_eigenvectors(pair: GramianPair, sigma: Tensor, V: Tensor, Lc: Tensor, states: Tensor) -> Balancing:
    """Balance by the eigenvectors V of Lcᴴ Q Lc."""
    kept = sigma.gather(-1, states)[:, None, :]
    right = Lc @ (_columns(V, states) * torch.rsqrt(kept))
    left = _biorthogonal(pair.Q @ right / kept, right)
    return Balancing(_with_accurate_tail(pair, sigma, V, Lc), left, right)


def _with_accurate_tail(pair: GramianPair, sigma: Tensor, V: Tensor, Lc: Tensor) -> Tensor:
    """Replace the small σᵢ, which squaring has blurred, by the singular values of Loᴴ Lc on their subspace."""
    tail = int((sigma <= _TRUSTED * sigma[:, :1]).sum(-1).amax())
    if tail == 0:
        return sigma
    head = sigma.shape[-1] - tail
    accurate = svdvals(pair.observability_factor().mH @ (Lc @ V[..., head:]))
    return torch.cat([sigma[:, :head], accurate], dim=-1).sort(dim=-1, descending=True).values


def _squared_hankel(Lc: Tensor, Q: Tensor, triangular: bool) -> Inexact[Tensor, "m n n"]:
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
    """bounds[r] = 2 Σ_{i>r} σᵢ bounds the H∞ error of keeping r states, r = 0 … n (Enns 1984; Glover 1984)."""
    _require_spectrum(sigma)
    _require_falling(sigma.detach())
    tails = sigma.flip(-1).cumsum(-1).flip(-1)  # smallest first: small tails keep their digits
    return 2 * torch.cat([tails, torch.zeros_like(tails[..., :1])], dim=-1)


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
    floor = sigma.shape[-1] * torch.finfo(torch.float64).eps * sigma.amax(-1, keepdim=True)
    return (sigma > floor).sum(-1)


def _require_spectrum(sigma: Tensor) -> None:
    if not isinstance(sigma, Tensor):
        raise ShapeError(f"sigma is a {type(sigma).__name__}, expected a tensor (*bank, n)")
    if sigma.ndim == 0:
        raise ShapeError("sigma has shape (), expected (*bank, n)")
    validation.require_real("sigma", sigma)
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
