"""Models and checkpoints on disk: whole files, checked when they are read."""

from compressm.saving.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from compressm.saving.kinds import savable
from compressm.saving.models import load_model, save_model

__all__ = ["Checkpoint", "load_checkpoint", "load_model", "savable", "save_checkpoint", "save_model"]
