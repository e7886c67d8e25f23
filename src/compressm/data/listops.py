"""ListOps: what a nested list of MIN, MAX, MED and SM (sum modulo 10) comes to (Nangia & Bowman 2018)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import final

import numpy as np
import torch
from jaxtyping import UInt8

from compressm.data.dataset import DataSet, Form
from compressm.data.errors import DataError, require_counts
from compressm.data.fetch import Progress, Wanted
from compressm.data.listops_trees import Rules, expressions
from compressm.data.lra import read_each, released
from compressm.data.splitting import Splits
from compressm.data.tables import rows
from compressm.data.task import Split

FILES = {"basic_train.tsv": "train", "basic_val.tsv": "validation", "basic_test.tsv": "test"}
HEAD = ["Source", "Target"]
SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")  # tokens 1 to 15
VOCABULARY = 18  # padding, the symbols, and two for the parentheses of the files, which are left out
_TREES = 4000  # grown together

# A character a symbol: an operator is known by the last letter of its name.
_LETTERS = {"[MIN": "N", "[MAX": "X", "[MED": "D", "[SM": "M"}
_TOKENS = np.zeros(128, np.uint8)
for _token, _symbol in enumerate(SYMBOLS, start=1):
    _TOKENS[ord(_LETTERS.get(_symbol, _symbol))] = _token


@final
@dataclass(frozen=True)
class ListOps(DataSet):
    """The files of the Long Range Arena, or expressions made here after their rules, `examples` to train on."""

    generated: bool = False
    examples: int = 96_000
    held_out: int = 2_000
    length: int = 2048
    depth: int = 10
    arguments: int = 10
    shortest: int = 500
    longest: int = 2000
    seed: int = 0

    name = "listops"

    def __post_init__(self) -> None:
        require_counts(examples=self.examples, held_out=self.held_out, shortest=self.shortest)
        require_counts(2, depth=self.depth, arguments=self.arguments)
        if not self.shortest <= self.longest <= self.length:
            raise DataError(
                f"shortest, longest, length are {self.shortest}, {self.longest}, {self.length}, expected ascending"
            )
        if self.shortest > _most_tokens(self.depth, self.arguments):
            raise DataError(
                f"depth {self.depth} and {self.arguments} arguments make at most "
                f"{_most_tokens(self.depth, self.arguments)} tokens, shortest is {self.shortest}"
            )

    @property
    def form(self) -> Form:
        return Form(length=self.length, classes=10, vocabulary=VOCABULARY)

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        return () if self.generated else (released("listops-1000", "listops"),)

    def parse(self, paths: Sequence[Path], progress: Progress) -> Splits:
        if self.generated:
            return self._made(progress)
        (path,) = paths
        return read_each(path, FILES, lambda stream, where: self._read(stream, where, progress))

    def _made(self, progress: Progress) -> Splits:
        counts = (self.examples, self.held_out, self.held_out)
        tokens = torch.zeros(sum(counts), self.length, dtype=torch.uint8)
        lengths, values = (torch.zeros(sum(counts), dtype=torch.int64) for _ in range(2))
        for row, (line, value) in zip(range(sum(counts)), self._different(), strict=False):
            tokens[row, : len(line)] = torch.from_numpy(line)
            lengths[row], values[row] = len(line), value
            if row % 500 == 0:
                progress("making ListOps", row, sum(counts))
        parts = zip(tokens.split(counts), values.split(counts), lengths.split(counts), strict=True)
        return Splits(*(Split(*part) for part in parts))

    def _different(self) -> Iterator[tuple[UInt8[np.ndarray, " tokens"], int]]:
        """Expressions without end, each once."""
        random, seen = np.random.default_rng(self.seed), set()
        rules = Rules(self.depth, self.arguments, self.shortest, self.longest)
        while True:
            made = expressions(_TREES, rules, random)
            for row, length, value in zip(*made, strict=True):
                line = row[:length]
                key = hashlib.blake2b(line.tobytes(), digest_size=16).digest()
                if key not in seen:
                    seen.add(key)
                    yield line, int(value)

    def _read(self, stream: BufferedReader, where: str, progress: Progress) -> Split:
        lines, values = [], []
        table = rows(stream, where, len(HEAD))
        if (head := next(table, (1, []))[1]) != HEAD:
            raise DataError(f"{where} has the columns {head}, expected {HEAD}")
        for number, (source, target) in table:
            lines.append(self._tokens(source, f"{where}, line {number}"))
            if len(target) != 1 or target not in "0123456789":
                raise DataError(f"{where}, line {number}: the target is {target!r}, expected a digit")
            values.append(int(target))
            if number % 1000 == 0:
                progress(f"reading {where}", number, None)
        tokens = np.zeros((len(lines), self.length), np.uint8)
        for row, line in zip(tokens, lines, strict=True):
            row[: len(line)] = line
        lengths = torch.tensor([len(line) for line in lines], dtype=torch.int64)
        return Split(torch.from_numpy(tokens), torch.tensor(values, dtype=torch.int64), lengths)

    def _tokens(self, source: str, where: str) -> UInt8[np.ndarray, " tokens"]:
        # Parentheses say nothing that brackets do not; without them the files have 500 to 2000 tokens.
        short = source.replace("(", "").replace(")", "")
        for symbol, letter in _LETTERS.items():
            short = short.replace(symbol, letter)
        letters = np.frombuffer("".join(short.split()).encode(), np.uint8)
        tokens = _TOKENS[np.minimum(letters, 127)]
        if not len(tokens) or not tokens.all():
            raise DataError(f"{where}: {source[:60]!r} is no expression of {' '.join(SYMBOLS)}")
        if len(tokens) > self.length:
            raise DataError(f"{where}: {len(tokens)} tokens, expected at most length={self.length}")
        return tokens


def _most_tokens(depth: int, arguments: int) -> int:
    """Every node above the largest depth an operator."""
    tokens = 1
    for _ in range(depth - 1):
        tokens = 2 + arguments * tokens
    return tokens
