"""Encoders before the first block: a linear map of few channels, and one learned vector a token."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from compressm.ops.dispatch import is_watched, kernels_serve
from compressm.ops.memory import MANY, packed_row, packed_weight, steps_a_row

FEW = 8
# On a CPU a map of 1 channel to 8 takes a third of the time in rows of four steps; to 16, or for few steps, it is fast.
_NARROW, _COLUMNS = 16, 32


def linear_of_few(
    x: Float[Tensor, "*leading inputs"], weight: Float[Tensor, "width inputs"], bias: Float[Tensor, " width"]
) -> Float[Tensor, "*leading width"]:
    """Compute `torch.nn.functional.linear` faster for few input channels, also under autocast."""
    if x.requires_grad or x.shape[-1] > FEW or torch.compiler.is_compiling():
        return linear(x, weight, bias)
    if not (kernels_serve(x) and kernels_serve(weight)):
        return (_several_steps_a_row if _is_slow_on_a_cpu(x, weight) else linear)(x, weight, bias)
    from compressm.ops.block.encoder_triton import LinearOfFew

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
    # For Wᵀ in this layout torch forms the gradient as xᵀ g; for W it would form gᵀ x, which takes four times as long.
    product = torch.addmm(packed_row(bias, steps), rows, packed_weight(weight.mT, steps))
    return product.view(*x.shape[:-1], width)


def token_features(tokens: Int[Tensor, "*leading"], embedding: nn.Embedding) -> Float[Tensor, "*leading width"]:
    """Look up each token's row of the embedding; under autocast, in autocast's dtype."""
    if not looks_up_by_kernel(embedding):
        features = embedding(tokens)
        return features.to(_dtype_of_features(features))
    from compressm.ops.block.encoder_triton import TokenFeatures

    return TokenFeatures.apply(tokens, embedding.weight, _dtype_of_features(embedding.weight))


def _dtype_of_features(x: Tensor) -> torch.dtype:
    # Every block adds to these features: under autocast they have its dtype, as after a linear encoder.
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def looks_up_by_kernel(embedding: nn.Embedding) -> bool:
    """True if a kernel looks up the rows; a token outside the table then gives NaN, so nothing has to be checked."""
    return kernels_serve(embedding.weight) and _only_looks_up(embedding)


def _only_looks_up(embedding: nn.Embedding) -> bool:
    """True if the module has no hooks, bounds no row, and the gradient of a row is a plain sum."""
    if type(embedding) is not nn.Embedding:
        return False
    bounded = embedding.max_norm is not None
    uneven = embedding.padding_idx is not None or embedding.scale_grad_by_freq or embedding.sparse
    return not (is_watched(embedding) or bounded or uneven)
