"""Training runs: recipes, and a loop that evaluates, cuts and saves on schedules, and resumes after a stop."""

# ruff: noqa: F401 - the public names
from compressm_lab.training.config import (
    CompressionConfig,
    DistillationConfig,
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
from compressm_lab.training.loop import CutError, Diverged, Interrupted, train
from compressm_lab.training.model_config import ConfigError, ModelConfig
from compressm_lab.training.plan import Plan
