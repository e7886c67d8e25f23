"""Models and checkpoints on disk: whole files, checked when they are read."""

from compressm.saving.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from compressm.saving.kinds import savable
from compressm.saving.models import load_model, save_model
from compressm.saving.orders import accept_orders_, take_stored_orders_

__all__ = [
    "Checkpoint",
    "accept_orders_",
    "load_checkpoint",
    "load_model",
    "savable",
    "save_checkpoint",
    "save_model",
    "take_stored_orders_",
]
