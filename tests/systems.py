"""LRU systems to test on: as initialised, and with the spread of poles, phases and gains that training leaves."""

import math

import torch

from compressm.control import DiagonalSystem


def _draws(seed, bank):
    """Functions that draw uniform and complex normal tensors, the axes of the bank in front, from one seed."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*bank, *shape, generator=generator, dtype=torch.float64)

    def normal(*shape):
        return torch.randn(*bank, *shape, generator=generator, dtype=torch.float64)

    def complex_normal(*shape):
        return torch.complex(normal(*shape), normal(*shape))

    return uniform, normal, complex_normal


def lru_at_initialisation(order, width, *, seed=0, bank=()):
    """|λ| uniform in the area of the ring [0.9, 0.999], phases up to 6.28 (Orvieto et al. 2023)."""
    uniform, _, complex_normal = _draws(seed, bank)
    radius = torch.sqrt(0.9**2 + uniform(order) * (0.999**2 - 0.9**2))
    log_poles = torch.complex(torch.log(radius), 6.28 * uniform(order))
    B = torch.sqrt(1 - radius**2)[..., None] * complex_normal(order, width) / math.sqrt(2 * width)
    return DiagonalSystem.from_log_poles(log_poles, B, complex_normal(width, order) / math.sqrt(order))


def lru_trained_like(order, width, *, seed=0, bank=()):
    """Many slow modes, half of the phases near 0, few strong channels, unequal gains."""
    uniform, normal, complex_normal = _draws(seed, bank)
    slow, near_zero = uniform(order) < 0.25, uniform(order) < 0.5
    slow_gap, fast_gap = (_log_uniform(uniform(order), *ends) for ends in ((1e-4, 3e-3), (3e-3, 0.1)))
    gap = torch.where(slow, slow_gap, fast_gap)
    phase = torch.where(near_zero, 0.5 * uniform(order) ** 3, 6.28 * uniform(order))
    channel = torch.arange(1, width + 1, dtype=torch.float64) ** -1.0
    gain = torch.exp(normal(order)) * torch.sqrt(gap)
    B = gain[..., None] * complex_normal(order, width) * channel
    C = complex_normal(width, order) * channel[:, None] / math.sqrt(order)
    return DiagonalSystem.from_log_poles(torch.complex(torch.log1p(-gap), phase), B, C)


def _log_uniform(uniform, low, high):
    return torch.exp(math.log(low) + uniform * math.log(high / low))
