"""Dropout of a block: small frozen choices that build the module which does the work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.layers import SequenceError


@dataclass(frozen=True)
class Dropout(ABC):
    """Entries are zeroed with probability `rate` in training, the others divided by 1 − rate."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise SequenceError(f"dropout rate is {self.rate}, expected a number from 0 to below 1")

    @abstractmethod
    def build(self) -> nn.Module:
        """A module called on (batch, length, width)."""


@final
@dataclass(frozen=True)
class PerElement(Dropout):
    """Every element is drawn on its own."""

    def build(self) -> nn.Module:
        return nn.Dropout(self.rate)


@final
@dataclass(frozen=True)
class OneMask(Dropout):
    """One draw of (1, length, width) for the whole batch, as in the paper's own code."""

    def build(self) -> nn.Module:
        return SharedDropout(self.rate)


@final
class SharedDropout(nn.Module):
    """Dropout whose mask all sequences of a batch share."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        if not self.training or self.rate == 0:
            return x
        # In float32: 1 / 0.9 in bfloat16 would be off by 0.2 % everywhere.
        mask = nn.functional.dropout(torch.ones((1, *x.shape[1:]), device=x.device), self.rate)
        return (x * mask).to(x.dtype)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
