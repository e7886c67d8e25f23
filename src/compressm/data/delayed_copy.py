"""Delayed copy: say again what was said `delay` steps ago (Hochreiter & Schmidhuber 1997; Arjovsky et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from compressm.data.dataset import DataSet, Form
from compressm.data.errors import DataError, require_counts
from compressm.data.fetch import Progress
from compressm.data.shuffling import seeded
from compressm.data.splitting import Splits
from compressm.data.task import IGNORED, Split, TaskKind

BLANK, GO = 0, 1  # symbols begin at 2


@final
@dataclass(frozen=True)
class DelayedCopy(DataSet):
    """`copied` symbols, `delay` blanks, then at every GO the next of the symbols is asked for."""

    symbols: int = 8
    copied: int = 10
    delay: int = 100
    examples: int = 10_000
    held_out: int = 1_000
    seed: int = 0

    name = "delayed_copy"

    def __post_init__(self) -> None:
        require_counts(2, symbols=self.symbols)
        require_counts(copied=self.copied, examples=self.examples, held_out=self.held_out)
        require_counts(0, delay=self.delay)
        wanted, there = self.examples + 2 * self.held_out, self.symbols**self.copied
        # Half of all messages: more, and drawing them without repetition takes its time.
        if 2 * wanted > there:
            raise DataError(
                f"{wanted} examples of {self.copied} out of {self.symbols} symbols: there are {there}, "
                f"expected at most half of them, so that splits are disjoint"
            )

    @property
    def form(self) -> Form:
        length = 2 * self.copied + self.delay
        return Form(length=length, classes=self.symbols, kind=TaskKind.LABEL_STEPS, vocabulary=self.symbols + 2)

    def parse(self, paths: Sequence[Path], progress: Progress) -> Splits:
        counts = (self.examples, self.held_out, self.held_out)
        messages = self._messages(sum(counts))
        inputs = torch.full((sum(counts), self.form.length), BLANK, dtype=torch.int16)
        inputs[:, : self.copied] = messages + 2
        inputs[:, -self.copied :] = GO
        targets = torch.full(inputs.shape, IGNORED)
        targets[:, -self.copied :] = messages
        return Splits(*map(Split, inputs.split(counts), targets.split(counts)))

    def _messages(self, count: int) -> torch.Tensor:
        """All different, so that no split holds a message of another."""
        generator, found = seeded("delayed copy", self.seed), torch.empty(0, self.copied, dtype=torch.int64)
        while len(found) < count:
            drawn = torch.randint(self.symbols, (count, self.copied), generator=generator)
            found = torch.cat([found, drawn]).unique(dim=0)
        return found[torch.randperm(len(found), generator=generator)[:count]]
