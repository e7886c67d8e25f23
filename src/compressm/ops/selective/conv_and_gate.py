"""Ops around a selective scan: the short causal convolution with SiLU, step sizes by softplus, and the gate."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu, softplus

from compressm.ops.dispatch import kernels_serve


def plain_causal_conv(v: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None) -> Tensor:
    """silu(bias + Σ weight[k] v[t − K + 1 + k]), with zeros or `before` (batch, K − 1, channels) in front."""
    past = weight.shape[-1] - 1
    inputs = pad(v.mT, (past, 0)) if before is None else torch.cat([before.to(v.dtype), v], dim=1).mT
    return silu(conv1d(inputs, weight, bias, groups=weight.shape[0])).mT


def sum_of_shifts(v: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None) -> Tensor:
    """Do as `plain_causal_conv`, by one product a tap, which torch.compile makes one kernel of."""
    taps, length = weight.shape[-1], v.shape[1]
    inputs = pad(v, (0, 0, taps - 1, 0)) if before is None else torch.cat([before.to(v.dtype), v], dim=1)
    total = weight[:, 0, 0] * inputs[:, :length]
    for k in range(1, taps):
        total = total + weight[:, 0, k] * inputs[:, k : k + length]
    return silu(total if bias is None else total + bias).to(v.dtype)


def causal_conv(
    v: Float[Tensor, "batch length channels"],
    weight: Float[Tensor, "channels 1 taps"],
    bias: Float[Tensor, " channels"] | None = None,
    before: Float[Tensor, "batch past channels"] | None = None,
) -> Float[Tensor, "batch length channels"]:
    """silu(bias + Σ_k weight[k] v[t − K + 1 + k]) channel by channel, after the K − 1 steps `before`, or zeros."""
    if not kernels_serve(v):
        return plain_causal_conv(v, weight, bias, before)
    from compressm.ops.selective.conv_and_gate_triton import CausalConv

    if before is None or before.shape[1] == 0:
        return CausalConv.apply(v, weight, bias)
    return CausalConv.apply(torch.cat([before.to(v.dtype), v], dim=1), weight, bias)[:, before.shape[1] :]


def plain_steps(delta: Tensor, bias: Tensor | None, lengths: Tensor | None, *, soft: bool) -> Tensor:
    """Δ in float32 or better, after bias and softplus; 0 at and after `lengths`, where the state must not change."""
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
    """y silu(z), in the wider of the two dtypes."""
    return y * silu(z.to(torch.promote_types(y.dtype, z.dtype)))


def step_sizes(
    delta: Float[Tensor, "batch length channels"],
    bias: Float[Tensor, " channels"] | None = None,
    lengths: Int[Tensor, " batch"] | None = None,
    *,
    softplus: bool = True,
) -> Float[Tensor, "batch length channels"]:
    """Δ = softplus(delta + bias) in float32 or better, 0 at and after `lengths`."""
    if kernels_serve(delta):
        from compressm.ops.selective.conv_and_gate_triton import StepSizes

        return StepSizes.apply(delta, bias, lengths, softplus)
    return plain_steps(delta, bias, lengths, soft=softplus)


def gated(
    y: Float[Tensor, "batch length channels"], z: Float[Tensor, "batch length channels"]
) -> Float[Tensor, "batch length channels"]:
    """y silu(z), in the dtype of y."""
    if kernels_serve(y):
        from compressm.ops.selective.conv_and_gate_triton import Gate

        return Gate.apply(y, z)
    return plain_gate(y, z).to(y.dtype)
