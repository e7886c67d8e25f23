"""Methods to compare compression in training with: penalties on a model's systems, and teachers (app:other)."""

from compressm_lab.baselines.distillation import DistillationError, Teacher, distillation_loss
from compressm_lab.baselines.regularisers import HankelMajoriser, HankelNuclearNorm, ModalL1, Regulariser

__all__ = [
    "DistillationError",
    "HankelMajoriser",
    "HankelNuclearNorm",
    "ModalL1",
    "Regulariser",
    "Teacher",
    "distillation_loss",
]
