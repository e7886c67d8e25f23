"""State space models that shrink while they train.

A module is read as a linear system; its Hankel singular values say how much each state matters; the system is
balanced, truncated and written back, and training goes on at the smaller size.
"""

import importlib
from typing import TYPE_CHECKING, Any

from compressm.moved import moved, refuse_moved_modules

if TYPE_CHECKING:
    from compressm import adapters, compression, control, deploy, layers, models
    from compressm.compression import (
        PAPER,
        Automatic,
        Baked,
        Budget,
        Compressor,
        Cut,
        Decision,
        EnergyTolerance,
        ErrorBound,
        Fitted,
        Folded,
        HankelTracker,
        KeepFraction,
        Largest,
        LossTolerance,
        Mapped,
        Measured,
        Modal,
        PerChannel,
        Random,
        Restart,
        Restored,
        Rollback,
        Schedule,
        Selected,
        SharedIndex,
        Slice,
        Smallest,
        TargetOrder,
        Transport,
        TryingPolicy,
        WhiteNoise,
        compare_forms,
        compress_,
        during_warmup,
        every,
        inspect,
        load_model,
        pad_orders_,
        powers_of_two,
        rewrap_,
        save_model,
    )
    from compressm.exporting import export
    from compressm.running import CapturedStep, Stream

__version__ = "0.2.0"

__all__ = [
    "PAPER",
    "Automatic",
    "Baked",
    "Budget",
    "CapturedStep",
    "Compressor",
    "Cut",
    "Decision",
    "EnergyTolerance",
    "ErrorBound",
    "Fitted",
    "Folded",
    "HankelTracker",
    "KeepFraction",
    "Largest",
    "LossTolerance",
    "Mapped",
    "Measured",
    "Modal",
    "PerChannel",
    "Random",
    "Restart",
    "Restored",
    "Rollback",
    "Schedule",
    "Selected",
    "SharedIndex",
    "Slice",
    "Smallest",
    "Stream",
    "TargetOrder",
    "Transport",
    "TryingPolicy",
    "WhiteNoise",
    "__version__",
    "adapters",
    "compare_forms",
    "compress_",
    "compression",
    "control",
    "deploy",
    "during_warmup",
    "every",
    "export",
    "inspect",
    "layers",
    "load_model",
    "models",
    "pad_orders_",
    "powers_of_two",
    "rewrap_",
    "save_model",
]

# Everything is loaded when first used: torch alone takes longer to import than `compressm --help` may take.
_PACKAGES = {
    "adapters",
    "compression",
    "control",
    "deploy",
    "exporting",
    "families",
    "layers",
    "models",
    "ops",
    "running",
    "saving",
}
# The other names above are those of `compressm.compression`, of `compressm.running` and of `compressm.exporting`.
_OF_RUNNING, _OF_EXPORTING = {"CapturedStep", "Stream"}, {"export"}
_OF_COMPRESSION = set(__all__) - _PACKAGES - _OF_RUNNING - _OF_EXPORTING - {"__version__"}

refuse_moved_modules()


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"compressm.{name}")
    if name in _OF_RUNNING:
        return getattr(importlib.import_module("compressm.running"), name)
    if name in _OF_EXPORTING:
        return getattr(importlib.import_module("compressm.exporting"), name)
    if name in _OF_COMPRESSION:
        return getattr(importlib.import_module("compressm.compression"), name)
    raise AttributeError(moved(f"compressm.{name}") or f"module 'compressm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
