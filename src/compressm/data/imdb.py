"""IMDB: is a film review positive, read byte by byte (Maas et al. 2011; Tay et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from compressm.data.archives import contents, members, place
from compressm.data.dataset import DataSet, Form
from compressm.data.errors import DataError, require_counts
from compressm.data.fetch import Progress, Remote, Wanted
from compressm.data.splitting import Splits, with_validation
from compressm.data.task import Split
from compressm.data.texts import VOCABULARY, as_bytes, padded

REVIEWS = 12_500  # in each of the four folders
FOLDERS = ("train/neg", "train/pos", "test/neg", "test/pos")


@final
@dataclass(frozen=True)
class IMDB(DataSet):
    """The first `length` bytes of each review; a tenth of the training reviews is for validation."""

    length: int = 4096

    name = "imdb"

    def __post_init__(self) -> None:
        require_counts(length=self.length)

    @property
    def form(self) -> Form:
        return Form(length=self.length, classes=2, vocabulary=VOCABULARY)

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        places = tuple(f"{folder}{kind}" for kind in ("aclImdb", "aclImdb_v1.tar.gz") for folder in ("", "imdb/"))
        url = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
        return (Wanted(places, Remote(url, "md5:7c2ac02c03563afcf9b574c7e56c153a")),)

    def parse(self, paths: Sequence[Path], progress: Progress) -> Splits:
        (path,) = paths
        reviews: dict[str, dict[str, bytes]] = {folder: {} for folder in FOLDERS}
        for number, (name, stream) in enumerate(members(path, r"(^|/)(train|test)/(neg|pos)/[^/]+\.txt$")):
            *_, part, tone, file = name.split("/")
            reviews[f"{part}/{tone}"][file] = as_bytes(contents(stream, place(path, name)), self.length)
            if number % 1000 == 0:
                progress("reading IMDB", number, len(FOLDERS) * REVIEWS)
        for folder, texts in reviews.items():
            if len(texts) != REVIEWS:
                raise DataError(f"{path} has {len(texts)} reviews in {folder}, expected {REVIEWS}; get it again")
        return with_validation(self._split(reviews, "train"), self._split(reviews, "test"))

    def _split(self, reviews: dict[str, dict[str, bytes]], part: str) -> Split:
        # By name: an archive and a folder have other orders.
        texts = [
            reviews[f"{part}/{tone}"][file] for tone in ("neg", "pos") for file in sorted(reviews[f"{part}/{tone}"])
        ]
        tokens, lengths = padded(texts, self.length)
        return Split(tokens, torch.arange(2).repeat_interleave(REVIEWS), lengths)
