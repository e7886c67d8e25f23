"""Reduced systems of single channels written with diagonal A again: real rates, or complex ones for pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Inexact, Int
from torch import Tensor

from compressm.control.diagonalisation import require_eigenvectors
from compressm.control.side_by_side import eig


@dataclass(frozen=True)
class Modes:
    """Values on the diagonal, E_B and E_C, of which the first `count` of every member are modes and the rest zeros.

    E_B A E_C is diagonal on the modes. Of a pair of conjugates one mode stands for both: y = Re(C E_C h) counts it
    `twice`, in E_C.
    """

    values: Inexact[Tensor, "*bank r"]
    E_B: Inexact[Tensor, "*bank r n"]
    E_C: Inexact[Tensor, "*bank n r"]
    twice: Bool[Tensor, "*bank r"]
    count: Int[Tensor, "*bank"]


def diagonal_modes(
    A: Inexact[Tensor, "*bank r r"], left: Inexact[Tensor, "*bank n r"], right: Inexact[Tensor, "*bank n r"]
) -> Modes:
    """The projection on `right` along `left` in which the projected A = leftᴴ A right is diagonal.

    Real systems stay real where all eigenvalues are; rows of E_B are as long as columns of E_C.
    """
    values, X = eig(A)
    require_eigenvectors(X)
    E_B, E_C = torch.linalg.solve(X, left.mH.to(X.dtype)), right.to(X.dtype) @ X
    twice = torch.zeros_like(values, dtype=torch.bool)
    count = torch.full_like(values[..., 0].real, values.shape[-1], dtype=torch.int64)
    if not A.is_complex() and not bool((values.imag != 0).any()):
        values, E_B, E_C = values.real, E_B.real, E_C.real
    elif not A.is_complex():
        twice, stays = values.imag > 0, values.imag >= 0
        E_C = torch.where(twice[..., None, :], 2 * E_C, E_C)
        first = torch.argsort(~stays, dim=-1, stable=True)
        values, twice, count = values.gather(-1, first), twice.gather(-1, first), stays.sum(-1)
        E_B = E_B.gather(-2, first[..., :, None].expand_as(E_B))
        E_C = E_C.gather(-1, first[..., None, :].expand_as(E_C))
    there = torch.arange(values.shape[-1], device=values.device) < count[..., None]
    E_B, E_C = torch.where(there[..., :, None], E_B, 0), torch.where(there[..., None, :], E_C, 0)
    length = _balanced_length(E_B, E_C)
    return Modes(values, E_B * length[..., :, None], E_C / length[..., None, :], twice & there, count)


def _balanced_length(E_B: Tensor, E_C: Tensor) -> Float[Tensor, "*bank r"]:
    rows, columns = torch.linalg.vector_norm(E_B, dim=-1), torch.linalg.vector_norm(E_C, dim=-2)
    usable = (rows > 0) & (columns > 0)
    return torch.where(usable, torch.sqrt(columns / torch.where(usable, rows, 1)), 1)
