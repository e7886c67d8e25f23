"""The definition, in plain torch."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from compressm.ops.link import Link


def plain_gated_residual(
    y: Float[Tensor, "batch length width"],
    x: Float[Tensor, "batch length width"],
    weight: Float[Tensor, "twice width"],
    bias: Float[Tensor, " twice"],
    u: Float[Tensor, "batch length width"] | None,
    D: Float[Tensor, " width"] | None,
    link: Link | None,
    keep: Bool[Tensor, "2 rows length width"] | None,
    rate: float,
) -> Float[Tensor, "batch length width"]:
    """x + k₂ ⊙ v ⊙ sigmoid(g) with (v, g) = W z + b and z = k₁ ⊙ gelu(y + D ⊙ u), k dropout."""
    first, second = (None, None) if keep is None else keep
    y = with_skip(y, u, D, link)
    value, gate = functional.linear(dropped(functional.gelu(y), first, rate), weight, bias).chunk(2, dim=-1)
    # Half a row is too short to vectorise over on a CPU: copied first, the sigmoid and its gradient are faster.
    return (x + dropped(value * torch.sigmoid(gate.contiguous()), second, rate)).to(x.dtype)


def with_skip(
    y: Float[Tensor, "batch length width"],
    u: Float[Tensor, "batch length width"] | None,
    D: Float[Tensor, " width"] | None,
    link: Link | None,
) -> Float[Tensor, "batch length width"]:
    """y + D ⊙ u, where a link takes the gradient to u."""
    if u is not None and D is not None:
        y = torch.addcmul(y, D.to(u.dtype), u if link is None else u.detach())
    return y if link is None else y + link.zeros()


def dropped(
    z: Float[Tensor, "batch length width"], keep: Bool[Tensor, "rows length width"] | None, rate: float
) -> Float[Tensor, "batch length width"]:
    """z / (1 − rate) where `keep` is true, 0 elsewhere."""
    if keep is None:
        return z
    return (z * factors(keep, rate, z.dtype)).to(z.dtype)


def factors(keep: Bool[Tensor, "*rest"], rate: float, dtype: torch.dtype) -> Float[Tensor, "*rest"]:
    """1 / (1 − rate) where `keep` is true, 0 elsewhere."""
    # In float32: 1 / 0.9 in bfloat16 would be off by 0.2 % everywhere.
    return keep.to(torch.promote_types(dtype, torch.float32)).mul_(1 / (1 - rate))
