"""The definition."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu


def plain_causal_conv(v: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None) -> Tensor:
    """silu(bias + Σ weight[k] v[t − K + 1 + k]), with zeros or `before` (batch, K − 1, channels) in front."""
    past = weight.shape[-1] - 1
    inputs = pad(v.mT, (past, 0)) if before is None else torch.cat([before.to(v.dtype), v], dim=1).mT
    return silu(conv1d(inputs, weight, bias, groups=weight.shape[0])).mT
