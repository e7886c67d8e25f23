"""The discrete Lyapunov equation X = A X Aᴴ + M for dense A, by doubling, for whole banks at once."""

from __future__ import annotations

import torch
from jaxtyping import Float, Inexact
from torch import Tensor

from compressm.control import validation
from compressm.control.errors import ShapeError, UnstableSystemError

# 2⁶⁴ terms: |λ|^(2⁶⁴) underflows for every |λ| < 1 that a float64 can hold.
_MOST_DOUBLINGS = 64


def solve_lyapunov(A: Inexact[Tensor, "*bank n n"], M: Inexact[Tensor, "*bank n n"]) -> Inexact[Tensor, "*bank n n"]:
    """X = A X Aᴴ + M for stable A and Hermitian M."""
    for name, matrix in (("A", A), ("M", M)):
        validation.require_tensor(name, matrix, "n n")
    if A.shape != M.shape or A.shape[-1] != A.shape[-2]:
        raise ShapeError(f"M has shape {tuple(M.shape)}, A {tuple(A.shape)}, expected (*bank, n, n) of both")
    validation.require_one_precision(A=A, M=M)
    validation.require_one_device(A=A, M=M)
    validation.require_finite("A", A)
    M = validation.require_gramian("M", M, A.shape[:-2], A.shape[-1], A.device)
    A = validation.to_double(A)
    radius = torch.linalg.eigvals(A.detach()).abs().max().item()
    if not radius < 1:
        raise UnstableSystemError(f"spectral radius {radius:.9g}, expected < 1")
    dtype = torch.promote_types(A.dtype, M.dtype)
    return lyapunov_by_doubling(A.to(dtype), M.to(dtype))


def lyapunov_by_doubling(
    A: Inexact[Tensor, "*bank n n"], M: Inexact[Tensor, "*bank n n"]
) -> Inexact[Tensor, "*bank n n"]:
    """X = Σₖ Aᵏ M (Aᴴ)ᵏ, summed by X ← X + Aᵢ X Aᵢᴴ, Aᵢ ← Aᵢ² (Smith 1968), then refined once on its own residual."""
    X = _doubling(A, M)
    residual = M - (X - A @ X @ A.mH)
    X = X + _doubling(A, residual)
    return (X + X.mH) / 2


def lyapunov_factor(A: Inexact[Tensor, "*bank n n"], B: Inexact[Tensor, "*bank n p"]) -> Inexact[Tensor, "*bank n n"]:
    """L with L Lᴴ = Σₖ Aᵏ B Bᴴ (Aᴴ)ᵏ, without ever forming the sum.

    Singular values of Loᴴ Lc then have a floor of 1e-16 σ₁, where factors of the sums themselves stop at 1e-8 σ₁ if
    both are singular; and ‖C L‖ keeps the digits that C X Cᴴ loses.
    """
    factor = B
    for _ in range(_MOST_DOUBLINGS):
        added = A @ factor
        # Row by row: members of a bank, and states of a badly scaled basis, must not hide behind larger ones.
        if bool((torch.linalg.vector_norm(added, dim=-1) <= 1e-17 * torch.linalg.vector_norm(factor, dim=-1)).all()):
            return _square(factor)
        stacked = torch.cat([factor, added], dim=-1)
        factor = torch.linalg.qr(stacked.mH, mode="r").R.mH
        A = A @ A
    raise UnstableSystemError(_not_converged(A))


def _square(factor: Tensor) -> Tensor:
    """With exactly n columns: more are compressed by QR, missing ones are zero."""
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
