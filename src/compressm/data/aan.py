"""AAN: does one paper cite the other, two towers of bytes (Radev et al. 2013; Tay et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import final

import torch

from compressm.data.dataset import DataSet, Form
from compressm.data.errors import DataError, require_counts
from compressm.data.fetch import Progress, Wanted
from compressm.data.lra import read_each, released
from compressm.data.splitting import Splits
from compressm.data.tables import rows
from compressm.data.task import Split
from compressm.data.texts import VOCABULARY, padded

FILES = {
    "new_aan_pairs.train.tsv": "train",
    "new_aan_pairs.eval.tsv": "validation",
    "new_aan_pairs.test.tsv": "test",
}
COLUMNS = 5  # label, id1, id2, text1, text2
LABELS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}


@final
@dataclass(frozen=True)
class AAN(DataSet):
    """The first `length` bytes of both texts, as they stand in the files."""

    length: int = 4000

    name = "aan"

    def __post_init__(self) -> None:
        require_counts(length=self.length)

    @property
    def form(self) -> Form:
        return Form(length=self.length, classes=2, vocabulary=VOCABULARY, towers=2)

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        return (released("tsv_data", "aan"),)

    def parse(self, paths: Sequence[Path], progress: Progress) -> Splits:
        (path,) = paths
        return read_each(path, FILES, lambda stream, where: self._split(stream, where, progress))

    def _split(self, stream: BufferedReader, where: str, progress: Progress) -> Split:
        labels: list[int] = []
        texts: list[bytes] = []
        for line, (label, _, _, first, second) in rows(stream, where, COLUMNS):
            if label not in LABELS:
                raise DataError(f"{where}, line {line}: the label is {label!r}, expected 0 or 1")
            labels.append(LABELS[label])
            texts += [text.encode()[: self.length] for text in (first, second)]
            if len(labels) % 1000 == 0:
                progress(f"reading {where}", len(labels), None)
        tokens, lengths = padded(texts, self.length)
        return Split(tokens.unflatten(0, (-1, 2)), torch.tensor(labels), lengths.unflatten(0, (-1, 2)))
