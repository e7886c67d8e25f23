"""Impulse and free responses of a layer: t = kT + j needs √L powers twice instead of L."""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from compressm.ops.diagonal_scan.cost import best_chunk
from compressm.ops.diagonal_scan.pairs import complex_dtype, interleaved, powers, to_complex


def impulse_response(
    log_poles: Float[Tensor, "2 n"], B: Float[Tensor, "2 n p"], C: Float[Tensor, "2 q n"], length: int
) -> Float[Tensor, "p q length"]:
    """K[kT + j] = Re((C Λ^{kT}) (Λʲ B)), transposed."""
    near, far = power_tables(log_poles, length, complex_dtype(B.dtype))
    driven = interleaved(near[:, None] * to_complex(B, 0).mT)
    read = interleaved((far[:, None] * to_complex(C, 0)).conj())
    product = driven.flatten(0, 1) @ read.flatten(0, 1).mT
    shape = (*driven.shape[:2], *read.shape[:2])
    return product.reshape(shape).permute(1, 3, 2, 0).flatten(2)[..., :length]


def free_response(
    log_poles: Float[Tensor, "2 n"], C: Float[Tensor, "2 q n"], state: Float[Tensor, "batch 2 n"], length: int
) -> Float[Tensor, "batch length q"]:
    """Re(C Λᵗ⁺¹ h₀)."""
    near, far = power_tables(log_poles, length, complex_dtype(C.dtype))
    first = powers(log_poles, 1, first=1, dtype=near.dtype)
    carried = interleaved(to_complex(state, 1).to(near.dtype)[:, None] * (first * far))
    read = interleaved((near[:, None] * to_complex(C, 0)).conj())
    return (carried @ read.flatten(0, 1).mT).reshape(len(state), -1, C.shape[1])[:, :length]


def power_tables(
    log_poles: Float[Tensor, "2 *modes"], length: int, dtype: torch.dtype
) -> tuple[Complex[Tensor, "T *modes"], Complex[Tensor, "count *modes"]]:
    """Λʲ for j < T and Λ^{kT} for kT < L, with 0 for what is below 1e-19."""
    chunk = best_chunk(length)
    near = powers(log_poles, chunk, dtype=dtype)
    far = powers(log_poles.to(torch.float64) * chunk, -(-length // chunk), dtype=dtype)
    # A processor takes ten times as long over products with numbers below 1e-38; 1e-19 · 1e-19 is not below.
    return torch.where(near.abs() < 1e-19, 0, near), torch.where(far.abs() < 1e-19, 0, far)
