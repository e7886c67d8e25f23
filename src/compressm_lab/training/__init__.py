"""Training runs: recipes, and a loop that evaluates, cuts and saves on schedules, and resumes after a stop."""

from compressm_lab.training.config import (
    CompressionConfig,
    ConfigError,
    DistillationConfig,
    ModelConfig,
    Recipe,
    RegulariserConfig,
    RollbackConfig,
    SelectiveConfig,
    SpectraConfig,
    TrainingConfig,
    TruncationConfig,
    WhenConfig,
)
from compressm_lab.training.loggers import RunLogger, Silent
from compressm_lab.training.loop import Diverged, Interrupted, train
from compressm_lab.training.plan import Plan

__all__ = [
    "CompressionConfig",
    "ConfigError",
    "DistillationConfig",
    "Diverged",
    "Interrupted",
    "ModelConfig",
    "Plan",
    "Recipe",
    "RegulariserConfig",
    "RollbackConfig",
    "RunLogger",
    "SelectiveConfig",
    "Silent",
    "SpectraConfig",
    "TrainingConfig",
    "TruncationConfig",
    "WhenConfig",
    "train",
]
