"""Layers with full real matrices (S4): they are cut once as matrices, and are modes from then on."""

from compressm.families.dense.family import DenseCut, DenseFamily, DenseLayer

__all__ = ["DenseCut", "DenseFamily", "DenseLayer"]
