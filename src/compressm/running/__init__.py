"""Models that run: training steps as CUDA graphs."""

from compressm.running.capture import CapturedStep

__all__ = ["CapturedStep"]
