"""State space models that shrink while they train.

A module is read as a linear system; its Hankel singular values say how much each state matters; the system is
balanced, truncated and written back, and training goes on at the smaller size.
"""

import importlib
from types import ModuleType

from compressm import control

__version__ = "0.1.0"

__all__ = ["__version__", "adapters", "control", "layers", "models"]

# Loaded when first used: layers bring in torch's compiler, which takes longer to import than all the rest.
_LATER = {"adapters", "layers", "models"}


def __getattr__(name: str) -> ModuleType:
    if name in _LATER:
        return importlib.import_module(f"compressm.{name}")
    raise AttributeError(f"module 'compressm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
