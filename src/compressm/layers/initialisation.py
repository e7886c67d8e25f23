"""Where the poles of a bank of systems start: small frozen callables from the order to (Re a, Im a)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from compressm.layers.hippo import inv_poles, legs_poles, lin_poles


class Initialisation(ABC):
    """A choice of n poles in the left half plane."""

    @abstractmethod
    def __call__(self, n: int) -> Float[Tensor, "2 n"]:
        """(Re a, Im a) of the n poles."""


@final
@dataclass(frozen=True)
class Lin(Initialisation):
    """Evenly spaced frequencies: aₖ = −½ + iπk."""

    def __call__(self, n: int) -> Float[Tensor, "2 n"]:
        return lin_poles(n)


@final
@dataclass(frozen=True)
class Inv(Initialisation):
    """Frequencies that fall like 1/k, from N²/π: aₖ = −½ + i (N/π) (N/(2k+1) − 1), N = 2n."""

    def __call__(self, n: int) -> Float[Tensor, "2 n"]:
        return inv_poles(n)


@final
@dataclass(frozen=True)
class Legs(Initialisation):
    """The spectrum of the normal part of HiPPO-LegS."""

    def __call__(self, n: int) -> Float[Tensor, "2 n"]:
        return legs_poles(n)
