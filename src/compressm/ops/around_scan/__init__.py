"""What stands before and after a selective scan: step sizes by softplus, and the gate."""

from compressm.ops.around_scan.dispatch import gated, step_sizes

__all__ = ["gated", "step_sizes"]
