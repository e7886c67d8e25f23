"""Pooling of features at every step to one vector per sequence, at once or as a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressm.models.checks import require_choice, without_padding
from compressm.ops.block.pooling import time_mean


class Pooling(ABC):
    """A choice of pooling, an object that can be called, printed and compared."""

    @abstractmethod
    def __call__(
        self, x: Float[Tensor, "batch length width"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch *steps width"]:
        """Pool the steps before `lengths`; later ones do not count."""

    @abstractmethod
    def update(
        self, pooled: Float[Tensor, "batch width"], x: Float[Tensor, "batch width"], steps: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch width"]:
        """The pooled features after step number `steps`, `x`, from those before it."""


@final
@dataclass(frozen=True)
class MeanPooling(Pooling):
    """The mean over the valid steps."""

    def __call__(
        self, x: Float[Tensor, "batch length width"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch width"]:
        if lengths is None:
            return time_mean(x)
        # Summed in float32 at least: a long sum exceeds the range of float16.
        total = without_padding(x, lengths).sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
        return (total / lengths[:, None]).to(x.dtype)

    def update(
        self, pooled: Float[Tensor, "batch width"], x: Float[Tensor, "batch width"], steps: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch width"]:
        return pooled + (x - pooled) / steps[:, None]


@final
@dataclass(frozen=True)
class LastStep(Pooling):
    """The last valid step."""

    def __call__(
        self, x: Float[Tensor, "batch length width"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch width"]:
        if lengths is None:
            return x[:, -1]
        return x[torch.arange(x.shape[0], device=x.device), lengths - 1]

    def update(
        self, pooled: Float[Tensor, "batch width"], x: Float[Tensor, "batch width"], steps: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch width"]:
        return x


@final
@dataclass(frozen=True)
class EveryStep(Pooling):
    """No pooling: every step has its own output, for tasks with a label at every step."""

    def __call__(
        self, x: Float[Tensor, "batch length width"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch length width"]:
        return x if lengths is None else without_padding(x, lengths)

    def update(
        self, pooled: Float[Tensor, "batch width"], x: Float[Tensor, "batch width"], steps: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch width"]:
        return x


def require_pooling(pooling: object) -> None:
    """Require a pooling; the error says what to write."""
    require_choice("pooling", pooling, Pooling, (MeanPooling, LastStep, EveryStep))
