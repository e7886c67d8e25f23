"""Linear layers (LRU, S5, S4D): systems that do not change over time."""

from compressm.families.linear.family import LinearCut, LinearFamily, LinearLayer

__all__ = ["LinearCut", "LinearFamily", "LinearLayer"]
