"""Models that run: training steps as CUDA graphs, and streams."""

from compressm.running.capture import CapturedStep
from compressm.running.stream import Stream

__all__ = ["CapturedStep", "Stream"]
