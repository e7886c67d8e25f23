"""Nested lists with their values, read or made after the rules of the Long Range Arena (Tay et al. 2021).

A node is an operator with probability 1/4 and a digit otherwise, at the largest depth always a digit; an operator has
2 to `arguments` children. Trees whose length is out of range are thrown away. All trees of a batch grow together, level
by level: a level is one array over the nodes of all trees, and the children of a node stand side by side in the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8

from compressm_lab.data.dataset import DataSet, Form
from compressm_lab.data.files import Progress, Wanted, read_each, released, rows
from compressm_lab.data.task import DataError, Split, Splits, require_counts

OPERATOR_SHARE = 0.25
MIN, MAX, MED, SM = range(4)
DIGIT = -1
FIRST_DIGIT, FIRST_OPERATOR, END = 1, 11, 15  # tokens; 0 is padding


class Level(NamedTuple):
    """The nodes of one depth, in the order of their trees; `parent` counts the operators of the level above."""

    tree: Int64[np.ndarray, " nodes"]
    parent: Int64[np.ndarray, " nodes"]
    operator: Int64[np.ndarray, " nodes"]
    digit: Int64[np.ndarray, " nodes"]


class Expressions(NamedTuple):
    """Expressions as tokens, padded with 0, with their lengths and values."""

    tokens: UInt8[np.ndarray, "trees longest"]
    lengths: Int64[np.ndarray, " trees"]
    values: Int64[np.ndarray, " trees"]


def expressions(trees: int, rules: ListOps, random: np.random.Generator) -> Expressions:
    """Grow `trees` random trees and keep those whose length is in range."""
    levels = _grown(trees, rules, random)
    lengths = _sizes(levels)[0]
    fit = (lengths >= rules.shortest) & (lengths <= rules.longest)
    levels = _only(levels, fit)
    sizes = _sizes(levels)
    tokens = np.zeros((int(fit.sum()), rules.longest), np.uint8)
    for level, size, start in zip(levels, sizes, _starts(levels, sizes), strict=True):
        inner = level.operator != DIGIT
        tokens[level.tree, start] = np.where(inner, FIRST_OPERATOR + level.operator, FIRST_DIGIT + level.digit)
        tokens[level.tree[inner], (start + size)[inner] - 1] = END
    return Expressions(tokens, lengths[fit], _values(levels))


def _grown(trees: int, rules: ListOps, random: np.random.Generator) -> list[Level]:
    tree = parent = np.arange(trees)
    levels = []
    for depth in range(1, rules.depth + 1):
        inner = random.random(len(tree)) <= (OPERATOR_SHARE if depth < rules.depth else -1)
        operator = np.where(inner, random.integers(0, 4, len(tree)), DIGIT)
        levels.append(Level(tree, parent, operator, random.integers(0, 10, len(tree))))
        children = random.integers(2, rules.arguments + 1, int(inner.sum()))
        parent = np.repeat(np.arange(len(children)), children)
        tree = np.repeat(tree[inner], children)
    return levels


def _only(levels: list[Level], fit: Bool[np.ndarray, " trees"]) -> list[Level]:
    """The levels without trees that do not fit."""
    number = np.cumsum(fit) - 1
    kept, above = [], None
    for level in levels:
        keep = fit[level.tree]
        operators = keep[level.operator != DIGIT]
        parent = number[level.tree[keep]] if above is None else above[level.parent[keep]]
        kept.append(Level(number[level.tree[keep]], parent, level.operator[keep], level.digit[keep]))
        above = np.cumsum(operators) - 1
    return kept


def _groups(level: Level) -> Int64[np.ndarray, " parents"]:
    """The index of each parent's first child."""
    return np.flatnonzero(np.diff(level.parent, prepend=-1))


def _sizes(levels: list[Level]) -> list[Int64[np.ndarray, " _"]]:
    """The tokens of every node: one for a digit, two and those of its children for an operator."""
    sizes = [np.ones(len(levels[-1].tree), np.int64)]
    for level, below in zip(levels[-2::-1], levels[:0:-1], strict=True):
        size = np.ones(len(level.tree), np.int64)
        if len(below.tree):
            size[level.operator != DIGIT] = 2 + np.add.reduceat(sizes[0], _groups(below))
        sizes.insert(0, size)
    return sizes


def _starts(levels: list[Level], sizes: list[Int64[np.ndarray, " _"]]) -> list[Int64[np.ndarray, " _"]]:
    """The position of every node's first token: after its operator and the siblings before it."""
    starts = [np.zeros(len(levels[0].tree), np.int64)]
    for above, level, size in zip(levels, levels[1:], sizes[1:], strict=False):
        before = np.cumsum(size) - size
        among_siblings = before - before[_groups(level)][level.parent] if len(size) else before
        starts.append(starts[-1][above.operator != DIGIT][level.parent] + 1 + among_siblings)
    return starts


def _values(levels: list[Level]) -> Int64[np.ndarray, " trees"]:
    values = levels[-1].digit
    for level, below in zip(levels[-2::-1], levels[:0:-1], strict=True):
        inner, result = level.operator != DIGIT, level.digit.copy()
        if len(below.tree):
            result[inner] = _applied(level.operator[inner], values, below.parent, _groups(below))
        values = result
    return values


def _applied(
    operator: Int64[np.ndarray, " parents"],
    values: Int64[np.ndarray, " nodes"],
    parent: Int64[np.ndarray, " nodes"],
    groups: Int64[np.ndarray, " parents"],
) -> Int64[np.ndarray, " parents"]:
    ordered = np.sort(16 * parent + values) % 16  # each parent's children, ascending
    count = np.diff(groups, append=len(values))
    middle = (ordered[groups + (count - 1) // 2] + ordered[groups + count // 2]) // 2
    total = np.add.reduceat(values, groups) % 10
    return np.choose(operator, [ordered[groups], ordered[groups + count - 1], middle, total])


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
    """The files of the Long Range Arena, or expressions made here after their rules, `examples` to train on.

    `depth` counts digits too; `shortest` and `longest` are in tokens, without parentheses.
    """

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
        if self.shortest > (most := _most_tokens(self.depth, self.arguments)):
            raise DataError(
                f"depth {self.depth} and {self.arguments} arguments make at most {most} tokens,"
                f" shortest is {self.shortest}"
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
        """Make expressions without end, each once."""
        random, seen = np.random.default_rng(self.seed), set()
        while True:
            for row, length, value in zip(*expressions(_TREES, self, random), strict=True):
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
    """The length of an expression in which every node above the largest depth is an operator."""
    tokens = 1
    for _ in range(depth - 1):
        tokens = 2 + arguments * tokens
    return tokens
