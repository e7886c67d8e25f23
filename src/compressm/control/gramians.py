"""How strongly inputs drive each state (P), and how strongly each state drives outputs (Q)."""

from __future__ import annotations

import torch
from jaxtyping import Inexact
from torch import Tensor

from compressm.control import validation
from compressm.control.errors import ShapeError
from compressm.control.factors import require_semidefinite
from compressm.control.lyapunov import lyapunov_by_doubling
from compressm.control.poles import one_minus_products, reciprocal_products
from compressm.control.system import DiagonalSystem, LinearSystem


def controllability_gramian(
    system: LinearSystem, input_covariance: Inexact[Tensor, "... p p"] | None = None
) -> Inexact[Tensor, "*bank n n"]:
    """P = A P Aᴴ + B Σᵤ Bᴴ; for diagonal A, Pᵢⱼ = (B Σᵤ Bᴴ)ᵢⱼ / (1 − λᵢ λ̄ⱼ).

    The paper's closed form (app:lyapunov-sol) has λᵢ λⱼ, which holds for real poles alone. Σᵤ is the identity, that is
    white noise at the input, unless a covariance of shape (p, p) or (*bank, p, p) is given.
    """
    covariance = None if input_covariance is None else _covariance(system, input_covariance)
    B = system.B if covariance is None else system.B.to(covariance.dtype)
    drive = (B if covariance is None else B @ covariance) @ B.mH
    if isinstance(system, DiagonalSystem):
        return _hermitian(drive / one_minus_products(system.poles, system.log_poles))
    return lyapunov_by_doubling(system.A.to(drive.dtype), drive)


def observability_gramian(system: LinearSystem) -> Inexact[Tensor, "*bank n n"]:
    """Q = Aᴴ Q A + Cᴴ C: the controllability Gramian of the adjoint."""
    return controllability_gramian(system.adjoint())


def gramians(system: LinearSystem) -> tuple[Inexact[Tensor, "*bank n n"], Inexact[Tensor, "*bank n n"]]:
    """P and Q at once, Hermitian up to rounding: for diagonal A they share the expensive part, 1/(1 − λᵢ λ̄ⱼ)."""
    if not isinstance(system, DiagonalSystem):
        return controllability_gramian(system), observability_gramian(system)
    weights, conjugates = reciprocal_products(system.poles, system.log_poles)
    return (system.B @ system.B.mH) * weights, (system.C.mH @ system.C) * conjugates


def _hermitian(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mH) / 2


def _covariance(system: LinearSystem, covariance: Tensor) -> Tensor:
    """Checked, and complex if the system or itself is."""
    covariance = validation.require_tensor("input_covariance", covariance, "p p")
    p, bank = system.inputs, covariance.shape[:-2]
    if covariance.shape[-2:] != (p, p) or bank not in ((), system.bank):
        raise ShapeError(
            f"input_covariance has shape {tuple(covariance.shape)}, expected {(p, p)} or {(*system.bank, p, p)}"
        )
    covariance = validation.require_gramian("input_covariance", covariance, bank, p, system.device)
    require_semidefinite("input_covariance", covariance)
    return covariance.to(torch.promote_types(system.dtype, covariance.dtype))
