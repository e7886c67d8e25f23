"""x / √(mean x² + ε) of every step over its channels."""

from compressm.ops.rms_norm.dispatch import rms_norm

__all__ = ["rms_norm"]
