"""A small causal language model, with generation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from compressm.layers import SequenceError, SSMLayer
from compressm.layers.base import keeps_arguments, require_numbers, require_switches
from compressm.models.block import Dropout, PerElement, build_blocks
from compressm.models.checks import require_counts, require_lengths
from compressm.models.encoder import EmbeddingEncoder
from compressm.models.normalisation import LayerNorm, Norm
from compressm.models.pooling import LastStep


@final
@keeps_arguments
class LanguageModel(nn.Module):
    """Logits of the next token at every step; if `tied`, the output weights are the token embeddings."""

    def __init__(
        self,
        layer: type[SSMLayer],
        *,
        vocabulary: int,
        depth: int,
        width: int,
        order: int,
        norm: Norm = LayerNorm(),
        dropout: Dropout | float = PerElement(0.0),
        tied: bool = True,
        layer_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        require_counts(vocabulary=vocabulary, width=width)
        require_switches(tied=tied)
        # Tied logits are products of a normed vector, of length √width, and an embedding: this scale makes them near 1.
        self.encoder = EmbeddingEncoder(vocabulary, width, scale=1 / math.sqrt(width) if tied else 1.0)
        self.blocks = build_blocks(layer, depth, width, order, layer_options, norm=norm, dropout=dropout)
        self.norm = norm.build(width)
        self.head = None if tied else nn.Linear(width, vocabulary, bias=False)

    def forward(
        self,
        tokens: Integer[Tensor, "batch length"],
        state: Sequence[Tensor] | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        *,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "batch length vocabulary"], tuple[Tensor, ...] | None]:
        """Logits and last state (None without `keep_state`, which is cheaper); padding from `lengths` has no effect."""
        features, state = self._features(tokens, state, lengths, keep_state)
        return self._logits(features), state

    def step(
        self, tokens: Integer[Tensor, " batch"], state: Sequence[Tensor]
    ) -> tuple[Float[Tensor, "batch vocabulary"], tuple[Tensor, ...]]:
        """One token of a stream; in evaluation mode it equals the same step of `forward`."""
        self.encoder.check(tokens, ("batch",))
        features, after = self.blocks.step(self.encoder(tokens), state)
        return self._logits(self.norm(features[:, None]).squeeze(1)), after

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        """The state at the start of a stream: zeros for every block."""
        require_counts(batch=batch)
        return self.blocks.initial_state(batch)

    @torch.no_grad()
    def generate(
        self,
        prompt: Integer[Tensor, "batch length"],
        count: int,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
    ) -> Int[Tensor, "batch count"]:
        """Draw `count` tokens after each prompt from softmax(logits / temperature); at 0 take the most likely ones."""
        require_counts(count=count)
        require_numbers(temperature=temperature)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise SequenceError(f"generator is {generator!r:.80}, expected a torch.Generator or None")
        if not 0 <= temperature < math.inf:
            raise SequenceError(f"temperature is {temperature}, expected a finite number of at least 0")
        features, state = self._features(prompt, None, lengths, keep_state=True)
        drawn = [_draw(self._logits(LastStep()(features, lengths)), temperature, generator)]
        while len(drawn) < count:
            assert state is not None
            logits, state = self.step(drawn[-1], state)
            drawn.append(_draw(logits, temperature, generator))
        return torch.stack(drawn, dim=1)

    def _features(
        self, tokens: Tensor, state: Sequence[Tensor] | None, lengths: Tensor | None, keep_state: bool
    ) -> tuple[Float[Tensor, "batch length width"], tuple[Tensor, ...] | None]:
        axes = ("batch", "length")
        self.encoder.check(tokens, axes)
        require_lengths(lengths, tokens, axes)
        features, after = self.blocks(self.encoder(tokens, lengths), state, lengths, keep_state=keep_state)
        return self.norm(features, lengths), after

    def _logits(self, features: Float[Tensor, "*steps width"]) -> Float[Tensor, "*steps vocabulary"]:
        weight = self.encoder.embedding.weight if self.head is None else self.head.weight
        return nn.functional.linear(features, weight)


# Below it the quotients of logits overflow, and only ties would still be drawn.
_COLDEST = 1e-30


def _draw(
    logits: Float[Tensor, "batch vocabulary"], temperature: float, generator: torch.Generator | None
) -> Int[Tensor, " batch"]:
    if temperature < _COLDEST:
        return logits.argmax(dim=-1)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator).squeeze(1)
