"""Texts read byte by byte: IMDB reviews, and AAN's pairs of papers; token b + 1 for byte b, 0 for padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import final

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from compressm_lab.data.dataset import DataSet, Form
from compressm_lab.data.files import Progress, Remote, Wanted, contents, members, read_each, released, rows
from compressm_lab.data.task import DataError, Split, Splits, require_counts, with_validation

VOCABULARY = 257  # 256 bytes and padding


def as_bytes(text: bytes, length: int) -> bytes:
    """Cut a text to at most `length` bytes of UTF-8; what is not UTF-8 becomes U+FFFD."""
    return text.decode("utf-8", "replace").encode()[:length]


def padded(texts: Sequence[bytes], length: int) -> tuple[UInt8[Tensor, "texts {length}"], Int64[Tensor, " texts"]]:
    """The tokens and lengths of texts that `as_bytes` has cut."""
    # One byte a token is enough: UTF-8 has no byte above 0xF4, so no token above 0xF5.
    tokens = np.zeros((len(texts), length), np.uint8)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
        row[: len(text)] += 1
    # An empty text is one step of padding: a mean over steps needs one.
    lengths = [max(len(text), 1) for text in texts]
    return torch.from_numpy(tokens), torch.tensor(lengths, dtype=torch.int64)


REVIEWS = 12_500  # in each of the four folders
FOLDERS = ("train/neg", "train/pos", "test/neg", "test/pos")


@final
@dataclass(frozen=True)
class IMDB(DataSet):
    """Reviews cut to their first `length` bytes; a tenth of the training reviews is for validation."""

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
        found = members(path, r"(^|/)(train|test)/(neg|pos)/[^/]+\.txt$")
        for number, (name, where, stream) in enumerate(found):
            *_, part, tone, file = name.split("/")
            reviews[f"{part}/{tone}"][file] = as_bytes(contents(stream, where), self.length)
            if number % 1000 == 0:
                progress("reading IMDB", number, len(FOLDERS) * REVIEWS)
        for folder, texts in reviews.items():
            if len(texts) != REVIEWS:
                raise DataError(f"{path} has {len(texts)} reviews in {folder}, expected {REVIEWS}; get it again")
        return with_validation(self._split(reviews, "train"), self._split(reviews, "test"))

    def _split(self, reviews: dict[str, dict[str, bytes]], part: str) -> Split:
        # By name: an archive and a folder have other orders.
        texts = [text for tone in ("neg", "pos") for _, text in sorted(reviews[f"{part}/{tone}"].items())]
        tokens, lengths = padded(texts, self.length)
        return Split(tokens, torch.arange(2).repeat_interleave(REVIEWS), lengths)


FILES = {"new_aan_pairs.train.tsv": "train", "new_aan_pairs.eval.tsv": "validation", "new_aan_pairs.test.tsv": "test"}
COLUMNS = 5  # label, id1, id2, text1, text2
LABELS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}


@final
@dataclass(frozen=True)
class AAN(DataSet):
    """Pairs of papers, both cut to their first `length` bytes, as they stand in the files."""

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
