"""Systems with moved poles: the readout that loses least, and a bound for the distance."""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from compressm.control.hankel import hankel_singular_values
from compressm.control.linear_algebra import eigh
from compressm.control.system import DiagonalSystem


def with_poles(system: DiagonalSystem, poles: Complex[Tensor, "*bank n"]) -> DiagonalSystem:
    """The system with other poles μ, the same B, and the C for which Re(C h) has the least H₂ distance.

    Re(C h) is the output of the modes and their conjugates together, and C + dC minimises for dC P = C (X − P), with P
    the Gramian of the new modes and X − P = (λᵢ − μᵢ) μ̄ⱼ bᵢ bⱼᴴ / ((1 − λᵢ μ̄ⱼ)(1 − μᵢ μ̄ⱼ)). The difference is
    small if poles move little, and nothing cancels in it.
    """
    b, c = system.scales()
    scaled = system.divided(b, c)
    old, new, B = (_with_conjugates(part, axis) for part, axis in ((system.poles, -1), (poles, -1), (scaled.B, -2)))
    C = _with_conjugates(scaled.C, -1)
    right = new.conj()[..., None, :]
    inner = 1 - new[..., :, None] * right
    products = B @ B.mH
    P = products / inner
    missing = (old - new)[..., :, None] * right * products / ((1 - old[..., :, None] * right) * inner)
    change = _solved(P, C @ missing)[..., : system.order]
    moved = (scaled.C + change) * c[..., None, None]
    return DiagonalSystem(poles, system.B, moved)


def _with_conjugates(part: Tensor, axis: int) -> Complex[Tensor, "..."]:
    part = part.to(torch.complex128)
    return torch.cat([part, part.conj()], dim=axis)


def _solved(P: Tensor, rows: Tensor) -> Tensor:
    """rows P⁺ for a Hermitian P ≥ 0, in which directions below rounding count as zeros."""
    size = torch.sqrt(torch.diagonal(P, dim1=-2, dim2=-1).real)
    size = torch.where(size > 0, size, 1)
    values, vectors = eigh(P / (size[..., :, None] * size[..., None, :]))
    usable = values > values.shape[-1] * torch.finfo(values.dtype).eps * values[..., -1:]
    inverse = torch.where(usable, 1 / torch.where(usable, values, 1), 0)
    return ((rows / size[..., None, :]) @ vectors * inverse[..., None, :]) @ vectors.mH / size[..., None, :]


def distance_bound(first: DiagonalSystem, second: DiagonalSystem) -> Float[Tensor, "*bank"]:
    """2 Σ σ of the difference of two systems, which bounds its H∞ norm."""
    poles = torch.cat([first.poles, second.poles], dim=-1)
    B, C = torch.cat([first.B, second.B], dim=-2), torch.cat([first.C, -second.C], dim=-1)
    return 2 * hankel_singular_values(DiagonalSystem(poles, B, C)).sum(-1)
