"""The mean over time, whose gradient is the same at every step and is not written out."""

from compressm.ops.time_mean.dispatch import time_mean

__all__ = ["time_mean"]
