"""Complex numbers by their real and imaginary parts.

torch's own `abs`, `exp` and `log` of complex numbers are compiled on a GPU when they are first used, 30 to 180 ms each
in the middle of a training, and on a CPU `abs` takes four times as long as the square of it.
"""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float, Inexact
from torch import Tensor


def modulus(z: Inexact[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """|z|."""
    return torch.hypot(z.real, z.imag) if z.is_complex() else z.abs()


def square_modulus(z: Inexact[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """|z|²."""
    return z.real * z.real + z.imag * z.imag if z.is_complex() else z * z


def largest_part(z: Inexact[Tensor, "*bank i j"]) -> Float[Tensor, "*bank"]:
    """The largest real or imaginary part of each matrix, by size."""
    if not z.is_complex():
        return z.abs().amax((-2, -1))
    return torch.maximum(z.real.abs().amax((-2, -1)), z.imag.abs().amax((-2, -1)))


def exponential(z: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
    """exp z, 0 where Re z is −∞."""
    if not z.is_complex():
        return torch.exp(z)
    size = torch.exp(z.real)
    return torch.complex(size * torch.cos(z.imag), size * torch.sin(z.imag))


def logarithm(z: Complex[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """log |z| and arg z in [−π, π]."""
    return torch.log(modulus(z)), torch.atan2(z.imag, z.real)


def row_norms(z: Inexact[Tensor, "*bank i j"]) -> Float[Tensor, "*bank i"]:
    """Of each row its Euclidean length."""
    parts = torch.view_as_real(z.resolve_conj()).flatten(-2) if z.is_complex() else z
    return torch.linalg.vector_norm(parts, dim=-1)


def column_norms(z: Inexact[Tensor, "*bank i j"]) -> Float[Tensor, "*bank j"]:
    """Of each column its Euclidean length."""
    if not z.is_complex():
        return torch.linalg.vector_norm(z, dim=-2)
    return torch.linalg.vector_norm(torch.view_as_real(z.resolve_conj()), dim=(-3, -1))
