"""Sequence classification: encoder, blocks, pooling, head; two towers compare a pair of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from compressm.layers import SequenceError, SSMLayer
from compressm.layers.base import keeps_arguments, wide
from compressm.models.block import Dropout, Gelu, PerElement, build_blocks
from compressm.models.checks import require_counts, require_lengths
from compressm.models.encoder import EmbeddingEncoder, Encoder, LinearEncoder
from compressm.models.normalisation import BatchNorm, Norm
from compressm.models.pooling import EveryStep, MeanPooling, Pooling, require_pooling
from compressm.ops.block.pooling import mapped_mean, maps_mean_by_kernel


class ClassifierState(NamedTuple):
    """The state of a stream: the state of every layer, the pooled features and the number of steps so far."""

    layers: tuple[Tensor, ...]
    pooled: Float[Tensor, "batch width"]
    steps: Int[Tensor, " batch"]


@final
@keeps_arguments
class SequenceClassifier(nn.Module):
    """Logits of `classes` for sequences of `inputs` real channels, or of tokens below `vocabulary`.

    For a regression, `classes` is the number of outputs.

    With two towers, one encoder and one stack of blocks read both sequences of a pair, (batch, 2, length, ...), and a
    multilayer perceptron compares the pooled vectors a and b by [a, b, a ⊙ b, a − b].
    """

    def __init__(
        self,
        layer: type[SSMLayer],
        *,
        depth: int,
        width: int,
        order: int,
        classes: int,
        inputs: int | None = None,
        vocabulary: int | None = None,
        norm: Norm = BatchNorm(),
        dropout: Dropout | float = PerElement(0.1),
        gelu: Gelu = "exact",
        pooling: Pooling = MeanPooling(),
        towers: int = 1,
        layer_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        require_pooling(pooling)
        every_step = isinstance(pooling, EveryStep)
        require_counts(classes=classes)
        if isinstance(towers, bool | float) or towers not in ((1,) if every_step else (1, 2)):
            raise SequenceError(f"towers is {towers!r}, expected 1 or 2, and 1 with EveryStep pooling")
        self.width, self.towers, self.pooling = width, towers, pooling
        self.encoder = _encoder(inputs, vocabulary, width)
        self.blocks = build_blocks(layer, depth, width, order, layer_options, norm=norm, dropout=dropout, gelu=gelu)
        self.head = nn.Linear(width, classes) if towers == 1 else _comparison(width, classes)

    def forward(
        self,
        x: Float[Tensor, "batch *towers length inputs"] | Integer[Tensor, "batch *towers length"],
        lengths: Int[Tensor, "batch *towers"] | None = None,
    ) -> Float[Tensor, "batch *steps classes"]:
        """The logits, at each step with `EveryStep` pooling; steps at and after `lengths` change nothing."""
        axes = ("batch", "length") if self.towers == 1 else ("batch", 2, "length")
        self.encoder.check(x, axes)
        require_lengths(lengths, x, axes)
        if self.towers == 1:
            features, head = self._features(x, lengths), self.head
            if lengths is None and isinstance(self.pooling, MeanPooling) and maps_mean_by_kernel(head, features):
                return mapped_mean(features, head.weight, head.bias)
            return head(self.pooling(features, lengths))
        pair, ends = x.flatten(0, 1), None if lengths is None else lengths.flatten()
        pooled = self.pooling(self._features(pair, ends), ends)
        return self.head(pair_features(*pooled.unflatten(0, (-1, 2)).unbind(1)))

    def _features(self, x: Tensor, lengths: Int[Tensor, " batch"] | None) -> Float[Tensor, "batch length width"]:
        features, _ = self.blocks(self.encoder(x, lengths), lengths=lengths, keep_state=False)
        return features

    def step(
        self, x: Float[Tensor, "batch inputs"] | Integer[Tensor, " batch"], state: ClassifierState
    ) -> tuple[Float[Tensor, "batch classes"], ClassifierState]:
        """Logits after one more step; in evaluation mode they equal `forward` on all steps so far."""
        self._require_one_tower()
        self.encoder.check(x, ("batch",))
        if not isinstance(state, ClassifierState):
            raise SequenceError(f"state is a {type(state).__name__}, expected that of initial_state or the last step")
        features, layers = self.blocks.step(self.encoder(x), state.layers)
        steps = state.steps + 1
        pooled = self.pooling.update(state.pooled, features, steps)
        return self.head(pooled.to(features.dtype)), ClassifierState(layers, pooled, steps)

    def initial_state(self, batch: int) -> ClassifierState:
        """The state at the start of a stream: zeros."""
        self._require_one_tower()
        require_counts(batch=batch)
        parameter = next(self.parameters())
        steps = torch.zeros(batch, dtype=torch.int64, device=parameter.device)
        pooled = parameter.new_zeros(batch, self.width, dtype=wide(parameter.dtype))
        return ClassifierState(self.blocks.initial_state(batch), pooled, steps)

    def _require_one_tower(self) -> None:
        if self.towers != 1:
            raise SequenceError(f"towers is {self.towers}, expected 1: a pair of sequences cannot be streamed")

    def extra_repr(self) -> str:
        return f"towers={self.towers}, pooling={self.pooling}"


def pair_features(a: Float[Tensor, "batch width"], b: Float[Tensor, "batch width"]) -> Float[Tensor, "batch features"]:
    """The features [a, b, a ⊙ b, a − b] that compare a pair."""
    return torch.cat([a, b, a * b, a - b], dim=-1)


def _comparison(width: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4 * width, width), nn.GELU(), nn.Linear(width, classes))


def _encoder(inputs: int | None, vocabulary: int | None, width: int) -> Encoder:
    if inputs is not None and vocabulary is None:
        return LinearEncoder(inputs, width)
    if vocabulary is not None and inputs is None:
        return EmbeddingEncoder(vocabulary, width)
    raise SequenceError(f"inputs is {inputs} and vocabulary {vocabulary}, expected exactly one of them")
