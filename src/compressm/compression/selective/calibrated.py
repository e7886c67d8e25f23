"""A selective layer with its averages over data: what takes the place of its Gramians."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

from jaxtyping import Float
from torch import Tensor

from compressm.compression.selective.seen import SelectiveSeen
from compressm.control import second_moment_gramians
from compressm.control.selective import SelectiveSystem


@final
@dataclass(frozen=True)
class Calibrated:
    """The system that a layer is now, and what it saw."""

    system: SelectiveSystem
    seen: SelectiveSeen

    @cached_property
    def gramians(self) -> tuple[Float[Tensor, "channels n n"], Float[Tensor, "channels n n"]]:
        """P and Q of every channel, in continuous time.

        Q = E[C Cᵀ] / −(aᵢ + aⱼ). P is E[h hᵀ] where states were measured, else E[B Bᵀ] / −(aᵢ + aⱼ), as if what drives
        them were white in time. Both keep the variation of B and C, which their means would lose.
        """
        system, averages = self.system, self.seen.averages
        self.seen.require_enough(system.order)
        shape = (system.channels, system.order, system.order)
        P, Q = second_moment_gramians(
            system.rates, averages.mean("BB").expand(shape), averages.mean("CC").expand(shape)
        )
        return (P if self.seen.covariance is None else self.seen.covariance.gramian()), Q
