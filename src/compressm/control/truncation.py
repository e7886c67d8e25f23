"""Balanced truncation: the smaller system, the two projections, the error bound; and diagonal forms by eigenvectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import SupportsIndex

import torch
from jaxtyping import Complex, Float, Inexact, Int
from torch import Tensor

from compressm.control import validation
from compressm.control.balancing import Balancing, balance, balance_factors, numerical_rank, rounding_floor
from compressm.control.hankel import dense_factors, gramian_pair
from compressm.control.linear_algebra import column_norms, eig, power_of_two, row_norms
from compressm.control.system import DenseSystem, DiagonalSystem, LinearSystem, require_system
from compressm.control.validation import DefectiveSystemError, OrderError, ShapeError


@dataclass(frozen=True)
class Truncation:
    """A system and its reduction: A_r = Wᴴ A T, B_r = Wᴴ B, C_r = C T, with Wᴴ T = I."""

    system: LinearSystem
    sigma: Float[Tensor, "*bank n"]
    left: Inexact[Tensor, "*bank n r"]
    right: Inexact[Tensor, "*bank n r"]
    error_bound: Float[Tensor, "*bank"] | None
    states: Int[Tensor, "*bank r"]
    original: LinearSystem

    @property
    def order(self) -> int:
        return self.system.order

    def diagonalise(self) -> Truncation:
        """The same reduction with a diagonal A: `right` becomes Φ = T X, `left` Ψ = W X⁻ᴴ, still Ψᴴ Φ = I.

        The bound grows if the eigenvectors X are ill-conditioned, because they amplify rounding.
        """
        like = self.original if isinstance(self.original, DiagonalSystem) else None
        X, poles = eigenbasis(self.system, like)
        left = torch.linalg.solve(X, self.left.mH.to(X.dtype)).mH
        bound = self.error_bound
        if bound is not None:
            margin = self.original.stability_margin
            bound = _dropped(self.sigma, self.states) + rounding_floor(self.sigma, margin, condition_number(X))
        system = in_eigenbasis(self.system, X, poles)
        return replace(self, system=system, left=left, right=self.right.to(X.dtype) @ X, error_bound=bound)


def balanced_truncation(
    system: LinearSystem,
    order: SupportsIndex | None = None,
    *,
    states: Sequence[int] | Int[Tensor, "..."] | None = None,
    P: Inexact[Tensor, "*bank n n"] | None = None,
) -> Truncation:
    """Keep the `order` balanced states with the largest σ, or the states named in `states`.

    The H∞ error is at most `error_bound`, 2 Σ of the dropped σ plus `rounding_floor`, whichever states are dropped, and
    the result is stable. With a measured `P` and the exact Q it is stable too, because W = Q T S⁻¹ makes A_r the
    Q-orthogonal projection of A, a contraction; but there is no bound, and `error_bound` is None. An order above the
    numerical rank #{σ > n ε σ₁} keeps only that many states (at least one): the others are rounding noise.
    """
    require_system("balanced_truncation", system)
    return truncated(system, order, states, lambda system, kept: _balance(system, P, kept), bounded=P is None)


def truncated(
    system: LinearSystem,
    order: SupportsIndex | None,
    states: Sequence[int] | Int[Tensor, "..."] | None,
    balance_onto: Callable[[LinearSystem, Tensor], Balancing],
    *,
    bounded: bool,
) -> Truncation:
    """Truncate like `balanced_truncation`, with a balancing from the caller, whose P is exact if it is `bounded`."""
    n, bank = system.order, system.bank
    indices = _kept_states(order, states, system)
    with torch.no_grad():
        system = system.detach()
        flat = balance_onto(system, indices.reshape(-1, indices.shape[-1]))
        if states is None:
            flat, indices = _within_rank(flat, indices)
        sigma, left, right = (part.reshape(*bank, n, *part.shape[2:]) for part in (flat.sigma, flat.left, flat.right))
        bound = _dropped(sigma, indices) + rounding_floor(sigma, system.stability_margin) if bounded else None
        return Truncation(_project(system, left, right), sigma, left, right, bound, indices, system)


def _balance(system: LinearSystem, P: Tensor | None, indices: Tensor) -> Balancing:
    n = system.order
    if P is None and isinstance(system, DenseSystem):
        Lc, Lo = dense_factors(system)
        return balance_factors(Lc.reshape(-1, n, n), Lo.reshape(-1, n, n), indices)
    return balance(gramian_pair(system, P), indices)


def _kept_states(
    order: SupportsIndex | None, states: Sequence[int] | Tensor | None, system: LinearSystem
) -> Int[Tensor, "*bank r"]:
    if states is None:
        if order is None:
            raise OrderError(f"neither order nor states given; pass order, an integer from 1 to {system.order}")
        kept = torch.arange(validation.require_order(order, system.order), device=system.device)
    else:
        size = None if order is None else validation.require_order(order, system.order)
        kept = _state_numbers(states, system.order)
        _check_states(kept, size, system)
    return kept.to(system.device, torch.int64).expand(*system.bank, kept.shape[-1])


def _state_numbers(states: object, n: int) -> Int[Tensor, "... r"]:
    wanted = f"states must be integer indices from 0 to {n - 1}, in a list or a tensor"
    try:
        numbers = states if isinstance(states, Tensor) else torch.as_tensor(states, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise OrderError(f"{wanted}; got {states!r:.100}") from None
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool or numbers.ndim < 1:
        raise OrderError(f"{wanted}; got {numbers.dtype} of shape {tuple(numbers.shape)}")
    return numbers.to(torch.int64)


def _check_states(states: Tensor, order: int | None, system: LinearSystem) -> None:
    n = system.order
    if states.shape[:-1] not in ((), system.bank):
        raise ShapeError(f"states have shape {tuple(states.shape)}, expected (r,) or {(*system.bank, 'r')}")
    if not 1 <= states.shape[-1] <= n or (order is not None and states.shape[-1] != order):
        raise OrderError(f"{states.shape[-1]} states named, expected {order if order is not None else f'1 to {n}'}")
    if int(states.min()) < 0 or int(states.max()) >= n:
        raise OrderError(f"states {states.tolist()} are outside 0..{n - 1}")
    ordered = states.sort(dim=-1).values
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise OrderError(f"states {states.tolist()} name a state twice, expected each at most once")


def _within_rank(flat: Balancing, indices: Tensor) -> tuple[Balancing, Tensor]:
    """Drop the columns beyond the numerical rank of every member of the bank."""
    rank = max(1, int(numerical_rank(flat.sigma).amax()))
    if rank >= indices.shape[-1]:
        return flat, indices
    return Balancing(flat.sigma, flat.left[..., :rank], flat.right[..., :rank]), indices[..., :rank]


def _dropped(sigma: Tensor, kept: Tensor) -> Float[Tensor, "*bank"]:
    """2 Σ of the dropped σ; kept ones are set to 0, which adds no rounding error."""
    return 2 * sigma.scatter(-1, kept, 0).sort(dim=-1).values.sum(-1)


def _project(system: LinearSystem, left: Tensor, right: Tensor) -> DenseSystem:
    moved = system.poles[..., None] * right if isinstance(system, DiagonalSystem) else system.A.to(right.dtype) @ right
    return DenseSystem._unchecked(left.mH @ moved, left.mH @ system.B.to(left.dtype), system.C.to(right.dtype) @ right)


# Balanced systems stayed below 223 in 1500 random cases; at 1e8 half the digits of float64 are lost.
_LARGEST_CONDITION = 1e8


def diagonalise(system: LinearSystem, like: DiagonalSystem | None = None) -> DiagonalSystem:
    """The same system with A = diag(λ): B ← X⁻¹B, C ← CX with the eigenvectors X of A, scaled as in `eigenbasis`."""
    require_system("diagonalise", system)
    if like is not None:
        validation.require_kind("like", like, DiagonalSystem)
    X, poles = eigenbasis(system, like)
    return in_eigenbasis(system, X, poles)


def in_eigenbasis(
    system: LinearSystem, X: Complex[Tensor, "*bank n n"], poles: Complex[Tensor, "*bank n"]
) -> DiagonalSystem:
    """The system (diag(poles), X⁻¹ B, C X)."""
    return DiagonalSystem(poles, torch.linalg.solve(X, system.B.to(X.dtype)), system.C.to(X.dtype) @ X)


def eigenbasis(
    system: LinearSystem, like: DiagonalSystem | None = None
) -> tuple[Complex[Tensor, "*bank n n"], Complex[Tensor, "*bank n"]]:
    """Eigenvectors X and poles of A, with the length of each column, which is free, fixed as follows.

    Column i gives mode i the ratio ρ = ‖bᵢ‖/(γᵢ‖cᵢ‖), γ = √(1 − |λ|²), that the layer `like` had on average (1
    without `like`). Products of B and C do not change, and B and C keep the sizes that the optimizer knows.
    """
    poles, X = eig(system.A)
    require_eigenvectors(X)
    plain = in_eigenbasis(system, X, poles)
    ratio = 1.0 if like is None else input_output_ratio(like)[..., None]
    b, c = _mode_sizes(plain)
    usable = (b > 0) & (c > 0)
    # Scaled together, because ratio · c underflows if B is far smaller than C.
    scale = power_of_two(torch.maximum(b, c))
    length = torch.where(usable, torch.sqrt(b / scale / (ratio * torch.where(usable, c / scale, 1))), 1)
    return X * length[..., None, :], poles


def require_eigenvectors(X: Complex[Tensor, "*bank n n"]) -> None:
    """Refuse eigenvectors that are nearly linearly dependent."""
    condition = _condition(X)
    if not bool((condition < _LARGEST_CONDITION).all()):
        worst = condition.max().item()
        raise DefectiveSystemError(
            f"eigenvectors of A have condition number {worst:.3g}, expected < {_LARGEST_CONDITION:g}"
        )


def condition_number(X: Complex[Tensor, "*bank n n"]) -> Float[Tensor, "*bank"]:
    """‖X‖_F ‖X⁻¹‖_F of X with columns of length 1."""
    return _condition(X / column_norms(X)[..., None, :])


def _condition(X: Tensor) -> Float[Tensor, "*bank"]:
    """‖X‖_F ‖X⁻¹‖_F, an upper bound of the condition number that needs no SVD; infinite where X is singular."""
    inverse, info = torch.linalg.inv_ex(X)
    product = torch.linalg.matrix_norm(X) * torch.linalg.matrix_norm(inverse)
    return torch.where((info == 0) & torch.isfinite(product), product, torch.inf)


def input_output_ratio(system: DiagonalSystem) -> Float[Tensor, "*bank"]:
    """ρ = rms ‖bᵢ/γᵢ‖ / rms ‖cᵢ‖ over the modes; 1 where either side is zero."""
    validation.require_kind("input_output_ratio", system, DiagonalSystem, hint="call diagonalise first")
    input_scale, output_scale = system.scales()
    b, c = (torch.linalg.vector_norm(sizes, dim=-1) for sizes in _mode_sizes(system.divided(input_scale, output_scale)))
    usable = (b > 0) & (c > 0)
    ratio = b / torch.where(usable, c, 1) * (input_scale / output_scale)
    return torch.where(usable, ratio.clamp(2.0**-1020, 2.0**1020), 1)


def mode_norms(system: DiagonalSystem) -> tuple[Float[Tensor, "*bank n"], Float[Tensor, "*bank n"]]:
    """‖bᵢ‖ and ‖cᵢ‖ of every mode."""
    input_scale, output_scale = system.scales()
    scaled = system.divided(input_scale, output_scale)
    return row_norms(scaled.B) * input_scale[..., None], column_norms(scaled.C) * output_scale[..., None]


def _mode_sizes(system: DiagonalSystem) -> tuple[Tensor, Tensor]:
    b, c = mode_norms(system)
    return b / torch.sqrt(system.decay), c
