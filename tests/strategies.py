"""Systems for hypothesis: poles to 0.9999, ties, clusters, zeros, dead rows and columns, real and complex."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st

from compressm.control import DiagonalSystem

# For what takes long: a quarter of the examples of the profile.
few = settings(max_examples=settings().max_examples // 4)

_KINDS = ("spread", "ties", "clusters", "zeros", "slow", "real")


@st.composite
def diagonal_systems(draw, max_order: int = 64, max_channels: int = 16, bank: tuple[int, ...] = ()) -> DiagonalSystem:
    """The shape and the kind are hypothesis's to shrink, the numbers come from a drawn seed."""
    n = draw(st.integers(1, max_order))
    p, q = draw(st.integers(1, max_channels)), draw(st.integers(1, max_channels))
    kind = draw(st.sampled_from(_KINDS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    uniform = torch.rand(4, *bank, n, generator=generator, dtype=torch.float64)
    normal = torch.randn(2, *bank, n, p + q, generator=generator, dtype=torch.float64)
    radius, phase = _ring(kind, uniform)
    poles = torch.polar(radius, phase)
    gains = torch.complex(normal[0], normal[1])
    gains = gains * 10 ** (4 * uniform[2, ..., None] - 2) if draw(st.booleans()) else gains
    if kind == "real":
        poles, gains = radius * torch.cos(phase).sign(), normal[0]
    B, C = gains[..., :p], gains[..., p:].mT
    if kind == "zeros":
        B = torch.where((uniform[3] < 0.3)[..., None], 0, B)
        C = torch.where((uniform[3] > 0.8)[..., None, :], 0, C)
        poles = torch.where(uniform[2] < 0.2, 0, poles)
    return DiagonalSystem(poles, B, C)


def _ring(kind: str, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    radius, phase = 0.9999 * uniform[0], 6.28 * uniform[1]
    if kind == "ties":
        return (3 * radius).ceil() / 3 * 0.999, (3 * phase).round() / 3
    if kind == "clusters":
        return 0.9 + 1e-9 * radius, 0.5 + 1e-7 * phase
    if kind == "slow":
        return 1 - 10 ** (-4 + 2 * uniform[0]), phase
    return radius, phase
