"""Second moments of complex entries that vary independently, and how they pass through linear maps.

An optimizer keeps E[g²] of every real parameter and nothing between two of them. For x' = Σᵢ zᵢ xᵢ with independent xᵢ
the squares are E[(Re x')²] = Σ (Re zᵢ)² E[(Re xᵢ)²] + (Im zᵢ)² E[(Im xᵢ)²] − 2 Re zᵢ Im zᵢ E[Re xᵢ Im xᵢ].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor


@final
@dataclass(frozen=True)
class Spread:
    """E[(Re x)²], E[(Im x)²] and E[Re x Im x] of entries x, modes on the last axis but one."""

    re: Float[Tensor, "*bank n h"]
    im: Float[Tensor, "*bank n h"]
    mixed: Float[Tensor, "*bank n h"]

    @classmethod
    def of(cls, sources: Iterable[Complex[Tensor, "*bank n h"]]) -> Spread:
        """Of x = Σ ±source with signs that are independent of each other, in every entry."""
        parts = [(source.real, source.imag) for source in sources]
        sums = ([a * a for a, _ in parts], [b * b for _, b in parts], [a * b for a, b in parts])
        return cls(*(torch.stack(terms).sum(0) for terms in sums))

    def conjugated(self, modes: Bool[Tensor, "*bank n"]) -> Spread:
        """With the entries of these modes conjugated."""
        return Spread(self.re, self.im, torch.where(modes[..., None], -self.mixed, self.mixed))

    def through(self, z: Complex[Tensor, "*bank r n"]) -> Spread:
        """Of z x."""
        a, b = z.real, z.imag
        stacked = torch.cat([self.re, self.im, self.mixed], dim=-2)
        rows = (
            torch.cat([a * a, b * b, -2 * a * b], dim=-1),
            torch.cat([b * b, a * a, 2 * a * b], dim=-1),
            torch.cat([a * b, -a * b, a * a - b * b], dim=-1),
        )
        re, im, mixed = (row @ stacked for row in rows)
        # The sums are not negative, their rounding may be.
        return Spread(re.clamp_min(0), im.clamp_min(0), mixed)

    def along(self, direction: Complex[Tensor, "*bank n h"]) -> Float[Tensor, "*bank n h"]:
        """E[(Re d̄ x)²]."""
        a, b = direction.real, direction.imag
        return (a * a * self.re + b * b * self.im + 2 * a * b * self.mixed).clamp_min(0)

    def factors(self) -> tuple[Complex[Tensor, "*bank n h"], Complex[Tensor, "*bank n h"]]:
        """Two sources that have this spread."""
        first = torch.sqrt(self.re)
        usable = first > 0
        beside = torch.where(usable, self.mixed / torch.where(usable, first, 1), 0)
        rest = torch.sqrt((self.im - beside * beside).clamp_min(0))
        return torch.complex(first, beside), torch.complex(torch.zeros_like(rest), rest)
