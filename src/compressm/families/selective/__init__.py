"""Selective layers (Mamba), whose step, B and C the input chooses: averages over data take the place of a system."""

from compressm.families.selective.family import SelectiveCut, SelectiveFamily, SelectiveLayer

__all__ = ["SelectiveCut", "SelectiveFamily", "SelectiveLayer"]
