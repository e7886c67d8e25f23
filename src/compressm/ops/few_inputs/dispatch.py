"""One entry: torch's linear map; where the channels are few two kernels on a GPU, several steps a row on a CPU."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from compressm.ops.kernels import kernels_serve
from compressm.ops.packed import MANY, packed_row, packed_weight, steps_a_row

FEW = 8
# On a CPU one channel to 8 takes a third of the time in rows of four steps; to 16 it is fast, and so are few steps.
_NARROW, _COLUMNS = 16, 32


def linear_of_few(
    x: Float[Tensor, "*leading inputs"], weight: Float[Tensor, "width inputs"], bias: Float[Tensor, " width"]
) -> Float[Tensor, "*leading width"]:
    """As `torch.nn.functional.linear`, also under autocast."""
    if x.requires_grad or x.shape[-1] > FEW or torch.compiler.is_compiling():
        return linear(x, weight, bias)
    if not (kernels_serve(x) and kernels_serve(weight)):
        return (_several_steps_a_row if _is_slow_on_a_cpu(x, weight) else linear)(x, weight, bias)
    from compressm.ops.few_inputs.triton import LinearOfFew

    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return LinearOfFew.apply(x, weight, bias, dtype)


def _is_slow_on_a_cpu(x: Tensor, weight: Tensor) -> bool:
    long = len(weight) < _NARROW and x.numel() >= MANY * x.shape[-1]
    plain = x.device.type == "cpu" and x.dtype == weight.dtype and not torch.is_autocast_enabled("cpu")
    return long and plain


def _several_steps_a_row(
    x: Float[Tensor, "*leading inputs"], weight: Float[Tensor, "width inputs"], bias: Float[Tensor, " width"]
) -> Float[Tensor, "*leading width"]:
    width, inputs = weight.shape
    steps = steps_a_row(_COLUMNS, width, x.numel() // inputs)
    rows = x.reshape(-1, steps * inputs)
    # Of Wᵀ as it lies here torch takes the gradient by xᵀ g, of W it would by gᵀ x: four times as long.
    product = torch.addmm(packed_row(bias, steps), rows, packed_weight(weight.mT, steps))
    return product.view(*x.shape[:-1], width)
