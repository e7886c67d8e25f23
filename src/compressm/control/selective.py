"""Selective layers as systems: rates that are fixed, and a step, B and C that the input chooses at every moment."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor
from torch.nn.functional import softplus


@dataclass(frozen=True)
class ChannelMaps:
    """B and C of every channel from those of all: E_Bⁱ B and C E_Cⁱ, of which the first `orders[i]` states count."""

    B: Inexact[Tensor, "channels n m"]
    C: Inexact[Tensor, "channels m n"]
    orders: Int[Tensor, " channels"]

    def to(self, device: torch.device | str) -> ChannelMaps:
        """On another device."""
        return ChannelMaps(self.B.to(device), self.C.to(device), self.orders.to(device))


@dataclass(frozen=True)
class SelectiveSystem:
    """h[t] = exp(Δ a) h[t−1] + Δ B u[t], y[t] = Re(C h[t]) for every channel, a bank whose B and C all channels share.

    Δ = softplus(W_Δ u + bias) with W_Δ = `step_out` `step_in`, B = W_B u, C = W_C u, from the inputs u[t] of all
    channels. With `maps` each channel has a B and a C of its own, and rates may be complex.
    """

    rates: Inexact[Tensor, "channels n"]
    step_in: Float[Tensor, "rank channels"]
    step_out: Float[Tensor, "channels rank"]
    step_bias: Float[Tensor, " channels"]
    W_B: Float[Tensor, "m channels"]
    W_C: Float[Tensor, "m channels"]
    maps: ChannelMaps | None = None

    @property
    def order(self) -> int:
        return self.rates.shape[-1]

    @property
    def channels(self) -> int:
        return self.rates.shape[0]

    @property
    def device(self) -> torch.device:
        return self.rates.device

    def selected(
        self, u: Float[Tensor, "*steps channels"]
    ) -> tuple[Float[Tensor, "*steps channels"], Float[Tensor, "*steps m"], Float[Tensor, "*steps m"]]:
        """Δ, B and C that these inputs choose."""
        delta = softplus(u @ self.step_in.mT @ self.step_out.mT + self.step_bias)
        return delta, u @ self.W_B.mT, u @ self.W_C.mT

    def projected(
        self,
        E_B: Float[Tensor, "r n"],
        E_C: Float[Tensor, "n r"],
        rates: Float[Tensor, "channels r"],
    ) -> SelectiveSystem:
        """With B ← E_B B and C ← C E_C in all channels."""
        return replace(self, rates=rates, W_B=E_B @ self.W_B, W_C=E_C.mT @ self.W_C)

    def detach(self) -> SelectiveSystem:
        """Without a graph."""
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "maps"}
        return replace(self, **{name: part.detach() for name, part in parts.items()})
