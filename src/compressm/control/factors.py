"""Factors L of positive semi-definite matrices, P = L Lᴴ, accurate even where P is singular."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Inexact
from torch import Tensor

from compressm.control.linear_algebra import eigh, square_modulus
from compressm.control.poles import one_minus_products
from compressm.control.system import DiagonalSystem
from compressm.control.validation import IndefiniteGramianError

# Rounding keeps eigenvalues of a singular unit-diagonal matrix above −n·1e-15; below this it is not a Gramian.
_INDEFINITE = -1e-8

# A Cholesky pivot relative to its diagonal entry; at 1e-10 the rounding of P moves σ by up to ε/√1e-10 = 2e-11 σ₁.
_WEAKEST_PIVOT = 1e-10


def psd_factor(gramian: Inexact[Tensor, "*bank n n"], name: str = "gramian") -> Inexact[Tensor, "*bank n n"]:
    """The Cholesky factor; for members of the bank where it fails, a factor by `eigh` after scaling to unit diagonal.

    The scaling lowers the floor of the resulting Hankel singular values from 1e-12 σ₁ to 1e-16 σ₁ on LRU systems.
    """
    return gramian_factor(gramian, None, name)[0]


def require_semidefinite(name: str, matrix: Inexact[Tensor, "*bank n n"]) -> None:
    """Refuse a Hermitian matrix with a negative eigenvalue."""
    psd_factor(matrix, name)


def gramian_factor(
    gramian: Inexact[Tensor, "*bank n n"], exact: DiagonalSystem | None, name: str
) -> tuple[Inexact[Tensor, "*bank n n"], bool]:
    """The factor, and True if it is lower triangular for every member of the bank.

    A nearly singular Gramian of the diagonal system `exact` has lost, when it was formed, the digits that its factor
    needs: `cauchy_factor` then starts again from the poles.
    """
    factor, failed, weak = cholesky_strength(gramian)
    weak = failed if exact is None else weak
    if not bool(weak.any()):
        return factor, True
    factor[weak] = _scaled_eigh_factor(gramian[weak], name) if exact is None else cauchy_factor(exact[weak])
    return factor, False


def cholesky_strength(
    gramian: Inexact[Tensor, "*bank n n"],
) -> tuple[Inexact[Tensor, "*bank n n"], Bool[Tensor, "*bank"], Bool[Tensor, "*bank"]]:
    """The Cholesky factor, the members where it failed, and those where it failed or a pivot is rounding noise."""
    factor, info = torch.linalg.cholesky_ex(gramian)
    pivots = square_modulus(factor.diagonal(dim1=-2, dim2=-1)) / gramian.diagonal(dim1=-2, dim2=-1).real
    failed = info != 0
    return factor, failed, failed | ~(pivots.amin(-1) > _WEAKEST_PIVOT)


def _scaled_eigh_factor(gramian: Inexact[Tensor, "m n n"], name: str) -> Inexact[Tensor, "m n n"]:
    diagonal = gramian.diagonal(dim1=-2, dim2=-1).real
    scale = torch.sqrt(diagonal.clamp_min(0))
    scale = torch.where(scale > 0, scale, 1)
    values, vectors = eigh(gramian / (scale[..., :, None] * scale[..., None, :]))
    size = diagonal.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    worst = torch.minimum(values.amin(), (diagonal / size).amin()).item()
    if worst < _INDEFINITE * gramian.shape[-1]:
        raise IndefiniteGramianError(
            f"{name} has the eigenvalue {worst:.3g} (scaled to unit diagonal), expected none below 0"
        )
    # The root of a zero that rounding turned into 1e-16 would be 1e-8.
    noise = gramian.shape[-1] * torch.finfo(torch.float64).eps * values.amax(-1, keepdim=True)
    return scale[..., :, None] * vectors * torch.sqrt(torch.where(values > noise, values, 0))[..., None, :]


def cauchy_factor(system: DiagonalSystem) -> Inexact[Tensor, "*bank n n"]:
    """L with L Lᴴ = P to high relative accuracy in O(n²p), without forming P.

    Schur's algorithm with pivoting: the Gramian's displacement P − A P Aᴴ = B Bᴴ has rank p. Each Cholesky column
    costs a Householder reflection of the generator and a Blaschke factor (λ − λᵢ)/(1 − λ λ̄ᵢ) of modulus at most one
    (Gohberg, Kailath and Olshevsky 1995). Columns come by falling pivot.
    """
    poles = system.poles.reshape(-1, system.order)
    generator = system.B.reshape(-1, system.order, system.inputs)
    gaps = one_minus_products(system.poles, system.log_poles).reshape(-1, system.order, system.order)
    decay = system.decay.reshape(-1, system.order)
    member = torch.arange(len(poles), device=poles.device)
    columns = []
    for _ in range(system.order):
        pivot = (square_modulus(generator).sum(-1) / decay).argmax(-1)
        rotated = _reflect_row(generator, member, pivot)
        gap = gaps[member, :, pivot]
        columns.append(rotated[..., 0] * torch.sqrt(decay[member, pivot])[:, None] / gap)
        blaschke = (poles - poles[member, pivot][:, None]) / gap
        generator = torch.cat([(rotated[..., 0] * blaschke)[..., None], rotated[..., 1:]], dim=-1)
    return torch.stack(columns, dim=-1).reshape(*system.bank, system.order, system.order)


def _reflect_row(generator: Tensor, member: Tensor, pivot: Tensor) -> Tensor:
    """Reflect the generator (Householder) so that row `pivot` becomes a multiple of the first unit row."""
    row = generator[member, pivot].conj()
    length = torch.linalg.vector_norm(row, dim=-1)
    # `sgn` is 0 at 0, where any direction will do.
    direction = torch.where(row[:, 0] == 0, torch.ones_like(row[:, 0]), torch.sgn(row[:, 0]))
    normal = torch.cat([(row[:, 0] + direction * length)[:, None], row[:, 1:]], dim=-1)
    square = square_modulus(normal).sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
    along = generator @ normal[..., None]
    return generator - (2 / square)[:, None, None] * along * normal.conj()[:, None, :]
