"""The recurrence of selective layers (S6, Mamba): h[t] = exp(Δ[t] a) h[t−1] + Δ[t] B[t] u[t], y[t] = Re(C[t] h[t]).

The rates a are fixed: negative real numbers, or complex numbers as pairs. The step Δ, B and C change with time. All
channels share B and C, or each channel has its own.
"""

from compressm.ops.selective.reference import Selective
from compressm.ops.selective.scan import ScanPath, selective_scan, selective_step

__all__ = ["ScanPath", "Selective", "selective_scan", "selective_step"]
