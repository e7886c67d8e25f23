"""State space models that shrink while they train.

A module is read as a linear system; its Hankel singular values say how much each state matters; the system is
balanced, truncated and written back, and training goes on at the smaller size.
"""

import importlib
from typing import TYPE_CHECKING, Any

from compressm import control

if TYPE_CHECKING:
    from compressm import adapters, compression, layers, models
    from compressm.compression import (
        PAPER,
        Baked,
        Budget,
        Compressor,
        Cut,
        EnergyTolerance,
        ErrorBound,
        HankelTracker,
        KeepFraction,
        Largest,
        Measured,
        Modal,
        PerChannel,
        Random,
        Restart,
        Restored,
        Rollback,
        SharedIndex,
        Slice,
        Smallest,
        TargetOrder,
        Transport,
        WhiteNoise,
        compress_,
        during_warmup,
        every,
        inspect,
        load_model,
        rewrap_,
        save_model,
    )

__version__ = "0.1.0"

__all__ = [
    "PAPER",
    "Baked",
    "Budget",
    "Compressor",
    "Cut",
    "EnergyTolerance",
    "ErrorBound",
    "HankelTracker",
    "KeepFraction",
    "Largest",
    "Measured",
    "Modal",
    "PerChannel",
    "Random",
    "Restart",
    "Restored",
    "Rollback",
    "SharedIndex",
    "Slice",
    "Smallest",
    "TargetOrder",
    "Transport",
    "WhiteNoise",
    "__version__",
    "adapters",
    "compress_",
    "compression",
    "control",
    "during_warmup",
    "every",
    "inspect",
    "layers",
    "load_model",
    "models",
    "rewrap_",
    "save_model",
]

# Loaded when first used: layers bring in torch's compiler, which takes longer to import than all the rest.
_LATER = {"adapters", "compression", "layers", "models"}
# The other names above are those of `compressm.compression`.
_OF_COMPRESSION = set(__all__) - _LATER - {"__version__", "control"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"compressm.{name}")
    if name in _OF_COMPRESSION:
        return getattr(importlib.import_module("compressm.compression"), name)
    raise AttributeError(f"module 'compressm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
