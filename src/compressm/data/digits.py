"""scikit-learn's handwritten digits, pixel by pixel: real images that need no download."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import nn

from compressm.data.dataset import DataSet, Form
from compressm.data.errors import DataError, require_counts
from compressm.data.fetch import Progress
from compressm.data.splitting import Splits, with_validation
from compressm.data.task import Split

TEST_SAMPLES = 360  # of 1797, drawn once


@final
@dataclass(frozen=True)
class Digits(DataSet):
    """8 × 8 pixels in [0, 1] as they are, other sizes by bilinear interpolation; the split is the same for all."""

    side: int = 8

    name = "digits"

    def __post_init__(self) -> None:
        require_counts(side=self.side)

    @property
    def form(self) -> Form:
        return Form(length=self.side**2, classes=10, channels=1)

    def parse(self, paths: Sequence[Path], progress: Progress) -> Splits:
        try:
            from sklearn import datasets
        except ModuleNotFoundError as error:
            raise DataError(f"digits come with the package {error.name}: pip install 'compressm[cli]'") from None
        bunch = datasets.load_digits()
        images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
        if self.side != images.shape[-1]:
            images = nn.functional.interpolate(
                images, size=(self.side, self.side), mode="bilinear", align_corners=False
            )
        everything = Split(images.flatten(1)[..., None], torch.tensor(bunch.target, dtype=torch.int64))
        shuffled = torch.randperm(len(everything), generator=torch.Generator().manual_seed(0))
        return with_validation(everything.select(shuffled[TEST_SAMPLES:]), everything.select(shuffled[:TEST_SAMPLES]))
