"""Encoders from inputs to features: a linear map for real inputs, an embedding for tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from compressm.layers import SequenceError
from compressm.layers.base import require_numbers
from compressm.models.checks import require_counts, require_tensor, require_within, without_padding
from compressm.ops.block.encoder import linear_of_few, looks_up_by_kernel, token_features


class Encoder(nn.Module, ABC):
    """A map from inputs with any leading axes to features of `width` channels."""

    @abstractmethod
    def check(self, x: Tensor, leading: tuple[str | int, ...]) -> None:
        """Refuse inputs of the wrong shape, dtype or device."""

    @abstractmethod
    def forward(self, x: Tensor, lengths: Int[Tensor, " batch"] | None = None) -> Float[Tensor, "*leading width"]:
        """The features of the inputs; padding is never read."""


@final
class LinearEncoder(Encoder):
    """z = W x + b for real inputs."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        require_counts(inputs=inputs, width=width)
        self.linear = nn.Linear(inputs, width)

    def check(self, x: Tensor, leading: tuple[str | int, ...]) -> None:
        weight = self.linear.weight
        require_tensor("x", x, (*leading, self.linear.in_features), weight)
        if not x.is_floating_point() or (x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type)):
            raise SequenceError(f"x has dtype {x.dtype}, expected {weight.dtype}, the dtype of the parameters")

    def forward(
        self, x: Float[Tensor, "*leading inputs"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "*leading width"]:
        return linear_of_few(without_padding(x, lengths), self.linear.weight, self.linear.bias)


@final
class EmbeddingEncoder(Encoder):
    """One learned vector per token; `scale` is the initial standard deviation of its entries.

    A token outside the vocabulary is refused on a CPU; a GPU, which cannot say so without a pause, gives NaN for it.
    """

    def __init__(self, vocabulary: int, width: int, *, scale: float = 1.0) -> None:
        super().__init__()
        require_counts(vocabulary=vocabulary, width=width)
        require_numbers(scale=scale)
        if not 0 <= scale < math.inf:
            raise SequenceError(f"scale is {scale}, expected a finite number of at least 0")
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=scale)

    def check(self, x: Tensor, leading: tuple[str | int, ...]) -> None:
        require_tensor("tokens", x, leading, self.embedding.weight)
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise SequenceError(f"tokens have dtype {x.dtype}, expected integers")

    def forward(
        self, x: Integer[Tensor, "*leading"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "*leading width"]:
        tokens = without_padding(x, lengths).long()
        # To read them would let a GPU run dry in every step.
        if not looks_up_by_kernel(self.embedding):
            require_within("tokens", tokens, 0, self.embedding.num_embeddings - 1)
        return token_features(tokens, self.embedding)
