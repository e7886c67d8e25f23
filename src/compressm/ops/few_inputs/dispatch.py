"""One entry: torch's linear map, or two kernels where a GPU is and the channels are few."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from compressm.ops.kernels import kernels_serve

FEW = 8


def linear_of_few(
    x: Float[Tensor, "*leading inputs"], weight: Float[Tensor, "width inputs"], bias: Float[Tensor, " width"]
) -> Float[Tensor, "*leading width"]:
    """As `torch.nn.functional.linear`, also under autocast."""
    if x.requires_grad or x.shape[-1] > FEW or not (kernels_serve(x) and kernels_serve(weight)):
        return linear(x, weight, bias)
    from compressm.ops.few_inputs.triton import LinearOfFew

    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return LinearOfFew.apply(x, weight, bias, dtype)
