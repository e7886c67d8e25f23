"""One entry: the module itself, or on a GPU two kernels where it does nothing but look up."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compressm.ops.kernels import is_watched, kernels_serve


def token_features(tokens: Int[Tensor, "*leading"], embedding: nn.Embedding) -> Float[Tensor, "*leading width"]:
    """Rows of the embedding; under autocast in its dtype."""
    if not (kernels_serve(embedding.weight) and _only_looks_up(embedding)):
        features = embedding(tokens)
        return features.to(_dtype_of_features(features))
    from compressm.ops.token_features.triton import TokenFeatures

    return TokenFeatures.apply(tokens, embedding.weight, _dtype_of_features(embedding.weight))


def _dtype_of_features(x: Tensor) -> torch.dtype:
    # What follows adds to its input block by block: under autocast in its dtype, as after a linear encoder.
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _only_looks_up(embedding: nn.Embedding) -> bool:
    """No hook sees what goes through the module, no row is bounded, and the gradient of a row is a plain sum."""
    if type(embedding) is not nn.Embedding:
        return False
    bounded = embedding.max_norm is not None
    uneven = embedding.padding_idx is not None or embedding.scale_grad_by_freq or embedding.sparse
    return not (is_watched(embedding) or bounded or uneven)
