"""Dropout of a block: small frozen choices that build the module which does the work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from compressm.layers import SequenceError
from compressm.ops.gated_residual import dropped


@dataclass(frozen=True)
class Dropout(ABC):
    """Entries are zeroed with probability `rate` in training, the others divided by 1 − rate."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise SequenceError(f"dropout rate is {self.rate}, expected a number from 0 to below 1")

    @abstractmethod
    def build(self) -> RandomMask:
        """A module called on (batch, length, width)."""


@final
@dataclass(frozen=True)
class PerElement(Dropout):
    """Every element is drawn on its own."""

    def build(self) -> RandomMask:
        return RandomMask(self.rate, shared=False)


@final
@dataclass(frozen=True)
class OneMask(Dropout):
    """One draw of (1, length, width) for the whole batch, as in the paper's own code."""

    def build(self) -> RandomMask:
        return RandomMask(self.rate, shared=True)


@final
class RandomMask(nn.Module):
    """Dropout by masks that can be drawn beforehand; `shared` by all sequences of a batch or one for each."""

    def __init__(self, rate: float, *, shared: bool) -> None:
        super().__init__()
        self.rate, self.shared = rate, shared

    def keep(
        self, x: Float[Tensor, "batch length width"], count: int
    ) -> Bool[Tensor, "{count} rows length width"] | None:
        """True for what stays, in one draw for `count` uses; None where everything does."""
        if not self.training or self.rate == 0:
            return None
        shape = (count, 1 if self.shared else x.shape[0], *x.shape[1:])
        return torch.empty(shape, dtype=torch.bool, device=x.device).bernoulli_(1 - self.rate)

    def forward(self, x: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        keep = self.keep(x, 1)
        return x if keep is None else dropped(x, keep[0], self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, shared={self.shared}"
