"""In which order examples are seen: a function of seed and step alone, so that resuming needs no state."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from jaxtyping import Int64
from torch import Tensor

from compressm.data.errors import DataError, require_counts


@final
@dataclass(frozen=True)
class Order:
    """Batches of indices without end, a new permutation every epoch; what is left smaller than a batch is dropped."""

    examples: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        require_counts(examples=self.examples, batch=self.batch)
        if self.examples < self.batch:
            raise DataError(f"{self.examples} examples are fewer than a batch of {self.batch}")

    @property
    def steps_per_epoch(self) -> int:
        return self.examples // self.batch

    def at(self, step: int) -> Int64[Tensor, " batch"]:
        """The examples of gradient step `step`, the first being 1."""
        return self.rows(step, step)[0]

    def rows(self, first: int, last: int) -> Int64[Tensor, "steps batch"]:
        """Those of steps `first` to `last`, both included."""
        if not 1 <= first <= last:
            raise DataError(f"steps {first} to {last}, expected 1 <= first <= last")
        steps = self.steps_per_epoch
        epochs = range((first - 1) // steps, (last - 1) // steps + 1)
        rows = torch.cat([self._epoch(epoch) for epoch in epochs])
        skipped = first - 1 - epochs.start * steps
        return rows[skipped : skipped + last - first + 1].clone()

    def _epoch(self, epoch: int) -> Int64[Tensor, "steps batch"]:
        shuffled = _permutation(self.examples, self.seed, epoch)
        return shuffled[: self.steps_per_epoch * self.batch].unflatten(0, (-1, self.batch))


# Two: consecutive steps of one epoch, and rows that reach into the next.
@lru_cache(maxsize=2)
def _permutation(examples: int, seed: int, epoch: int) -> Int64[Tensor, " examples"]:
    return torch.randperm(examples, generator=seeded(seed, epoch))


def seeded(*words: int | str) -> torch.Generator:
    """A generator of its own for every sequence of words; torch's own numbers go on as if it had not been."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
