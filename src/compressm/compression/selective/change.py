"""What an optimizer has learned about a selective layer, carried through a cut of that layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters import SelectiveAdapter
from compressm.adapters.mamba import PROJECTION, RATES
from compressm.compression.change import Change, Values, Writing
from compressm.control.selective import SelectiveSystem

Pair = tuple[Tensor, Tensor, Tensor]  # E_B, E_C and M


@final
@dataclass(frozen=True)
class SharedChange(Change):
    """The rows of x_proj are W_B' = E_B W_B and W_C' = E_Cᵀ W_C, the rates a' = M a = −exp(A_log').

    Moving W_B' by d is moving W_B by E_C d, hence g_B' = E_Cᵀ g_B; in the same way g_C' = E_B g_C and g_a' = M g_a,
    for the diagonal of E_C diag(a') E_B is Mᵀ a'. The rows of Δ stay as they are.
    """

    module: nn.Module
    writing: Writing
    old: SelectiveSystem
    new: SelectiveSystem
    E_B: Float[Tensor, "r n"]
    E_C: Float[Tensor, "n r"]
    mixing: Float[Tensor, "r n"]

    @classmethod
    def to(
        cls,
        module: nn.Module,
        adapter: SelectiveAdapter[Any],
        old: SelectiveSystem,
        new: SelectiveSystem,
        pair: Pair,
    ) -> SharedChange:
        """With the values that the adapter gives the new system."""
        writing = Writing(adapter.encode(module, new), attributes=adapter.attributes(module, new.order))
        return cls(module, writing, old, new, *pair)

    @property
    def resized(self) -> Sequence[str]:
        return [PROJECTION, RATES]

    def gradient(self, moments: Values) -> dict[str, Tensor]:
        # ∂/∂A_log = a ∂/∂a.
        return self._carried(moments, self.E_C.mT, self.E_B, 1 / self.old.rates, self.new.rates)

    def gradient_squares(self, squares: Values) -> dict[str, Tensor]:
        return self._carried(squares, self.E_C.mT, self.E_B, 1 / self.old.rates, self.new.rates, squared=True)

    def update(self, moments: Values) -> dict[str, Tensor]:
        return self._carried(moments, self.E_B, self.E_C.mT, self.old.rates, 1 / self.new.rates)

    def update_squares(self, squares: Values) -> dict[str, Tensor]:
        return self._carried(squares, self.E_B, self.E_C.mT, self.old.rates, 1 / self.new.rates, squared=True)

    def first(self, name: str, moment: Tensor) -> Tensor:
        if name == RATES:
            return moment[:, : self.new.order].clone()
        step, B, C = self._blocks(moment)
        return torch.cat([step, B[: self.new.order], C[: self.new.order]])

    def _carried(
        self, moments: Values, of_B: Tensor, of_C: Tensor, before: Tensor, after: Tensor, *, squared: bool = False
    ) -> dict[str, Tensor]:
        """Blocks of rows by these maps; rates as diag(after) M diag(before), or all by the squares of the entries."""
        mixing = self.mixing
        if squared:
            of_B, of_C, before, after, mixing = (part.square() for part in (of_B, of_C, before, after, mixing))
        carried = {}
        for name, moment in moments.items():
            if name == RATES:
                carried[name] = (moment * before) @ mixing.mT * after
            else:
                step, B, C = self._blocks(moment)
                carried[name] = torch.cat([step, of_B @ B, of_C @ C])
        return carried

    def _blocks(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Those of Δ, B and C."""
        rank, n = len(self.old.step_in), self.old.order
        return rows[:rank], rows[rank : rank + n], rows[rank + n :]
