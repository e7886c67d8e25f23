"""Gradients that travel together with their sums."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class Link(NamedTuple):
    """Zeros that stand for a change of u: `carrier` one at every step, `totals` a shift and a scale for all steps.

    Whoever uses u through a link takes its value as a constant and sends the gradient g of u to `carrier`, Σ g and
    Σ g ⊙ u over all steps to `totals`. A norm needs those sums, and products with u have them at hand, where the norm
    would have to read g and u once more.
    """

    u: Float[Tensor, "batch length width"]
    carrier: Float[Tensor, "batch length width"]
    totals: Float[Tensor, "2 width"] | None = None

    def zeros(self) -> Float[Tensor, "batch length width"]:
        """What is added to the value of u, or to D ⊙ u, for autograd to do all of this by itself."""
        if self.totals is None:
            return self.carrier
        shift, scale = self.totals.to(self.u.dtype)
        return self.carrier + shift + scale * self.u.detach()
