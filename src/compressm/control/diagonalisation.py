"""Back to a diagonal A after balancing: what LRU, S4D and S5 layers can store."""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from compressm.control.errors import DefectiveSystemError
from compressm.control.parts import column_norms, row_norms
from compressm.control.side_by_side import eig
from compressm.control.system import DiagonalSystem, LinearSystem

# Balanced systems stay below 223 in 1500 random cases; at 1e8 half the digits of float64 are gone.
_LARGEST_CONDITION = 1e8


def diagonalise(system: LinearSystem, like: DiagonalSystem | None = None) -> DiagonalSystem:
    """The same system with A = diag(λ): B ← X⁻¹B, C ← CX with the eigenvectors X of A, scaled as in `eigenbasis`."""
    X, poles = eigenbasis(system, like)
    return in_eigenbasis(system, X, poles)


def in_eigenbasis(
    system: LinearSystem, X: Complex[Tensor, "*bank n n"], poles: Complex[Tensor, "*bank n"]
) -> DiagonalSystem:
    """(diag(poles), X⁻¹ B, C X)."""
    return DiagonalSystem(poles, torch.linalg.solve(X, system.B.to(X.dtype)), system.C.to(X.dtype) @ X)


def eigenbasis(
    system: LinearSystem, like: DiagonalSystem | None = None
) -> tuple[Complex[Tensor, "*bank n n"], Complex[Tensor, "*bank n"]]:
    """Eigenvectors X and poles of A, with the one freedom left, the length of each column, fixed.

    Column i gives mode i the ratio ρ = ‖bᵢ‖/(γᵢ‖cᵢ‖), γ = √(1 − |λ|²), that the layer `like` had on the average (1
    without it): products are kept, and an optimizer meets B and C of the sizes it knew.
    """
    poles, X = eig(system.A)
    require_eigenvectors(X)
    plain = in_eigenbasis(system, X, poles)
    ratio = 1.0 if like is None else input_output_ratio(like)[..., None]
    b, c = _mode_sizes(plain)
    usable = (b > 0) & (c > 0)
    length = torch.where(usable, torch.sqrt(b / (ratio * torch.where(usable, c, 1))), 1)
    return X * length[..., None, :], poles


def require_eigenvectors(X: Complex[Tensor, "*bank n n"]) -> None:
    """Refuse eigenvectors that are nearly dependent."""
    condition = _condition(X)
    if not bool((condition < _LARGEST_CONDITION).all()):
        worst = condition.max().item()
        raise DefectiveSystemError(
            f"eigenvectors of A have condition number {worst:.3g}, expected < {_LARGEST_CONDITION:g}"
        )


def _condition(X: Tensor) -> Float[Tensor, "*bank"]:
    """‖X‖_F ‖X⁻¹‖_F, which is no smaller than the condition number and needs no SVD; infinite where X is singular."""
    inverse, info = torch.linalg.inv_ex(X)
    product = torch.linalg.matrix_norm(X) * torch.linalg.matrix_norm(inverse)
    return torch.where((info == 0) & torch.isfinite(product), product, torch.inf)


def input_output_ratio(system: DiagonalSystem) -> Float[Tensor, "*bank"]:
    """ρ = rms ‖bᵢ/γᵢ‖ / rms ‖cᵢ‖ over the modes; 1 where either side is zero."""
    b, c = (torch.linalg.vector_norm(sizes, dim=-1) for sizes in _mode_sizes(system))
    usable = (b > 0) & (c > 0)
    return torch.where(usable, b / torch.where(usable, c, 1), 1)


def _mode_sizes(system: DiagonalSystem) -> tuple[Tensor, Tensor]:
    return row_norms(system.B) / torch.sqrt(system.decay), column_norms(system.C)
