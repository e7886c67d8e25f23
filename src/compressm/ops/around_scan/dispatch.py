"""One function each."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from compressm.ops.around_scan.reference import plain_gate, plain_steps
from compressm.ops.kernels import kernels_serve


def step_sizes(
    delta: Float[Tensor, "batch length channels"],
    bias: Float[Tensor, " channels"] | None = None,
    lengths: Int[Tensor, " batch"] | None = None,
    *,
    softplus: bool = True,
) -> Float[Tensor, "batch length channels"]:
    """Δ = softplus(delta + bias) in float32 or better, 0 at and after `lengths`."""
    if kernels_serve(delta):
        from compressm.ops.around_scan.triton import Steps

        return Steps.apply(delta, bias, lengths, softplus)
    return plain_steps(delta, bias, lengths, soft=softplus)


def gated(
    y: Float[Tensor, "batch length channels"], z: Float[Tensor, "batch length channels"]
) -> Float[Tensor, "batch length channels"]:
    """y silu(z), in the dtype of y."""
    if kernels_serve(y):
        from compressm.ops.around_scan.triton import Gate

        return Gate.apply(y, z)
    return plain_gate(y, z).to(y.dtype)
