"""The definition: torch's own batch norm in training."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from compressm.ops.batch_norm.statistics import RunningStatistics


def plain_batch_norm(
    x: Float[Tensor, "batch length width"],
    weight: Float[Tensor, " width"] | None,
    bias: Float[Tensor, " width"] | None,
    running: RunningStatistics,
    eps: float,
) -> Float[Tensor, "batch length width"]:
    """(x − μ) / √(σ² + ε) · weight + bias, as `nn.BatchNorm1d` computes and tracks it."""
    running.batches.add_(1)
    share = 1.0 / float(running.batches) if running.momentum is None else running.momentum
    flat = functional.batch_norm(x.flatten(0, 1), running.mean, running.variance, weight, bias, True, share, eps)
    return flat.view_as(x)
