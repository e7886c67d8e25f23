"""Complex numbers as real pairs, and powers of poles from their logarithms."""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float
from torch import Tensor

# Up to this many powers are exponentiated one by one; more are products of two tables, 2 √L exponentials instead of L.
_SINGLE_TABLE = 64


def to_complex(pair: Float[Tensor, "..."], axis: int) -> Complex[Tensor, "..."]:
    """The pair on `axis` as one complex number."""
    re, im = pair.unbind(axis)
    return torch.complex(re, im)


def to_pair(number: Complex[Tensor, "..."], axis: int) -> Float[Tensor, "..."]:
    """Real and imaginary parts on a new axis."""
    return torch.stack([number.real, number.imag], dim=axis)


def interleaved(number: Complex[Tensor, "*rest n"]) -> Float[Tensor, "*rest n2"]:
    """Real and imaginary parts side by side, as complex numbers lie in memory: products with them need no copies."""
    return torch.view_as_real(number.resolve_conj()).flatten(-2)


def from_interleaved(pairs: Float[Tensor, "*rest n2"]) -> Complex[Tensor, "*rest n"]:
    """The inverse of `interleaved`."""
    return torch.view_as_complex(pairs.reshape(*pairs.shape[:-1], -1, 2))


def complex_dtype(real: torch.dtype) -> torch.dtype:
    """complex128 for float64, complex64 for everything else."""
    return torch.complex128 if real == torch.float64 else torch.complex64


def powers(
    log_poles: Float[Tensor, "2 *modes"], count: int, *, first: int = 0, dtype: torch.dtype
) -> Complex[Tensor, "count *modes"]:
    """λ^first … λ^(first + count − 1), each right to rounding in `dtype`.

    Exponents are formed in float64: in float32 the phase 16384 · 6.28 alone would be off by 6e-3.
    """
    logs = torch.complex(*log_poles.to(torch.float64).unbind(0))
    if count <= _SINGLE_TABLE:
        return torch.exp(_exponents(count, first, logs) * logs).to(dtype)
    inner = round(count**0.5) + 1
    outer = -(-count // inner)
    small = torch.exp(_exponents(inner, first, logs) * logs).to(dtype)
    large = torch.exp(inner * _exponents(outer, 0, logs) * logs).to(dtype)
    return (large[:, None] * small[None, :]).flatten(0, 1)[:count]


def _exponents(count: int, first: int, logs: Tensor) -> Tensor:
    steps = torch.arange(first, first + count, dtype=torch.float64, device=logs.device)
    return steps.reshape(-1, *([1] * logs.ndim))
