"""The short convolution of Mamba layers: every channel with a filter of its own over its last steps, then SiLU."""

from compressm.ops.causal_conv.dispatch import causal_conv

__all__ = ["causal_conv"]
