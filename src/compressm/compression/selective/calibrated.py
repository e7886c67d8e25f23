"""A selective layer with its averages over data: what takes the place of its Gramians."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxtyping import Inexact
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

    @property
    def gramians(self) -> tuple[Inexact[Tensor, "channels n n"], Inexact[Tensor, "channels n n"]]:
        """P and Q of every channel, in continuous time.

        Q = E[C Cᵀ] / −(aᵢ + aⱼ). P is E[h hᵀ] where states were measured, else E[B Bᵀ] / −(aᵢ + aⱼ), as if what drives
        them were white in time. Both keep the variation of B and C, which their means would lose.
        """
        self.seen.require_enough(len(self.system.W_B))
        P, Q = self.gramians_of(self.seen.averages.mean("BB"), self.seen.averages.mean("CC"))
        return (P if self.seen.covariance is None else self.seen.covariance.gramian()), Q

    def gramians_of(
        self, moment_B: Inexact[Tensor, "m m"], moment_C: Inexact[Tensor, "m m"]
    ) -> tuple[Inexact[Tensor, "channels n n"], Inexact[Tensor, "channels n n"]]:
        """Those that these second moments of all channels' B and C give, in the coordinates of each channel."""
        system = self.system
        if system.maps is None:
            shape = (system.channels, system.order, system.order)
            return second_moment_gramians(system.rates, moment_B.expand(shape), moment_C.expand(shape))
        B, C, a = system.maps.B, system.maps.C, system.rates
        sums = -(a[..., :, None] + a[..., None, :].conj())
        return B @ moment_B.to(B.dtype) @ B.mH / sums, C.mH @ moment_C.to(C.dtype) @ C / sums.conj()
