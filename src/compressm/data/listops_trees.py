"""Random nested lists with their values, after the rules of the Long Range Arena (Tay et al. 2021).

A node is an operator with probability 1/4 and a digit otherwise, at the largest depth always a digit; an operator has
2 to `arguments` children. Trees whose length is out of range are thrown away. All trees of a batch grow together, level
by level: a level is one array over the nodes of all trees, and the children of a node stand side by side in the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from jaxtyping import Bool, Int64, UInt8

OPERATOR_SHARE = 0.25
MIN, MAX, MED, SM = range(4)
DIGIT = -1
FIRST_DIGIT, FIRST_OPERATOR, END = 1, 11, 15  # tokens; 0 is padding


@final
@dataclass(frozen=True)
class Rules:
    """Depth counts digits too; lengths are tokens without parentheses."""

    depth: int = 10
    arguments: int = 10
    shortest: int = 500
    longest: int = 2000


class Level(NamedTuple):
    """The nodes of one depth, in the order of their trees; `parent` counts the operators of the level above."""

    tree: Int64[np.ndarray, " nodes"]
    parent: Int64[np.ndarray, " nodes"]
    operator: Int64[np.ndarray, " nodes"]
    digit: Int64[np.ndarray, " nodes"]


class Expressions(NamedTuple):
    """Tokens, padded with 0, their number, and what each comes to."""

    tokens: UInt8[np.ndarray, "trees longest"]
    lengths: Int64[np.ndarray, " trees"]
    values: Int64[np.ndarray, " trees"]


def expressions(trees: int, rules: Rules, random: np.random.Generator) -> Expressions:
    """Those of `trees` random ones whose length is in range."""
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


def _grown(trees: int, rules: Rules, random: np.random.Generator) -> list[Level]:
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
    """The same without trees that do not fit."""
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
    """Where the children of each parent begin."""
    return np.flatnonzero(np.diff(level.parent, prepend=-1))


def _sizes(levels: list[Level]) -> list[Int64[np.ndarray, " _"]]:
    """Tokens of every node: one for a digit, two and those of its children for an operator."""
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
