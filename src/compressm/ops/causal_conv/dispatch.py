"""One function."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from compressm.ops.causal_conv.reference import plain_causal_conv
from compressm.ops.kernels import kernels_serve


def causal_conv(
    v: Float[Tensor, "batch length channels"],
    weight: Float[Tensor, "channels 1 taps"],
    bias: Float[Tensor, " channels"] | None = None,
    before: Float[Tensor, "batch past channels"] | None = None,
) -> Float[Tensor, "batch length channels"]:
    """silu(bias + Σ_k weight[k] v[t − K + 1 + k]) channel by channel, after the K − 1 steps `before`, or zeros."""
    if not kernels_serve(v):
        return plain_causal_conv(v, weight, bias, before)
    from compressm.ops.causal_conv.triton import CausalConv

    if before is None or before.shape[1] == 0:
        return CausalConv.apply(v, weight, bias)
    return CausalConv.apply(torch.cat([before.to(v.dtype), v], dim=1), weight, bias)[:, before.shape[1] :]
