"""How the states of a selective layer become fewer: linear maps of its B and C, and rates that are means of the old."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters import SelectiveAdapter
from compressm.compression.change import Change
from compressm.compression.selective.change import SharedChange
from compressm.control import Projection
from compressm.control.selective import SelectiveSystem


class Reduction(ABC):
    """A change of basis, which also other layers of the same shapes can go through."""

    @property
    @abstractmethod
    def order(self) -> int:
        """States that are left."""

    @abstractmethod
    def applied(self, system: SelectiveSystem) -> SelectiveSystem:
        """The smaller system."""

    @abstractmethod
    def change(self, module: nn.Module, adapter: SelectiveAdapter[Any], system: SelectiveSystem) -> Change:
        """Of the module that is this system now."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Reduction:
        """On another device."""


@final
@dataclass(frozen=True)
class SharedReduction(Reduction):
    """B ← E_B B, C ← C E_C and a ← M a in all channels, with E_B E_C = I; each row of M sums to 1."""

    E_B: Float[Tensor, "r n"]
    E_C: Float[Tensor, "n r"]
    mixing: Float[Tensor, "r n"]

    @classmethod
    def of(cls, projection: Projection) -> SharedReduction:
        """With M = E_B ∘ E_Cᵀ, so that M a = diag(E_B diag(a) E_C)."""
        return cls(projection.E_B, projection.E_C, projection.E_B * projection.E_C.mT)

    def refitted(self, E_C: Float[Tensor, "n r"]) -> SharedReduction:
        """With other rows of C; states stay the same."""
        return replace(self, E_C=E_C)

    @property
    def order(self) -> int:
        return self.E_B.shape[0]

    def applied(self, system: SelectiveSystem) -> SelectiveSystem:
        return system.projected(self.E_B, self.E_C, system.rates @ self.mixing.mT)

    def change(self, module: nn.Module, adapter: SelectiveAdapter[Any], system: SelectiveSystem) -> Change:
        return SharedChange.to(module, adapter, system, self.applied(system), (self.E_B, self.E_C, self.mixing))

    def to(self, device: torch.device | str) -> SharedReduction:
        return SharedReduction(self.E_B.to(device), self.E_C.to(device), self.mixing.to(device))
