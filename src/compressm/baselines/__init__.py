"""What compression in training is compared with: penalties on a model's systems, and teachers (app:other)."""

from compressm.baselines.distillation import Teacher, distillation_loss
from compressm.baselines.regularisers import HankelMajoriser, HankelNuclearNorm, ModalL1, Regulariser

__all__ = [
    "HankelMajoriser",
    "HankelNuclearNorm",
    "ModalL1",
    "Regulariser",
    "Teacher",
    "distillation_loss",
]
