"""Residual blocks around SSM layers, stacks of them, and their dropout, chosen by small frozen objects."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Literal, cast, final, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from compressm.layers import LTILayer, SequenceError, SSMLayer
from compressm.models.checks import require_counts
from compressm.models.normalisation import (
    BatchNorm,
    Norm,
    PaddedBatchNorm,
    PaddedRunningNorm,
    forked,
    normed,
    require_norm,
    running_of,
)
from compressm.ops.block.gated_residual import dropped, dropped_residual, gated_residual
from compressm.ops.block.lru_block import compiled_lru_block
from compressm.ops.block.norm import Link
from compressm.ops.dispatch import (
    compiled_kernels_serve,
    is_only_read,
    is_watched,
    kernels_serve,
    wants_trained_kernels,
)
from compressm.ops.lti.cost import walks_chunks


@dataclass(frozen=True)
class Dropout(ABC):
    """A choice of dropout: training zeroes entries with probability `rate` and divides the others by 1 − rate."""

    rate: float

    def __post_init__(self) -> None:
        if isinstance(self.rate, bool) or not isinstance(self.rate, Real) or not 0 <= self.rate < 1:
            raise SequenceError(f"dropout rate is {self.rate!r:.80}, expected a number from 0 to below 1")

    @abstractmethod
    def build(self) -> RandomMask:
        """Build the module, which is called on (batch, length, width)."""


@final
@dataclass(frozen=True)
class PerElement(Dropout):
    """Dropout with an independent draw for every element."""

    def build(self) -> RandomMask:
        return RandomMask(self.rate, shared=False)


@final
@dataclass(frozen=True)
class OneMask(Dropout):
    """Dropout with one mask of shape (1, length, width) for the whole batch, as in the paper's own code."""

    def build(self) -> RandomMask:
        return RandomMask(self.rate, shared=True)


def as_dropout(dropout: Dropout | float) -> Dropout:
    """The choice of dropout; a number is the rate of `PerElement`."""
    if isinstance(dropout, Real) and not isinstance(dropout, bool):
        return PerElement(float(dropout))
    if not isinstance(dropout, Dropout):
        raise SequenceError(f"dropout is {dropout!r:.80}, expected a rate such as 0.1, PerElement(0.1) or OneMask(0.1)")
    return dropout


@final
class RandomMask(nn.Module):
    """Dropout by masks that can be drawn in advance; all sequences of a batch use one mask if `shared`."""

    def __init__(self, rate: float, *, shared: bool) -> None:
        super().__init__()
        self.rate, self.shared = rate, shared

    def keep(
        self, x: Float[Tensor, "batch length width"], count: int
    ) -> Bool[Tensor, "{count} rows length width"] | None:
        """Draw `count` masks at once, True for entries that stay; None if all entries stay."""
        if not self.training or self.rate == 0:
            return None
        shape = (count, 1 if self.shared else x.shape[0], *x.shape[1:])
        return torch.empty(shape, dtype=torch.bool, device=x.device).bernoulli_(1 - self.rate)

    def forward(self, x: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        keep = self.keep(x, 1)
        return x if keep is None else dropped(x, keep[0], self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, shared={self.shared}"


class ResidualBlock(nn.Module, ABC):
    """A residual block x + f(mixer(norm(x))) around an SSM layer, the mixer."""

    def __init__(
        self, mixer: SSMLayer, *, norm: Norm = BatchNorm(), dropout: Dropout | float = PerElement(0.0)
    ) -> None:
        super().__init__()
        _require_mixer(mixer)
        require_norm(norm)
        dropout = as_dropout(dropout)
        self.norm = norm.build(mixer.width)
        self.ssm = mixer
        self.dropout = dropout.build()

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        state: Tensor | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        *,
        keep_state: bool = True,
        before: nn.Module | None = None,
    ) -> tuple[Float[Tensor, "batch length width"], Tensor | None]:
        """The output and the last state; `before` is the norm, if any, that reads the output next."""

    def step(self, x: Float[Tensor, "batch width"], state: Tensor) -> tuple[Float[Tensor, "batch width"], Tensor]:
        """One step of a stream; in evaluation mode it equals the same step of `forward`."""
        mixed, state = self.ssm.step(self.norm(x[:, None]).squeeze(1), state)
        return self._after(mixed[:, None], x[:, None]).squeeze(1), state

    @abstractmethod
    def _after(
        self, y: Float[Tensor, "batch length width"], x: Float[Tensor, "batch length width"]
    ) -> Float[Tensor, "batch length width"]:
        """The block's output, from the layer's output y and the block's input x."""


def _require_mixer(mixer: object) -> None:
    if not isinstance(mixer, SSMLayer):
        raise SequenceError(f"mixer is {mixer!r:.80}, expected an SSM layer, such as LRU(width, order)")


@final
class MixerBlock(ResidualBlock):
    """x + dropout(mixer(norm(x))), for layers with their own gate."""

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        state: Tensor | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        *,
        keep_state: bool = True,
        before: nn.Module | None = None,
    ) -> tuple[Float[Tensor, "batch length width"], Tensor | None]:
        u, x = normed(self.norm, x, lengths)
        y, state = self.ssm(u, state, lengths, keep_state=keep_state)
        return self._after(y, x), state

    def _after(
        self, y: Float[Tensor, "batch length width"], x: Float[Tensor, "batch length width"]
    ) -> Float[Tensor, "batch length width"]:
        keep = self.dropout.keep(x, 1)
        return dropped_residual(x, y, None if keep is None else keep[0], self.dropout.rate)


Gelu = Literal["exact", "tanh"]


def _require_gelu(gelu: object) -> None:
    if gelu not in get_args(Gelu):
        raise SequenceError(f"gelu is {gelu!r:.80}, expected 'exact' or 'tanh'")


# Norms whose kernels take the moments that the block before has measured.
_OVER_BATCH = (PaddedBatchNorm, PaddedRunningNorm)


@final
class Block(ResidualBlock):
    """x + dropout(GLU(dropout(GELU(mixer(norm(x)))))) with GLU(z) = W₁z ⊙ sigmoid(W₂z), for linear layers.

    The GELU is exact, or its approximation by tanh.

    The code around the mixer is two operations with their own gradients, a few kernels on a GPU. The mixer is called as
    a module; of the gate only weight and bias are read.
    """

    ssm: LTILayer

    def __init__(
        self,
        mixer: SSMLayer,
        *,
        norm: Norm = BatchNorm(),
        dropout: Dropout | float = PerElement(0.0),
        gelu: Gelu = "exact",
    ) -> None:
        _require_mixer(mixer)
        if not mixer.needs_gate:
            raise SequenceError(f"the mixer is a {type(mixer).__name__}, expected a linear layer; use MixerBlock")
        _require_gelu(gelu)
        super().__init__(mixer, norm=norm, dropout=dropout)
        self.gelu = gelu
        self.gate = nn.Linear(mixer.width, 2 * mixer.width)

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        state: Tensor | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        *,
        keep_state: bool = True,
        before: nn.Module | None = None,
    ) -> tuple[Float[Tensor, "batch length width"], Tensor | None]:
        if torch.compiler.is_compiling():
            self.ssm.mark_states_()  # before D is read here
        measured = isinstance(before, _OVER_BATCH) and before.training and lengths is None
        if state is None and lengths is None and not keep_state:
            out = self._at_once(x, measured)
            if out is not None:
                return out, None
        u, x, link, drive = forked(self.norm, x, lengths, self.ssm.D)
        # Kernels and compilers compute D ⊙ u as part of the operation that follows. Elsewhere the layer computes it at
        # no cost, and so it does for hooks, which get and may change the output of the whole layer.
        fused = torch.compiler.is_compiling() or kernels_serve(u)
        inside = not fused or not is_only_read(self.ssm)
        y, state = self.ssm(u, state, lengths, keep_state=keep_state, skip=inside, drive=drive)
        return self._after(y, x, *([None, None] if inside else [u, link]), measured=measured), state

    def _after(
        self,
        y: Float[Tensor, "batch length width"],
        x: Float[Tensor, "batch length width"],
        u: Float[Tensor, "batch length width"] | None = None,
        link: Link | None = None,
        *,
        measured: bool = False,
    ) -> Float[Tensor, "batch length width"]:
        keep, rate, D = self.dropout.keep(x, 2), self.dropout.rate, None if u is None else self.ssm.D
        if keep is None and rate > 0 and kernels_serve(y) and wants_trained_kernels():
            # A mask that keeps everything: without one, a kernel is another and takes half a second to compile.
            keep, rate = torch.ones(2, 1, *x.shape[1:], dtype=torch.bool, device=x.device), 0.0
        weight, bias = self.gate.weight, self.gate.bias
        options: dict[str, Any] = {"keep": keep, "rate": rate, "measured": measured, "tanh": self.gelu == "tanh"}
        return gated_residual(y, x, weight, bias, u=u, D=D, link=link, **options)

    def _at_once(self, x: Tensor, measured: bool) -> Tensor | None:
        """The output where kernels train the whole block at once and no hook has to see its parts, else None."""
        norm, layer, width = self.norm, self.ssm, x.shape[-1]
        if type(norm) not in _OVER_BATCH or not norm.training or norm._buffers["running_mean"] is None:
            return None
        assert isinstance(norm, _OVER_BATCH)
        through = norm.through if isinstance(norm, PaddedRunningNorm) else None
        # In between, some of the kernels are those for narrow models and others those for wide ones.
        alike = width <= 16 or width > 32
        tanh = self.gelu == "tanh"
        compiled = compiled_kernels_serve(x) and through is None and not tanh
        if not (alike and (compiled or kernels_serve(x))) or is_watched(norm) or is_watched(layer):
            return None
        if x.shape[0] * x.shape[1] == 1:
            return None
        parameters = layer.kernel_parameters()
        if parameters is None:
            return None
        if width <= 16 and not compiled and not walks_chunks(len(x), x.shape[1], len(parameters[0])):
            return None
        gate = self.gate
        vectors = (norm.weight, norm.bias, layer.D, gate.weight, gate.bias)
        keep, rate = self.dropout.keep(x, 2), self.dropout.rate
        if compiled:
            return compiled_lru_block(x, vectors, keep, rate, running_of(norm), norm.eps, parameters)
        from compressm.ops.block.lru_block_triton import train_lru_block

        given = (x, vectors, keep, rate, running_of(norm), norm.eps, parameters)
        return train_lru_block(*given, measured=measured, through=through, tanh=tanh)


@final
class Blocks(nn.ModuleList):
    """A stack of blocks; its state is the tuple of their states."""

    def __init__(self, modules: Iterable[nn.Module] | None = None) -> None:
        blocks = list(modules) if isinstance(modules, Iterable) else modules
        if blocks is not None and not (isinstance(blocks, list) and all(isinstance(b, ResidualBlock) for b in blocks)):
            raise SequenceError(f"modules are {blocks!r:.80}, expected blocks, such as [Block(LRU(width, order))]")
        super().__init__(blocks)

    def __iter__(self) -> Iterator[ResidualBlock]:
        return cast("Iterator[ResidualBlock]", super().__iter__())

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        state: Sequence[Tensor] | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        *,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "batch length width"], tuple[Tensor, ...] | None]:
        states = [None] * len(self) if state is None else self._each(state)
        kept = []
        norms = [*(block.norm for block in self), None][1:]
        for block, begin, norm in zip(self, states, norms, strict=True):
            x, after = block(x, begin, lengths, keep_state=keep_state, before=norm)
            kept.append(after)
        return x, tuple(kept) if keep_state else None

    def step(
        self, x: Float[Tensor, "batch width"], state: Sequence[Tensor]
    ) -> tuple[Float[Tensor, "batch width"], tuple[Tensor, ...]]:
        """One step of a stream through all blocks."""
        kept = []
        for block, before in zip(self, self._each(state), strict=True):
            x, after = block.step(x, before)
            kept.append(after)
        return x, tuple(kept)

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        """The state at the start of a stream: zeros for every block."""
        return tuple(block.ssm.initial_state(batch) for block in self)

    def _each(self, state: Sequence[Tensor]) -> Sequence[Tensor]:
        if not isinstance(state, Sequence):
            raise SequenceError(f"state is a {type(state).__name__}, expected a tuple of tensors, one for each block")
        if len(state) != len(self):
            raise SequenceError(f"state holds {len(state)} tensors, expected one for each of {len(self)} blocks")
        return state


# Building more would take minutes.
_MOST_BLOCKS = 10_000


def build_blocks(
    layer: type[SSMLayer],
    depth: int,
    width: int,
    order: int,
    options: Mapping[str, Any] | None,
    *,
    norm: Norm,
    dropout: Dropout | float,
    gelu: Gelu = "exact",
) -> Blocks:
    """Build `depth` blocks, each around its own layer; a layer without a gate gets one, behind a GELU."""
    require_counts(depth=depth, at_most=_MOST_BLOCKS)
    if not (isinstance(layer, type) and issubclass(layer, SSMLayer)) or inspect.isabstract(layer):
        raise SequenceError(f"layer is {layer!r}, expected a class of SSM layers, such as LRU")
    _require_gelu(gelu)
    if gelu != "exact" and not layer.needs_gate:
        raise SequenceError(f"gelu is {gelu!r} with layer {layer.__name__}, which has its own gate: leave it out")
    kind = partial(Block, gelu=gelu) if layer.needs_gate else MixerBlock
    require_norm(norm)
    dropout, options = as_dropout(dropout), _checked_options(options)
    mixers = [layer(width, order=order, **options) for _ in range(depth)]
    return Blocks(kind(mixer, norm=norm, dropout=dropout) for mixer in mixers)


def _checked_options(options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The options of a layer by name, without those that the model gives itself."""
    expected = "expected the layer's own options by name, such as {'r_min': 0.5}, or None"
    if options is not None and not isinstance(options, Mapping):
        raise SequenceError(f"layer_options is {options!r:.80}, {expected}")
    odd = next((name for name in options or () if not isinstance(name, str) or name in ("width", "order")), None)
    if odd is not None:
        raise SequenceError(f"layer_options holds {odd!r:.80}, {expected}; width and order are options of the model")
    return options or {}
