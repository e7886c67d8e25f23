"""One function."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from compressm.ops.kernels import kernels_serve
from compressm.ops.rms_norm.reference import plain_rms_norm

# A row in the registers of one program.
_WIDEST = 4096


def rms_norm(
    x: Float[Tensor, "*rest width"], weight: Float[Tensor, " width"] | None = None, eps: float = 1e-5
) -> tuple[Float[Tensor, "*rest width"], Float[Tensor, "*rest width"]]:
    """weight x / √(mean x² + ε) over the last axis, computed in float32 at least, in the dtype of x; and x again.

    What else is made of x takes the second: on a GPU gradients of both come together in one pass over memory.
    """
    if not kernels_serve(x) or x.shape[-1] > _WIDEST:
        return plain_rms_norm(x, weight, eps), x
    from compressm.ops.rms_norm.triton import RMSNormRows

    return RMSNormRows.apply(x, weight, eps)
