"""Which balanced states to keep once their number is known: small frozen callables."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressm.compression.checks import require_count
from compressm.control import validation
from compressm.errors import CompressionError


class Selection(ABC):
    """A choice of `order` of the n states, by their places in the falling spectrum; the channels of a bank share it.

    The indices come sorted, on the CPU. `salt` is text that differs between layers and between cuts, for choices that
    are to differ there too.
    """

    def __call__(self, sigma: Float[Tensor, "*channels n"], order: int, *, salt: str) -> Int[Tensor, "order"]:
        """The states to keep, for `balanced_truncation(states=...)`."""
        if not isinstance(sigma, Tensor) or sigma.ndim == 0:
            raise CompressionError(f"sigma is {sigma!r:.100}, expected a tensor (*channels, n)")
        if not isinstance(salt, str):
            raise CompressionError(f"salt is {salt!r:.100}, expected text that names the layer and the cut")
        n = sigma.shape[-1]
        return torch.tensor(self.chosen(n, require_count("order", order, high=n), salt), dtype=torch.int64)

    @abstractmethod
    def chosen(self, n: int, order: int, salt: str) -> list[int]:
        """Sorted places from 0, the largest σ, to n − 1, the smallest."""


@final
@dataclass(frozen=True)
class Largest(Selection):
    """Balanced truncation as it should be: the states that matter most stay."""

    def chosen(self, n: int, order: int, salt: str) -> list[int]:
        return list(range(order))


@final
@dataclass(frozen=True)
class Smallest(Selection):
    """The opposite, as the paper's adversarial ablation (app:ablate_choice)."""

    def chosen(self, n: int, order: int, salt: str) -> list[int]:
        return list(range(n - order, n))


@final
@dataclass(frozen=True)
class Random(Selection):
    """States drawn uniformly, as the paper's ablation (app:ablate_choice): the same for the same seed and salt."""

    seed: int

    def __post_init__(self) -> None:
        seed = validation.as_integer(self.seed)
        if seed is None:
            raise CompressionError(f"Random: seed is {self.seed!r}, expected an integer")
        object.__setattr__(self, "seed", seed)

    def chosen(self, n: int, order: int, salt: str) -> list[int]:
        # Seeded by text, Python's generator hashes it with SHA-512: the same in every process.
        return sorted(random.Random(f"{self.seed} {salt}").sample(range(n), order))
