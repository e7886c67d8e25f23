"""Norms of a block: small frozen choices, and the modules that they build."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compressm.layers import SequenceError
from compressm.layers.base import require_numbers, require_switches
from compressm.models.checks import require_choice, without_padding
from compressm.ops.block.norm import (
    Normalised,
    RunningStatistics,
    batch_norm,
    plain_running_norm,
    rms_norm,
    running_norm,
)
from compressm.ops.dispatch import is_watched, kernels_serve


def forked(
    norm: nn.Module,
    x: Float[Tensor, "batch length width"],
    lengths: Int[Tensor, " batch"] | None,
    D: Float[Tensor, " width"],
) -> Normalised:
    """u = norm(x), with the rest that `gated_residual` needs, for a block that uses u, D ⊙ u and x."""
    served = lengths is None and kernels_serve(x) and not is_watched(norm)
    if isinstance(norm, PaddedBatchNorm | PaddedRunningNorm) and norm.training and served:
        return norm.fork(x, D)
    return Normalised(norm(x, lengths), x)


def normed(
    norm: nn.Module, x: Float[Tensor, "batch length width"], lengths: Int[Tensor, " batch"] | None
) -> tuple[Float[Tensor, "batch length width"], Float[Tensor, "batch length width"]]:
    """norm(x), and x for the residual sum of a block."""
    if isinstance(norm, StepRMSNorm) and not is_watched(norm):
        return norm.fork(x)
    return norm(x, lengths), x


class Norm(ABC):
    """A choice of norm for a block, over (batch, length, width)."""

    @abstractmethod
    def build(self, width: int) -> nn.Module:
        """Build the module, which is called as norm(x, lengths)."""


@final
@dataclass(frozen=True)
class BatchNorm(Norm):
    """Normalise each channel over batch and time, without padding; `momentum` is the weight of the newest batch."""

    momentum: float = 0.1
    affine: bool = True

    def __post_init__(self) -> None:
        require_numbers(momentum=self.momentum)
        require_switches(affine=self.affine)
        if not 0 < self.momentum <= 1:
            raise SequenceError(f"momentum is {self.momentum}, expected a number above 0 and up to 1")

    def build(self, width: int) -> nn.Module:
        return PaddedBatchNorm(width, momentum=self.momentum, affine=self.affine)


@final
@dataclass(frozen=True)
class RunningNorm(Norm):
    """Batch norm that uses its running averages in training too; the first batch replaces them.

    Gradients take the averages as constants, or go `through` the share that the batch has in them, as in the paper's
    own code: fully at the first step, and by `momentum` later.
    """

    momentum: float = 0.01
    affine: bool = False
    through: bool = False

    def __post_init__(self) -> None:
        require_numbers(momentum=self.momentum)
        require_switches(affine=self.affine, through=self.through)
        if not 0 < self.momentum <= 1:
            raise SequenceError(f"momentum is {self.momentum}, expected a number above 0 and up to 1")

    def build(self, width: int) -> nn.Module:
        return PaddedRunningNorm(width, momentum=self.momentum, affine=self.affine, through=self.through)


@final
@dataclass(frozen=True)
class LayerNorm(Norm):
    """Normalise each step over its channels."""

    affine: bool = True

    def __post_init__(self) -> None:
        require_switches(affine=self.affine)

    def build(self, width: int) -> nn.Module:
        return StepNorm(width, elementwise_affine=self.affine)


@final
@dataclass(frozen=True)
class RMSNorm(Norm):
    """Divide each step by the root mean square of its channels, as Mamba does."""

    affine: bool = True

    def __post_init__(self) -> None:
        require_switches(affine=self.affine)

    def build(self, width: int) -> nn.Module:
        return StepRMSNorm(width, eps=1e-5, elementwise_affine=self.affine)


@final
@dataclass(frozen=True)
class NoNorm(Norm):
    """No norm: the input stays as it is."""

    def build(self, width: int) -> nn.Module:
        return Unchanged()


def require_norm(norm: object) -> None:
    """Require a norm; the error says what to write."""
    require_choice("norm", norm, Norm, (BatchNorm, LayerNorm, RMSNorm, RunningNorm, NoNorm))


@final
class PaddedBatchNorm(nn.BatchNorm1d):
    """y = (x − μ) / √(σ² + ε) over the valid steps in training, with running averages in evaluation."""

    def forward(
        self, x: Float[Tensor, "batch length width"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch length width"]:
        if not self.training or lengths is None:
            if self.training and x.shape[:2].numel() == 1:
                raise SequenceError(f"x has shape {tuple(x.shape)}, expected at least 2 steps to train batch norm")
            return super().forward(x.flatten(0, 1)).view_as(x)
        clean = without_padding(x, lengths)
        mean, variance = self._statistics(clean, lengths)
        y = (clean - mean) * torch.rsqrt(variance + self.eps)
        return (y if self.weight is None else y * self.weight + self.bias).to(x.dtype)

    def fork(self, x: Float[Tensor, "batch length width"], D: Float[Tensor, " width"]) -> Normalised:
        """Normalise in training without padding, by kernels that combine the gradients of u, D ⊙ u and x."""
        return batch_norm(x, self.weight, self.bias, running_of(self), eps=self.eps, skip=D)

    def _statistics(
        self, x: Float[Tensor, "batch length width"], lengths: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, " width"], Float[Tensor, " width"]]:
        """Mean and variance over the valid steps; updates the running ones. x must be 0 in padding."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        count = lengths.sum()
        mean, variance = moments_of_valid(x, lengths)
        with torch.no_grad():
            self.num_batches_tracked += 1
            weight = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
            # As in torch, the running variance is the unbiased one; a single valid step has none.
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean += weight * (mean - self.running_mean)
            self.running_var += weight * (unbiased - self.running_var)
        return mean, variance


@final
class PaddedRunningNorm(nn.BatchNorm1d):
    """y = (x − μ) / √(σ² + ε) with running averages, which training updates first; see `RunningNorm`."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.01, affine: bool = False, through: bool = False
    ) -> None:
        super().__init__(num_features, eps, momentum, affine)
        self.through = through

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, through={self.through}"

    def forward(
        self, x: Float[Tensor, "batch length width"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch length width"]:
        assert self.running_mean is not None
        assert self.running_var is not None
        clean = x if lengths is None else without_padding(x, lengths)
        if self.training:
            moments = None if lengths is None else moments_of_valid(clean, lengths)
            given = (clean, self.weight, self.bias, running_of(self), self.eps)
            return plain_running_norm(*given, through=self.through, moments=moments)
        y = (clean - self.running_mean) * torch.rsqrt(self.running_var + self.eps)
        return (y if self.weight is None else y * self.weight + self.bias).to(x.dtype)

    def fork(self, x: Float[Tensor, "batch length width"], D: Float[Tensor, " width"]) -> Normalised:
        """Normalise in training without padding, by kernels that combine the gradients of u, D ⊙ u and x."""
        given = (x, self.weight, self.bias, running_of(self))
        return running_norm(*given, eps=self.eps, skip=D, through=self.through)


def running_of(norm: PaddedBatchNorm | PaddedRunningNorm) -> RunningStatistics:
    """The running averages of a norm, which kernels update in place."""
    held = norm._buffers  # an attribute is looked for in three tables
    mean, variance, batches = held["running_mean"], held["running_var"], held["num_batches_tracked"]
    assert mean is not None
    assert variance is not None
    assert batches is not None
    return RunningStatistics(mean, variance, batches, norm.momentum)


def averages_of(norm: PaddedBatchNorm | PaddedRunningNorm) -> tuple[Float[Tensor, " width"], Float[Tensor, " width"]]:
    """The running mean and variance of a norm, which a step needs."""
    if norm.running_mean is None or norm.running_var is None:
        raise SequenceError(
            f"a {type(norm).__name__} has no running averages, which a step takes for those of a batch: build the model"
            " with them, and train it"
        )
    return norm.running_mean, norm.running_var


def moments_of_valid(
    x: Float[Tensor, "batch length width"], lengths: Int[Tensor, " batch"]
) -> tuple[Float[Tensor, " width"], Float[Tensor, " width"]]:
    """Mean and variance over the valid steps, in float32 at least; x must be 0 in padding."""
    count = lengths.sum()
    raised = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = raised.sum((0, 1)) / count
    return mean, without_padding(raised - mean, lengths).square().sum((0, 1)) / count


@final
class StepNorm(nn.LayerNorm):
    """Layer norm, called as norm(x, lengths); padding cannot affect a valid step."""

    def forward(
        self, x: Float[Tensor, "batch length width"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch length width"]:
        return super().forward(x)


@final
class StepRMSNorm(nn.RMSNorm):
    """y = x / √(mean x² + ε), in float32 at least, called as norm(x, lengths); padding cannot affect a valid step."""

    def forward(
        self, x: Float[Tensor, "batch length width"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch length width"]:
        return self.fork(x)[0]

    def fork(
        self, x: Float[Tensor, "batch length width"]
    ) -> tuple[Float[Tensor, "batch length width"], Float[Tensor, "batch length width"]]:
        """norm(x), and x for the residual path."""
        return rms_norm(x, self.weight, 1e-5 if self.eps is None else self.eps)


@final
class Unchanged(nn.Module):
    """The identity, called as norm(x, lengths)."""

    def forward(
        self, x: Float[Tensor, "batch length width"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch length width"]:
        return x
