"""State space models that shrink while they train.

A module is read as a linear system; its Hankel singular values say how much each state matters; the system is
balanced, truncated and written back, and training goes on at the smaller size.
"""

from compressm import control

__version__ = "0.1.0"

__all__ = ["__version__", "control"]
