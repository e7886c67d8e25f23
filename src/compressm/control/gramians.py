"""Gramians: how strongly inputs drive each state (P), and how strongly each state drives outputs (Q).

Diagonal systems have a closed form; dense ones need the discrete Lyapunov equation, solved by doubling. A Gramian can
also be measured on data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Inexact
from torch import Tensor

from compressm.control import validation
from compressm.control.factors import require_semidefinite
from compressm.control.linear_algebra import COARSE_SCALES, coarse_scale, largest_part, power_of_two
from compressm.control.poles import one_minus_products, reciprocal_products
from compressm.control.system import DiagonalSystem, LinearSystem, require_system
from compressm.control.validation import PrecisionError, ShapeError, UnstableSystemError


def controllability_gramian(
    system: LinearSystem, input_covariance: Inexact[Tensor, "... p p"] | None = None
) -> Inexact[Tensor, "*bank n n"]:
    """P = A P Aᴴ + B Σᵤ Bᴴ; for diagonal A, Pᵢⱼ = (B Σᵤ Bᴴ)ᵢⱼ / (1 − λᵢ λ̄ⱼ).

    The paper's closed form (app:lyapunov-sol) has λᵢ λⱼ, which holds for real poles only. Σᵤ has shape (p, p) or
    (*bank, p, p); by default it is the identity, white noise at the input.
    """
    require_system("controllability_gramian", system)
    covariance = None if input_covariance is None else _covariance(system, input_covariance)
    B = system.B if covariance is None else system.B.to(covariance.dtype)
    drive = (B if covariance is None else B @ covariance) @ B.mH
    if isinstance(system, DiagonalSystem):
        return _hermitian(drive / one_minus_products(system.poles, system.log_poles))
    return lyapunov_by_doubling(system.A.to(drive.dtype), drive)


def observability_gramian(system: LinearSystem) -> Inexact[Tensor, "*bank n n"]:
    """Q = Aᴴ Q A + Cᴴ C: the controllability Gramian of the adjoint."""
    return controllability_gramian(require_system("observability_gramian", system).adjoint())


def gramians(system: LinearSystem) -> tuple[Inexact[Tensor, "*bank n n"], Inexact[Tensor, "*bank n n"]]:
    """P and Q, Hermitian up to rounding; for a diagonal A they share the expensive part, 1/(1 − λᵢ λ̄ⱼ)."""
    if not isinstance(system, DiagonalSystem):
        return controllability_gramian(system), observability_gramian(system)
    weights, conjugates = reciprocal_products(system.poles, system.log_poles)
    return (system.B @ system.B.mH) * weights, (system.C.mH @ system.C) * conjugates


def _hermitian(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mH) / 2


def _covariance(system: LinearSystem, covariance: Tensor) -> Tensor:
    """Check the covariance; return it in double precision, complex if it or the system is."""
    covariance = validation.require_tensor("input_covariance", covariance, "p p")
    p, bank = system.inputs, covariance.shape[:-2]
    if covariance.shape[-2:] != (p, p) or bank not in ((), system.bank):
        raise ShapeError(
            f"input_covariance has shape {tuple(covariance.shape)}, expected {(p, p)} or {(*system.bank, p, p)}"
        )
    covariance = validation.require_gramian("input_covariance", covariance, bank, p, system.device)
    require_semidefinite("input_covariance", covariance)
    return covariance.to(torch.promote_types(system.dtype, covariance.dtype))


# 2⁶⁴ terms: |λ|^(2⁶⁴) underflows for every |λ| < 1 that a float64 can hold.
_MOST_DOUBLINGS = 64


def solve_lyapunov(A: Inexact[Tensor, "*bank n n"], M: Inexact[Tensor, "*bank n n"]) -> Inexact[Tensor, "*bank n n"]:
    """Solve X = A X Aᴴ + M for X, with stable A and Hermitian M."""
    for name, matrix in (("A", A), ("M", M)):
        validation.require_tensor(name, matrix, "n n")
    if A.shape != M.shape or A.shape[-1] != A.shape[-2]:
        raise ShapeError(f"M has shape {tuple(M.shape)} and A {tuple(A.shape)}, expected (*bank, n, n) for both")
    validation.require_one_precision(A=A, M=M)
    validation.require_one_device(A=A, M=M)
    validation.require_finite("A", A)
    M = validation.require_gramian("M", M, A.shape[:-2], A.shape[-1], A.device)
    A = validation.to_double(A)
    radius = torch.linalg.eigvals(A.detach()).abs().max().item()
    if not radius < 1:
        raise UnstableSystemError(f"spectral radius of A is {radius:.9g}, expected < 1")
    dtype = torch.promote_types(A.dtype, M.dtype)
    return lyapunov_by_doubling(A.to(dtype), M.to(dtype))


def lyapunov_by_doubling(
    A: Inexact[Tensor, "*bank n n"], M: Inexact[Tensor, "*bank n n"]
) -> Inexact[Tensor, "*bank n n"]:
    """X = Σₖ Aᵏ M (Aᴴ)ᵏ, summed by X ← X + Aᵢ X Aᵢᴴ, Aᵢ ← Aᵢ² (Smith 1968), then refined once with its residual."""
    # The norms that stop the sum hold squares, which underflow for M below 1e-154.
    scale = power_of_two(largest_part(M))[..., None, None]
    M = M / scale
    X = _doubling(A, M)
    residual = M - (X - A @ X @ A.mH)
    X = X + _doubling(A, residual)
    return (X + X.mH) / 2 * scale


def lyapunov_factor(A: Inexact[Tensor, "*bank n n"], B: Inexact[Tensor, "*bank n p"]) -> Inexact[Tensor, "*bank n n"]:
    """L with L Lᴴ = Σₖ Aᵏ B Bᴴ (Aᴴ)ᵏ, computed without forming the sum.

    Singular values of Loᴴ Lc then have a floor of 1e-16 σ₁; factors of the sums themselves stop at 1e-8 σ₁ if both are
    singular. ‖C L‖ keeps the digits that C X Cᴴ loses.
    """
    scale = power_of_two(largest_part(B))[..., None, None]
    factor = B / scale
    for _ in range(_MOST_DOUBLINGS):
        added = A @ factor
        # Tested row by row: a small member of a bank, or a state of small scale, must not hide behind a larger one.
        if bool((torch.linalg.vector_norm(added, dim=-1) <= 1e-17 * torch.linalg.vector_norm(factor, dim=-1)).all()):
            return _square(factor) * scale
        stacked = torch.cat([factor, added], dim=-1)
        factor = torch.linalg.qr(stacked.mH, mode="r").R.mH
        A = A @ A
    raise UnstableSystemError(_not_converged(A))


def _square(factor: Tensor) -> Tensor:
    """Give the factor exactly n columns: QR compresses more, zeros fill up fewer."""
    n, columns = factor.shape[-2:]
    if columns > n:
        return torch.linalg.qr(factor.mH, mode="r").R.mH
    return torch.nn.functional.pad(factor, (0, n - columns))


def lyapunov_residual(
    A: Inexact[Tensor, "*bank n n"], M: Inexact[Tensor, "*bank n n"], X: Inexact[Tensor, "*bank n n"]
) -> Float[Tensor, "*bank"]:
    """‖X − A X Aᴴ − M‖_F / ‖X‖_F."""
    norm = torch.linalg.matrix_norm
    return norm(X - A @ X @ A.mH - M) / norm(X).clamp_min(torch.finfo(torch.float64).tiny)


def _doubling(A: Tensor, X: Tensor) -> Tensor:
    for _ in range(_MOST_DOUBLINGS):
        added = A @ X @ A.mH
        X = X + added
        if bool((torch.linalg.matrix_norm(added) <= 1e-17 * torch.linalg.matrix_norm(X)).all()):
            return X
        A = A @ A
    raise UnstableSystemError(_not_converged(A))


def _not_converged(power: Tensor) -> str:
    largest = power.abs().amax().item()
    return f"no solution after {_MOST_DOUBLINGS} doublings: the powers of A do not vanish (largest entry {largest:.3g})"


def measured_gramian(
    states: Inexact[Tensor, "*bank samples n"], mask: Bool[Tensor, "*bank samples"] | None = None
) -> Inexact[Tensor, "*bank n n"]:
    """E[h hᴴ] over `samples` (first flatten batch and time into that axis); `mask` is True for samples that count.

    It holds squares: states below 1e-154 or above 1e154 leave the range of float64. `StateCovariance.scaled_gramian`
    keeps them.
    """
    return StateCovariance().add(states, mask).gramian()


class StateCovariance:
    """A streaming sum of h hᴴ in float64; `merge` adds up the sums of several batches or processes.

    The sum is that of h / `scale`, a power of two which is 1 for ordinary states: squares of states at 1e-170 would
    underflow.
    """

    def __init__(self) -> None:
        self.total: Inexact[Tensor, "*bank n n"] | None = None
        self.count: Float[Tensor, "*bank"] | None = None
        self.scale: Float[Tensor, "*bank"] | None = None

    def add(
        self, states: Inexact[Tensor, "*bank samples n"], mask: Bool[Tensor, "*bank samples"] | None = None
    ) -> StateCovariance:
        states = validation.require_tensor("states", states, "samples n")
        validation.require_values("states", states)
        if mask is not None:
            validation.require_tensor("mask", mask, "samples")
        if mask is not None and mask.dtype != torch.bool:
            raise PrecisionError(f"mask has dtype {mask.dtype}, expected bool")
        if mask is not None and mask.shape != states.shape[:-1]:
            raise ShapeError(f"mask has shape {tuple(mask.shape)}, expected {tuple(states.shape[:-1])}")
        if mask is not None:  # before the check for NaN, because padding may hold anything
            states = torch.where(mask[..., None], states, 0)
        states = validation.to_double(states.detach())
        kept = states.real.new_full(states.shape[:-2], states.shape[-2]) if mask is None else mask.sum(-1).double()
        largest = largest_part(states)
        scale = coarse_scale(largest)
        # One question for both rare cases: on a GPU each answer is waited for.
        if not bool((torch.isfinite(largest) & (scale == 1)).all()):
            validation.require_finite("states", states)
            states = states / scale[..., None, None]
        return self._accumulate(states.mT @ states.conj(), kept, scale)

    def add_total(
        self, total: Inexact[Tensor, "*bank n n"], count: Float[Tensor, "*bank"], scale: Float[Tensor, "*bank"]
    ) -> StateCovariance:
        """Add a sum of h hᴴ / scale² over `count` samples; the scale is one that `coarse_scale` gives, or a product."""
        return self._accumulate(total, count, scale)

    def merge(self, other: StateCovariance) -> StateCovariance:
        validation.require_kind("merge", other, StateCovariance)
        if other.total is None or other.count is None or other.scale is None:
            return self
        return self._accumulate(other.total, other.count, other.scale)

    def over(self, total: Callable[[Tensor], Tensor]) -> StateCovariance:
        """The sum over all processes; `total` gives the sum of a tensor over them."""
        summed = StateCovariance()
        if self.total is None or self.count is None or self.scale is None:
            raise ShapeError("no states were added: every process must add states")
        # Sums show which scales there are; all processes take the largest.
        scales = torch.tensor(COARSE_SCALES, dtype=torch.float64, device=self.scale.device)
        present = total((self.scale[..., None] == scales).to(torch.float64)) > 0
        summed.scale = torch.where(present, scales, 0).amax(-1)
        summed.total, summed.count = total(_rescaled(self.total, self.scale, summed.scale)), total(self.count)
        return summed

    def gramian(self) -> Inexact[Tensor, "*bank n n"]:
        """E[h hᴴ]."""
        mean, scale = self.scaled_gramian()
        return mean * scale[..., None, None] * scale[..., None, None]

    def scaled_gramian(self) -> tuple[Inexact[Tensor, "*bank n n"], Float[Tensor, "*bank"]]:
        """E[h hᴴ] / scale², and the scale, a power of two."""
        if self.total is None or self.count is None or self.scale is None or bool((self.count == 0).any()):
            raise ShapeError("no states were added: add at least one sample for every member of the bank")
        mean = self.total / self.count[..., None, None]
        return (mean + mean.mH) / 2, self.scale

    def _accumulate(self, total: Tensor, count: Tensor, scale: Tensor) -> StateCovariance:
        if self.total is None or self.count is None or self.scale is None:
            self.total, self.count, self.scale = total, count, scale
            return self
        if total.shape != self.total.shape:
            raise ShapeError(
                f"added states have (*bank, n) {tuple(total.shape[:-1])}, expected {tuple(self.total.shape[:-1])}"
            )
        larger = torch.maximum(self.scale, scale)
        self.total = _rescaled(self.total, self.scale, larger) + _rescaled(total, scale, larger)
        self.count, self.scale = self.count + count, larger
        return self


def _rescaled(total: Tensor, scale: Tensor, larger: Tensor) -> Tensor:
    """A sum of squares at another scale."""
    ratio = (scale / larger)[..., None, None]
    return total * ratio * ratio
