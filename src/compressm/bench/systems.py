"""LRU systems to measure on: as initialised, and as training leaves them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compressm.control import DiagonalSystem


def lru_at_initialisation(order: int, width: int, *, seed: int = 0, bank: tuple[int, ...] = ()) -> DiagonalSystem:
    """An LRU layer before training: |λ| in the ring [0.9, 0.999], phases up to 6.28 (Orvieto et al. 2023)."""
    draw = _Draw(seed, bank)
    radius = torch.sqrt(0.9**2 + draw.uniform(order) * (0.999**2 - 0.9**2))
    log_poles = torch.complex(torch.log(radius), 6.28 * draw.uniform(order))
    gamma = torch.sqrt(1 - radius**2)
    B = gamma[..., None] * draw.complex_normal(order, width) / math.sqrt(2 * width)
    return DiagonalSystem.from_log_poles(log_poles, B, draw.complex_normal(width, order) / math.sqrt(order))


def lru_trained_like(order: int, width: int, *, seed: int = 0, bank: tuple[int, ...] = ()) -> DiagonalSystem:
    """What training makes of it: many slow modes, half of the phases near 0, few strong channels, unequal gains."""
    draw = _Draw(seed, bank)
    slow, near_zero = draw.uniform(order) < 0.25, draw.uniform(order) < 0.5
    gap = torch.where(slow, _log_uniform(draw.uniform(order), 1e-4, 3e-3), _log_uniform(draw.uniform(order), 3e-3, 0.1))
    phase = torch.where(near_zero, 0.5 * draw.uniform(order) ** 3, 6.28 * draw.uniform(order))
    channel = torch.arange(1, width + 1, dtype=torch.float64) ** -1.0
    gain = torch.exp(draw.normal(order)) * torch.sqrt(gap)
    B = gain[..., None] * draw.complex_normal(order, width) * channel
    C = draw.complex_normal(width, order) * channel[:, None] / math.sqrt(order)
    return DiagonalSystem.from_log_poles(torch.complex(torch.log1p(-gap), phase), B, C)


class _Draw:
    """Random tensors with the bank axes in front, from one seed."""

    def __init__(self, seed: int, bank: tuple[int, ...]) -> None:
        self.generator, self.bank = torch.Generator().manual_seed(seed), bank

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*self.bank, *shape, generator=self.generator, dtype=torch.float64)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*self.bank, *shape, generator=self.generator, dtype=torch.float64)

    def complex_normal(self, *shape: int) -> Tensor:
        return torch.complex(self.normal(*shape), self.normal(*shape))


def _log_uniform(uniform: Tensor, low: float, high: float) -> Tensor:
    return torch.exp(math.log(low) + uniform * math.log(high / low))
