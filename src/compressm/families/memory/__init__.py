"""Layers with a matrix state (Mamba-2): measured moments of states and queries say which key dimensions matter."""

from compressm.families.memory.family import MemoryCut, MemoryFamily, MemoryLayer

__all__ = ["MemoryCut", "MemoryFamily", "MemoryLayer"]
