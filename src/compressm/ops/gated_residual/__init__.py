"""What follows the recurrence in a residual block: activation, gate, dropout, residual."""

from compressm.ops.gated_residual.dispatch import gated_residual
from compressm.ops.gated_residual.reference import dropped

__all__ = ["dropped", "gated_residual"]
