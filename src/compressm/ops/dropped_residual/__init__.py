"""x + dropout(y), with a mask that was drawn before: one pass over memory each way."""

from compressm.ops.dropped_residual.dispatch import dropped_residual

__all__ = ["dropped_residual"]
