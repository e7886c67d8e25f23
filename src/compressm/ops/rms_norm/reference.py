"""The definition."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def plain_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """In float32 at least, then in the dtype of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = None if weight is None else weight.to(wide)
    return nn.functional.rms_norm(x.to(wide), x.shape[-1:], scale, eps).to(x.dtype)
