"""Batch norm in training, in a form that lets a residual block's three gradients arrive in one place."""

from compressm.ops.batch_norm.dispatch import Normalised, RunningStatistics, batch_norm

__all__ = ["Normalised", "RunningStatistics", "batch_norm"]
