"""A model as the graph that is exported: one step with a flat state in and out, or whole sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import TypeAlias, final

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn.functional import embedding, layer_norm, linear

from compressm.compression.distributed import unwrapped
from compressm.compression.sharding import require_whole
from compressm.errors import ExportError
from compressm.exporting.recurrences import Product, at_ends, pieces, recurrence_of, wide
from compressm.layers import SSMLayer, check_finite
from compressm.models import (
    Block,
    Blocks,
    EveryStep,
    LanguageModel,
    LastStep,
    MeanPooling,
    MixerBlock,
    ResidualBlock,
    SequenceClassifier,
)
from compressm.models.checks import without_padding
from compressm.models.classifier import pair_features
from compressm.models.encoder import EmbeddingEncoder, LinearEncoder
from compressm.models.normalisation import (
    PaddedBatchNorm,
    PaddedRunningNorm,
    StepNorm,
    StepRMSNorm,
    Unchanged,
    averages_of,
)

Model: TypeAlias = LanguageModel | SequenceClassifier | Blocks | ResidualBlock | SSMLayer

_KINDS = "a LanguageModel, a SequenceClassifier, Blocks, a Block, a MixerBlock or an SSM layer of compressm"
_POOLINGS = (MeanPooling, LastStep, EveryStep)


def require_exportable(model: object) -> Model:
    """The model inside its wrappers, if it can be exported."""
    inner = unwrapped(model) if isinstance(model, nn.Module) else model
    if isinstance(inner, Model):
        require_whole("the model", inner, ExportError)
        return inner
    cure = ""
    if type(inner).__module__.partition(".")[0] == "transformers":
        cure = ": write it by save_pretrained and convert that folder by the tools of transformers or llama.cpp"
    elif isinstance(inner, nn.Module):
        parts = ((name, part) for name, part in inner.named_modules() if isinstance(part, Model))
        cure = next((f": export its part {name}, a {type(part).__name__}" for name, part in parts), "")
    raise ExportError(f"model is a {type(inner).__name__}, expected {_KINDS}{cure}")


def blocks_of(model: Model) -> Sequence[ResidualBlock]:
    """The blocks of a model; none of a single layer."""
    if isinstance(model, SSMLayer):
        return ()
    blocks = model if isinstance(model, Blocks) else [model] if isinstance(model, ResidualBlock) else model.blocks
    found = list(blocks)
    if not found:
        raise ExportError(f"the {type(model).__name__} has no blocks, expected at least one")
    for block in found:
        if not isinstance(block, Block | MixerBlock):
            raise ExportError(f"a block is a {type(block).__name__}, expected a Block or a MixerBlock")
        if not isinstance(block.ssm, SSMLayer):
            raise ExportError(
                f"the layer of a block is a {type(block.ssm).__name__}, expected an SSM layer of compressm"
            )
    return found


def layers_of(model: Model) -> dict[str, SSMLayer]:
    """The layers of a model in the order in which they are computed, by their names."""
    # A layer that several blocks share has a name, and a state, in each of them.
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    layers = [model] if isinstance(model, SSMLayer) else [block.ssm for block in blocks_of(model)]
    return {names[id(layer)].pop(0): layer for layer in layers}


@final
class Norm(nn.Module):
    """scale ⊙ norm(x) in evaluation mode."""

    factor: Tensor | None
    shift: Tensor | None

    def __init__(self, module: nn.Module, dtype: torch.dtype, scale: Tensor | None) -> None:
        super().__init__()
        self.kind: str = "none"
        eps, factor, shift = 0.0, scale, None
        if isinstance(module, PaddedBatchNorm | PaddedRunningNorm):
            mean, variance = averages_of(module)
            deviation = torch.sqrt(variance.double() + module.eps)
            factor = _product(1 / deviation, module.weight, scale)
            shift = _product(-mean.double() / deviation, module.weight, scale)
            shift = shift if module.bias is None else shift + _product(module.bias, scale)
        elif isinstance(module, StepNorm | StepRMSNorm):
            self.kind = "layer" if isinstance(module, StepNorm) else "rms"
            eps, bias = 1e-5 if module.eps is None else module.eps, getattr(module, "bias", None)
            ones = torch.ones(module.normalized_shape)
            factor = _product(ones, module.weight, scale)
            shift = None if bias is None else _product(bias, scale)
        elif not isinstance(module, Unchanged):
            raise ExportError(f"a norm is a {type(module).__name__}, expected one of those in compressm.models")
        self.eps = eps
        for name, value in (("factor", factor), ("shift", shift)):
            self.register_buffer(name, None if value is None else value.detach().to(wide(dtype)))

    def forward(self, x: Float[Tensor, "*rest width"]) -> Float[Tensor, "*rest width"]:
        if self.kind == "layer":
            return layer_norm(x, x.shape[-1:], self.factor, self.shift, self.eps)
        if self.kind == "rms":
            x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)
        x = x if self.factor is None else x * self.factor
        return x if self.shift is None else x + self.shift


def _product(first: Tensor, *others: Tensor | None) -> Tensor:
    present = (other.double() for other in others if other is not None)
    return reduce(torch.mul, present, first.double())


_SLOPE = 2 * math.sqrt(2 / math.pi)


@final
class BlockGraph(nn.Module):
    """A residual block; gelu(y) is (s + s erf s) / √2 for s = y / √2, where factors go into the weights around it.

    Its approximation by tanh is y sigmoid(2 √(2/π) (y + 0.044715 y³)).
    """

    slope: Tensor
    bend: Tensor

    def __init__(self, block: ResidualBlock, dtype: torch.dtype, *, sequences: bool) -> None:
        super().__init__()
        self.exact = not isinstance(block, Block) or block.gelu == "exact"
        # As tensors: of numbers in double precision runtimes keep single precision.
        for name, number in (("slope", _SLOPE), ("bend", 0.044715 * _SLOPE)):
            self.register_buffer(name, None if self.exact else torch.tensor(number, dtype=wide(dtype)))
        half = math.sqrt(0.5) if self.exact else 1.0
        gain = half if isinstance(block, Block) else 1.0
        self.recurrence = recurrence_of(block.ssm, dtype, sequences=sequences, gain=gain, scaled=True)
        self.norm = Norm(block.norm, dtype, self.recurrence.scale)
        self.gate = (
            Product(half * block.gate.weight.double(), block.gate.bias, dtype) if isinstance(block, Block) else None
        )

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, state = self.recurrence.step(self.norm(x), state)
        return self._after(x, y), state

    def sequence(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        y, state = self.recurrence.sequence(self.norm(x), lengths)
        return self._after(x, y), state

    def _after(self, x: Tensor, y: Tensor) -> Tensor:
        if self.gate is None:
            return x + y
        active = y + y * torch.erf(y) if self.exact else y * torch.sigmoid(y * (self.slope + self.bend * y * y))
        both = self.gate(active)
        value, gate = pieces(both, [both.shape[-1] // 2] * 2)
        return x + value * torch.sigmoid(gate)


@final
class LayerGraph(nn.Module):
    """A layer without a block around it."""

    def __init__(self, layer: SSMLayer, dtype: torch.dtype, *, sequences: bool) -> None:
        super().__init__()
        self.recurrence = recurrence_of(layer, dtype, sequences=sequences)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.recurrence.step(x, state)

    def sequence(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.recurrence.sequence(x, lengths)


class Graph(nn.Module):
    """The parts of a model in evaluation mode, with constants computed once."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        super().__init__()
        check_finite(model)
        encoder = model.encoder if isinstance(model, LanguageModel | SequenceClassifier) else None
        self.tokens = isinstance(encoder, EmbeddingEncoder)
        self.encoder = _encoder(encoder, dtype)
        sequences = isinstance(self, SequenceGraph)
        if isinstance(model, SSMLayer):
            self.blocks = nn.ModuleList([LayerGraph(model, dtype, sequences=sequences)])
        else:
            self.blocks = nn.ModuleList(BlockGraph(block, dtype, sequences=sequences) for block in blocks_of(model))
        self.norm = Norm(model.norm, dtype, None) if isinstance(model, LanguageModel) else None
        self.head, self.pooling = _head(model, dtype), model.pooling if isinstance(model, SequenceClassifier) else None
        if self.pooling is not None and not isinstance(self.pooling, _POOLINGS):
            names = ", ".join(kind.__name__ for kind in _POOLINGS)
            raise ExportError(f"pooling is {self.pooling!r:.80}, expected one of {names}")
        self.towers, self.width = getattr(model, "towers", 1), next(iter(layers_of(model).values())).width
        self.sizes = [block.recurrence.size for block in self._blocks()]

    def _blocks(self) -> list[BlockGraph | LayerGraph]:
        return list(self.blocks)  # type: ignore[arg-type]

    def _encoded(self, x: Tensor) -> Tensor:
        if self.encoder is None:
            return x
        if not self.tokens:
            return self.encoder(x)
        weight = self.encoder.weight
        return embedding(x, weight).to(wide(weight.dtype))

    def _logits(self, x: Tensor) -> Tensor:
        x = x if self.norm is None else self.norm(x)
        if self.head is not None:
            return self.head(x)
        if self.norm is None:
            return x
        assert self.encoder is not None
        weight = self.encoder.weight  # tied
        return linear(x.to(weight.dtype), weight).to(x.dtype)


@final
class StepGraph(Graph):
    """(x, state) to (y, state): one step of every sequence."""

    def forward(
        self, x: Shaped[Tensor, "batch *inputs"], state: Float[Tensor, "batch size"]
    ) -> tuple[Float[Tensor, "batch outputs"], Float[Tensor, "batch size"]]:
        rest = [] if self.pooling is None else [self.width, 1]
        parts = pieces(state, [*self.sizes, *rest])
        x, after = self._encoded(x), []
        for block, part in zip(self._blocks(), parts, strict=False):
            x, new = block.step(x, part)
            after.append(new)
        if self.pooling is not None:
            # Steps are counted in floats: float32 counts to 2²⁴.
            pooled, steps = parts[-2], parts[-1] + 1
            x = pooled + (x - pooled) / steps if isinstance(self.pooling, MeanPooling) else x
            after += [x, steps]
        return self._logits(x), torch.cat(after, -1)


@final
class SequenceGraph(Graph):
    """(x, lengths) to (y, state): whole sequences from zeros, and the state at the end of each; pairs have no state."""

    def forward(
        self, x: Shaped[Tensor, "batch *rest"], lengths: Int[Tensor, "batch *towers"]
    ) -> tuple[Tensor, Tensor] | Tensor:
        if self.towers == 2:
            pooled, _ = self._read(x.flatten(0, 1), lengths.flatten())
            return self._logits(pair_features(*pooled.unflatten(0, (-1, 2)).unbind(1)))
        y, after = self._read(x, lengths)
        return self._logits(y), torch.cat(after, -1)

    def _read(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, after = self._encoded(without_padding(x, lengths)), []
        for block in self._blocks():
            x, state = block.sequence(x, lengths)
            after.append(state)
        if self.pooling is None:
            return x, after
        pooled, last = self.pooling(x, lengths), at_ends(x, lengths)
        after += [pooled if isinstance(self.pooling, MeanPooling) else last, lengths.to(x.dtype)[:, None]]
        return pooled, after


def _encoder(encoder: nn.Module | None, dtype: torch.dtype) -> Product | None:
    if encoder is None:
        return None
    if isinstance(encoder, EmbeddingEncoder):
        return Product(encoder.embedding.weight, None, dtype)
    if not isinstance(encoder, LinearEncoder):
        raise ExportError(f"the encoder is a {type(encoder).__name__}, expected the model's own")
    return Product(encoder.linear.weight, encoder.linear.bias, dtype)


def _head(model: Model, dtype: torch.dtype) -> nn.Module | None:
    """The map from features to logits; None if there is none, or if it is the embedding."""
    if isinstance(model, LanguageModel):
        if model.head is None:
            return None
        if not isinstance(model.head, nn.Linear):
            raise ExportError(f"the head is {model.head!r:.80}, expected the language model's own")
        return Product(model.head.weight, None, dtype)
    if not isinstance(model, SequenceClassifier):
        return None
    parts = list(model.head) if isinstance(model.head, nn.Sequential) else [model.head]
    if not all(type(part) in (nn.Linear, nn.GELU) for part in parts):
        raise ExportError(f"the head is {model.head!r:.80}, expected the classifier's own")
    return nn.Sequential(
        *(Product(part.weight, part.bias, dtype) if isinstance(part, nn.Linear) else part for part in parts)
    )
