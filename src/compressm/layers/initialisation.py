"""Initial poles with a long memory, those of HiPPO matrices and their relatives, as pairs (Re a, Im a) in float64."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Complex, Float
from torch import Tensor


def legs_matrix(size: int) -> Float[Tensor, "size size"]:
    """HiPPO-LegS: A[i, j] = −√((2i+1)(2j+1)) below the diagonal, −(i+1) on it, 0 above (Gu et al. 2020)."""
    index = torch.arange(size, dtype=torch.float64)
    return -torch.tril(_rank_one(size), diagonal=-1) - torch.diag(index + 1)


def legs_normal_part(size: int) -> Float[Tensor, "size size"]:
    """A + ½ √((2i+1)(2j+1)) = −½ I + S with S skew: a normal matrix, which has orthogonal eigenvectors."""
    return legs_matrix(size) + _rank_one(size) / 2


def legs_modes(n: int) -> tuple[Float[Tensor, "2 n"], Complex[Tensor, "size n"]]:
    """Eigenvalues −½ + iω, ω > 0 ascending, of the normal part of size 2n, and their unit eigenvectors.

    The other n eigenvalues are their conjugates: the matrix is 2 Re(V diag(a) Vᴴ).
    """
    normal = legs_normal_part(2 * n)
    frequencies, vectors = torch.linalg.eigh(-0.5j * (normal - normal.mT))
    return _on_the_line(frequencies[n:]), vectors[:, n:]


def legs_poles(n: int) -> Float[Tensor, "2 n"]:
    """The n eigenvalues of `legs_modes`, without eigenvectors."""
    return legs_modes(n)[0]


def lin_poles(n: int) -> Float[Tensor, "2 n"]:
    """aₖ = −½ + iπk (Gu et al. 2022, "On the Parameterization and Initialization of Diagonal State Space Models")."""
    return _on_the_line(math.pi * torch.arange(n, dtype=torch.float64))


def inv_poles(n: int) -> Float[Tensor, "2 n"]:
    """aₖ = −½ + i (N/π) (N/(2k+1) − 1) with N = 2n (S4D-Inv, same paper): a closed form close to LegS."""
    size = 2 * n
    odd = 2 * torch.arange(n, dtype=torch.float64) + 1
    return _on_the_line(size / math.pi * (size / odd - 1))


def _rank_one(size: int) -> Float[Tensor, "size size"]:
    """√((2i+1)(2j+1))."""
    root = torch.sqrt(2 * torch.arange(size, dtype=torch.float64) + 1)
    return torch.outer(root, root)


def _on_the_line(frequencies: Float[Tensor, " n"]) -> Float[Tensor, "2 n"]:
    """−½ + iω."""
    return torch.stack([torch.full_like(frequencies, -0.5), frequencies])


class Initialisation(ABC):
    """A rule that chooses n poles in the left half plane."""

    @abstractmethod
    def __call__(self, n: int) -> Float[Tensor, "2 n"]:
        """(Re a, Im a) of the n poles."""


@final
@dataclass(frozen=True)
class Lin(Initialisation):
    """Evenly spaced frequencies: aₖ = −½ + iπk."""

    def __call__(self, n: int) -> Float[Tensor, "2 n"]:
        return lin_poles(n)


@final
@dataclass(frozen=True)
class Inv(Initialisation):
    """Frequencies that fall like 1/k from N²/π: aₖ = −½ + i (N/π) (N/(2k+1) − 1), N = 2n."""

    def __call__(self, n: int) -> Float[Tensor, "2 n"]:
        return inv_poles(n)


@final
@dataclass(frozen=True)
class Legs(Initialisation):
    """The spectrum of the normal part of HiPPO-LegS."""

    def __call__(self, n: int) -> Float[Tensor, "2 n"]:
        return legs_poles(n)
