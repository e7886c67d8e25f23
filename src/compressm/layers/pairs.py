"""Complex arithmetic on real pairs, (re, im) on the first axis."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def times(x: Float[Tensor, "2 ..."], y: Float[Tensor, "2 ..."]) -> Float[Tensor, "2 ..."]:
    """x y, the other axes broadcast."""
    return torch.stack([x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]])


def exponential(x: Float[Tensor, "2 *modes"]) -> Float[Tensor, "2 *modes"]:
    """eˣ."""
    return torch.exp(x[0]) * torch.stack([torch.cos(x[1]), torch.sin(x[1])])
