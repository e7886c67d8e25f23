"""Models that shrink in the middle of their training, or once after it."""

from compressm.compression.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from compressm.compression.compressor import PAPER, Compressor, compress_
from compressm.compression.gramian import Gramian, Measured, Modal, WhiteNoise
from compressm.compression.inspecting import inspect
from compressm.compression.inspection import Inspection
from compressm.compression.kinds import savable
from compressm.compression.moments import Moments, Restart, Slice, Transport
from compressm.compression.orders import choose_orders
from compressm.compression.policies import Budget, EnergyTolerance, ErrorBound, KeepFraction, LayerPolicy, TargetOrder
from compressm.compression.record import Cut, Restored
from compressm.compression.rollback import Rollback
from compressm.compression.saving import load_model, save_model
from compressm.compression.schedule import as_schedule, during_warmup, every, plan_text
from compressm.compression.selection import Largest, Random, Selection, Smallest
from compressm.compression.selective.methods import Baked, SelectiveMethod, SharedIndex
from compressm.compression.selective.per_channel import PerChannel
from compressm.compression.tracker import HankelTracker
from compressm.compression.wrapping import rewrap_
from compressm.errors import CompressionError, SavingError, StaleWrapperError

__all__ = [
    "PAPER",
    "Baked",
    "Budget",
    "Checkpoint",
    "CompressionError",
    "Compressor",
    "Cut",
    "EnergyTolerance",
    "ErrorBound",
    "Gramian",
    "HankelTracker",
    "Inspection",
    "KeepFraction",
    "Largest",
    "LayerPolicy",
    "Measured",
    "Modal",
    "Moments",
    "PerChannel",
    "Random",
    "Restart",
    "Restored",
    "Rollback",
    "SavingError",
    "Selection",
    "SelectiveMethod",
    "SharedIndex",
    "Slice",
    "Smallest",
    "StaleWrapperError",
    "TargetOrder",
    "Transport",
    "WhiteNoise",
    "as_schedule",
    "choose_orders",
    "compress_",
    "during_warmup",
    "every",
    "inspect",
    "load_checkpoint",
    "load_model",
    "plan_text",
    "rewrap_",
    "savable",
    "save_checkpoint",
    "save_model",
]
