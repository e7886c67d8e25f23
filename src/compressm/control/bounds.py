"""What a truncation can cost, known before it is made."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressm.control import validation
from compressm.control.errors import NonFiniteError, OrderError, ShapeError

# Of σ₁: singular values computed by different routes are sorted up to rounding.
_RISE = 1e-12


def error_bounds(sigma: Float[Tensor, "*bank n"]) -> Float[Tensor, "*bank n+1"]:
    """bounds[r] = 2 Σ_{i>r} σᵢ bounds the H∞ error of keeping r states, r = 0 … n (Enns 1984; Glover 1984)."""
    _require_spectrum(sigma)
    _require_falling(sigma.detach())
    tails = sigma.flip(-1).cumsum(-1).flip(-1)  # smallest first, so that small tails keep their digits
    return 2 * torch.cat([tails, torch.zeros_like(tails[..., :1])], dim=-1)


def bottom_shares(sigma: Float[Tensor, "*bank n"]) -> Float[Tensor, "*bank n+1"]:
    """shares[r] = the part of Σσ that the r smallest values hold, r = 0 … n; all zero for a spectrum of zeros."""
    _require_spectrum(sigma)
    smallest_first = sigma.sort(dim=-1).values.cumsum(-1)
    total = smallest_first[..., -1:]
    shares = smallest_first / torch.where(total > 0, total, 1)
    return torch.cat([torch.zeros_like(total), shares], dim=-1)


def numerical_rank(sigma: Float[Tensor, "*bank n"]) -> Int[Tensor, "*bank"]:
    """How many σᵢ stand above rounding, σᵢ > n ε σ₁."""
    _require_spectrum(sigma)
    floor = sigma.shape[-1] * torch.finfo(torch.float64).eps * sigma.amax(-1, keepdim=True)
    return (sigma > floor).sum(-1)


def _require_spectrum(sigma: Tensor) -> None:
    if not isinstance(sigma, Tensor):
        raise ShapeError(f"sigma is a {type(sigma).__name__}, expected a tensor (*bank, n)")
    if sigma.ndim == 0:
        raise ShapeError("sigma has shape (), expected (*bank, n)")
    validation.require_real("sigma", sigma)
    if sigma.shape[-1] == 0 or not bool((sigma >= 0).all()) or not bool(torch.isfinite(sigma).all()):
        raise NonFiniteError(
            f"sigma must hold at least one value, all finite and >= 0; got {sigma.detach().cpu().tolist()!r:.200}"
        )


def _require_falling(sigma: Tensor) -> None:
    rise = sigma[..., 1:] - sigma[..., :-1]
    rising = torch.nonzero(rise > _RISE * sigma.amax(-1, keepdim=True))
    if len(rising):
        *member, i = (int(k) for k in rising[0])
        values = sigma[tuple(member)]
        raise OrderError(
            f"sigma{[*member, i + 1]} is {values[i + 1]:.6g} after {values[i]:.6g}: expected falling values, sort them"
        )
