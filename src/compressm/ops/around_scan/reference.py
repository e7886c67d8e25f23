"""The definitions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus


def plain_steps(delta: Tensor, bias: Tensor | None, lengths: Tensor | None, *, soft: bool) -> Tensor:
    """Δ in float32 or better, after bias and softplus; 0 at and after `lengths`, where nothing may change."""
    step = delta.to(torch.promote_types(delta.dtype, torch.float32))
    if bias is not None:
        step = step + bias.to(step.dtype)
    if soft:
        step = softplus(step)
    if lengths is None:
        return step
    counts = torch.arange(step.shape[1], device=step.device) < lengths[:, None].to(step.device)
    return torch.where(counts[..., None], step, 0)


def plain_gate(y: Tensor, z: Tensor) -> Tensor:
    """y silu(z), in the wider of both dtypes."""
    return y * silu(z.to(torch.promote_types(y.dtype, z.dtype)))
