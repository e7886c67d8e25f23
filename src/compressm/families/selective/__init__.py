"""Selective layers (Mamba): the input chooses step, B and C, and averages over data replace a fixed system."""

from compressm.families.selective.family import SelectiveCut, SelectiveFamily, SelectiveLayer

__all__ = ["SelectiveCut", "SelectiveFamily", "SelectiveLayer"]
