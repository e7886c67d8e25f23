"""Compression of models during training, or once after it."""

import importlib
from typing import TYPE_CHECKING, Any

from compressm.compression.budget import Budget
from compressm.compression.compressor import PAPER, Compressor, compress_, pad_orders_
from compressm.compression.distributed import rewrap_
from compressm.compression.inspection import FormComparison, HankelTracker, Inspection, compare_forms, inspect
from compressm.compression.optimizer import Moments, Restart, Slice, Transport
from compressm.compression.policies import (
    EnergyTolerance,
    ErrorBound,
    KeepFraction,
    LayerPolicy,
    TargetOrder,
    choose_orders,
)
from compressm.compression.record import Cut, Decision, Restored
from compressm.compression.rollback import Rollback
from compressm.compression.schedule import (
    Answer,
    Automatic,
    Look,
    Schedule,
    Try,
    as_schedule,
    during_warmup,
    every,
    plan_text,
)
from compressm.compression.trying import LossTolerance, Trials, TryingPolicy
from compressm.errors import CompressionError, LostProcessError, SavingError, StaleWrapperError
from compressm.families.choices import (
    AllowedOrders,
    Gramian,
    Largest,
    Measured,
    Modal,
    Random,
    Selection,
    Smallest,
    WhiteNoise,
    powers_of_two,
)
from compressm.families.memory.forms import Fitted, Folded, Form, Mapped, Selected
from compressm.families.selective.methods import Baked, PerChannel, SelectiveMethod, SharedIndex

if TYPE_CHECKING:
    from compressm.saving import (
        Checkpoint,
        accept_orders_,
        load_checkpoint,
        load_model,
        savable,
        save_checkpoint,
        save_model,
        take_stored_orders_,
    )

__all__ = [
    "PAPER",
    "AllowedOrders",
    "Answer",
    "Automatic",
    "Baked",
    "Budget",
    "Checkpoint",
    "CompressionError",
    "Compressor",
    "Cut",
    "Decision",
    "EnergyTolerance",
    "ErrorBound",
    "Fitted",
    "Folded",
    "Form",
    "FormComparison",
    "Gramian",
    "HankelTracker",
    "Inspection",
    "KeepFraction",
    "Largest",
    "LayerPolicy",
    "Look",
    "LossTolerance",
    "LostProcessError",
    "Mapped",
    "Measured",
    "Modal",
    "Moments",
    "PerChannel",
    "Random",
    "Restart",
    "Restored",
    "Rollback",
    "SavingError",
    "Schedule",
    "Selected",
    "Selection",
    "SelectiveMethod",
    "SharedIndex",
    "Slice",
    "Smallest",
    "StaleWrapperError",
    "TargetOrder",
    "Transport",
    "Trials",
    "Try",
    "TryingPolicy",
    "WhiteNoise",
    "accept_orders_",
    "as_schedule",
    "choose_orders",
    "compare_forms",
    "compress_",
    "during_warmup",
    "every",
    "inspect",
    "load_checkpoint",
    "load_model",
    "pad_orders_",
    "plan_text",
    "powers_of_two",
    "rewrap_",
    "savable",
    "save_checkpoint",
    "save_model",
    "take_stored_orders_",
]

# Saving imports compression, so its names are looked up here only when they are used.
_OF_SAVING = {
    *("Checkpoint", "accept_orders_", "load_checkpoint", "load_model", "savable", "save_checkpoint", "save_model"),
    "take_stored_orders_",
}


def __getattr__(name: str) -> Any:
    if name in _OF_SAVING:
        return getattr(importlib.import_module("compressm.saving"), name)
    raise AttributeError(f"module 'compressm.compression' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
