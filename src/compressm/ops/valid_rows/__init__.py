"""Zeros where sequences have ended."""

from compressm.ops.valid_rows.dispatch import valid_rows

__all__ = ["valid_rows"]
