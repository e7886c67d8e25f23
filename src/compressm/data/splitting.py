"""Splits that the official files do not have: the same on every machine and for every training seed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from compressm.data.shuffling import seeded
from compressm.data.task import Split

SHARE = 0.1  # of the training set, for validation


class Splits(NamedTuple):
    """All examples, each in one of three."""

    train: Split
    validation: Split
    test: Split


def hold_out(
    targets: Int64[Tensor, " examples"], share: float = SHARE, *, purpose: str = "validation"
) -> tuple[Int64[Tensor, " kept"], Int64[Tensor, " held"]]:
    """Indices to keep and to hold out, ascending; every class gives the same share."""
    generator = seeded("hold out", purpose)
    held = torch.zeros(len(targets), dtype=torch.bool)
    labels, counts = targets.unique(return_counts=True)
    for label, count in zip(labels.tolist(), _shares(counts, share).tolist(), strict=True):
        members = (targets == label).nonzero()[:, 0]
        held[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


def _shares(counts: Int64[Tensor, " classes"], share: float) -> Int64[Tensor, " classes"]:
    """Whole numbers near share · counts; they add up to share of the sum, rounded (largest remainders)."""
    exact = share * counts.double()
    whole = exact.floor()
    missing = round(float(exact.sum())) - int(whole.sum())
    whole[(exact - whole).argsort(descending=True, stable=True)[:missing]] += 1
    return whole.long()


def with_validation(train: Split, test: Split) -> Splits:
    """A tenth of the training examples become the validation split."""
    kept, held = hold_out(train.targets)
    return Splits(train.select(kept), train.select(held), test)


def in_three(everything: Split) -> Splits:
    """80 % to train on, 10 % each for validation and test."""
    rest, test = hold_out(everything.targets, SHARE, purpose="test")
    kept, held = hold_out(everything.targets[rest], SHARE / (1 - SHARE))
    return Splits(everything.select(rest[kept]), everything.select(rest[held]), everything.select(test))
