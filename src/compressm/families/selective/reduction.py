"""Reductions of selective layers, and how an optimizer's moments go through the same change of basis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Inexact, Int
from torch import Tensor, nn

from compressm.adapters import SelectiveAdapter
from compressm.adapters.mamba import IMAGINARY, PROJECTION, RATES
from compressm.control.projection import Modes
from compressm.control.selective import ChannelMaps, SelectiveSystem
from compressm.families.base import Change, Values, Writing


@final
@dataclass(frozen=True)
class SharedChange(Change):
    """One projection for all channels: W_B' = E_B W_B and W_C' = E_Cᵀ W_C in x_proj, rates a' = M a = −exp(A_log').

    A step d of W_B' is a step E_C d of W_B, hence g_B' = E_Cᵀ g_B; in the same way g_C' = E_B g_C and g_a' = M g_a,
    because the diagonal of E_C diag(a') E_B is Mᵀ a'. The rows of Δ do not change.
    """

    module: nn.Module
    writing: Writing
    old: SelectiveSystem
    new: SelectiveSystem
    reduction: SharedReduction

    @property
    def resized(self) -> Sequence[str]:
        return [PROJECTION, RATES]

    def gradient(self, moments: Values) -> dict[str, Tensor]:
        return self._carried(moments, covectors=True)

    def gradient_squares(self, squares: Values) -> dict[str, Tensor]:
        return self._carried(squares, covectors=True, squared=True)

    def update(self, moments: Values) -> dict[str, Tensor]:
        return self._carried(moments)

    def update_squares(self, squares: Values) -> dict[str, Tensor]:
        return self._carried(squares, squared=True)

    def first(self, name: str, moment: Tensor) -> Tensor:
        if name == RATES:
            return moment[:, : self.new.order].clone()
        step, B, C = self._blocks(moment)
        return torch.cat([step, B[: self.new.order], C[: self.new.order]])

    def _carried(self, moments: Values, *, covectors: bool = False, squared: bool = False) -> dict[str, Tensor]:
        """Map rows of B and C, and rates by diag(after) M diag(before); `squared` squares the entries of all maps."""
        mixing, of_B, of_C = self.reduction.mixing, self.reduction.E_B, self.reduction.E_C.mT
        before, after = self.old.rates, 1 / self.new.rates
        if covectors:
            # ∂/∂A_log = a ∂/∂a.
            of_B, of_C, before, after = of_C, of_B, 1 / self.old.rates, self.new.rates
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
        """The rows of Δ, B and C."""
        rank, n = len(self.old.step_in), self.old.order
        return rows[:rank], rows[rank : rank + n], rows[rank + n :]


class SelectiveReduction(ABC):
    """A change of basis that can be applied to any layer of the same shapes; states become E_B h."""

    E_B: Tensor

    @property
    @abstractmethod
    def order(self) -> int:
        """The number of states that stay."""

    @abstractmethod
    def applied(self, system: SelectiveSystem) -> SelectiveSystem:
        """The smaller system."""

    @abstractmethod
    def change(self, module: nn.Module, adapter: SelectiveAdapter[Any], system: SelectiveSystem) -> Change:
        """The change of a module that computes this system."""

    @abstractmethod
    def to(self, device: torch.device | str) -> SelectiveReduction:
        """A copy on `device`."""


@final
@dataclass(frozen=True)
class SharedReduction(SelectiveReduction):
    """B ← E_B B, C ← C E_C and a ← M a in all channels, with E_B E_C = I; each row of M sums to 1."""

    E_B: Float[Tensor, "r n"]
    E_C: Float[Tensor, "n r"]
    mixing: Float[Tensor, "r n"]

    @property
    def order(self) -> int:
        return self.E_B.shape[0]

    def applied(self, system: SelectiveSystem) -> SelectiveSystem:
        return system.projected(self.E_B, self.E_C, system.rates @ self.mixing.mT)

    def change(self, module: nn.Module, adapter: SelectiveAdapter[Any], system: SelectiveSystem) -> Change:
        new = self.applied(system)
        writing = Writing.of(module, adapter, new, new.order)
        return SharedChange(module, writing, system, new, self)

    def to(self, device: torch.device | str) -> SharedReduction:
        return SharedReduction(self.E_B.to(device), self.E_C.to(device), self.mixing.to(device))


@final
@dataclass(frozen=True)
class ChannelReduction(SelectiveReduction):
    """B ← E_Bⁱ B, C ← C E_Cⁱ in channel i, whose old rates become `rates`; it has `count[i]` states.

    `twice` marks the complex modes that represent a conjugate pair; E_C doubles them.
    """

    E_B: Inexact[Tensor, "channels r n"]
    E_C: Inexact[Tensor, "channels n r"]
    rates: Inexact[Tensor, "channels r"]
    old_rates: Inexact[Tensor, "channels n"]
    twice: Bool[Tensor, "channels r"]
    count: Int[Tensor, " channels"]

    @classmethod
    def of(cls, system: SelectiveSystem, parts: Mapping[tuple[int, ...], Modes]) -> ChannelReduction:
        """The reduction to these modes, given for groups of channels; states that a channel lacks are zeros."""
        count = torch.zeros(system.channels, dtype=torch.int64, device=system.device)
        for members, modes in parts.items():
            count[list(members)] = modes.count.to(count.device)
        order, n = int(count.max()), system.order
        complex_ones = system.rates.is_complex() or any(modes.values.is_complex() for modes in parts.values())
        kind = torch.complex128 if complex_ones else torch.float64
        E_B = torch.zeros(system.channels, order, n, dtype=kind, device=system.device)
        rates, twice = -torch.ones_like(E_B[..., 0]), torch.zeros_like(E_B[..., 0], dtype=torch.bool)
        E_C = torch.zeros_like(E_B.mT)
        for members, modes in parts.items():
            rows, size = list(members), min(order, modes.values.shape[-1])
            there = torch.arange(size, device=system.device) < modes.count[:, None]
            E_B[rows, :size], E_C[rows, :, :size] = modes.E_B[:, :size].to(kind), modes.E_C[..., :size].to(kind)
            rates[rows, :size] = torch.where(there, modes.values[:, :size].to(kind), -1)
            twice[rows, :size] = modes.twice[:, :size]
        return cls(E_B, E_C, rates, system.rates, twice, count)

    @property
    def order(self) -> int:
        return self.rates.shape[-1]

    @property
    def mixing(self) -> Inexact[Tensor, "channels r n"]:
        """The weights E_B ∘ E_Cᵀ with which each new rate is a mean of old ones; each row sums to 1."""
        return self.E_B * self.E_C.mT / (1 + self.twice[..., None].to(torch.float64))

    def applied(self, system: SelectiveSystem) -> SelectiveSystem:
        # The rates of a copy that follows differ a little from those that the reduction was computed for.
        apart = (system.rates - self.old_rates).to(self.rates.dtype)
        rates = self.rates + (self.mixing @ apart[..., None])[..., 0]
        B, C = self.E_B, self.E_C
        if system.maps is not None:
            B, C = B @ system.maps.B.to(B.dtype), system.maps.C.to(C.dtype) @ C
        return replace(system, rates=rates, maps=ChannelMaps(B, C, self.count))

    def change(self, module: nn.Module, adapter: SelectiveAdapter[Any], system: SelectiveSystem) -> Change:
        new = self.applied(system)
        writing = Writing.of(module, adapter, new, new.order)
        return ChannelChange(module, writing, system.rates, new.rates, self)

    def to(self, device: torch.device | str) -> ChannelReduction:
        return ChannelReduction(*(getattr(self, field.name).to(device) for field in fields(self)))


@final
@dataclass(frozen=True)
class ChannelChange(Change):
    """Own states for every channel: x_proj does not change; a' = M a, and gradients g' = M̃* g with M̃ = E_B ∘ E_Cᵀ.

    a = −exp(A_log) + i A_imag. A step d of a' moves the diagonal of E_C diag(a') E_B by M̃ᵀ d; a real a takes the real
    part. M̃ counts modes that represent a pair twice.
    """

    module: nn.Module
    writing: Writing
    old: Inexact[Tensor, "channels n"]
    new: Inexact[Tensor, "channels r"]
    reduction: ChannelReduction

    @property
    def resized(self) -> Sequence[str]:
        return [name for name in self.values if name not in self.writing.added]

    def gradient(self, moments: Values) -> dict[str, Tensor]:
        return self._carried(moments, self._covector(), 1 / self.old.real, self.new.real)

    def gradient_squares(self, squares: Values) -> dict[str, Tensor]:
        return self._carried(squares, self._covector(), 1 / self.old.real, self.new.real, squared=True)

    def update(self, moments: Values) -> dict[str, Tensor]:
        return self._carried(moments, self.reduction.mixing, self.old.real, 1 / self.new.real)

    def update_squares(self, squares: Values) -> dict[str, Tensor]:
        return self._carried(squares, self.reduction.mixing, self.old.real, 1 / self.new.real, squared=True)

    def first(self, name: str, moment: Tensor) -> Tensor:
        return moment[:, : self.reduction.order].clone()

    def _covector(self) -> Inexact[Tensor, "channels r n"]:
        return (self.reduction.E_B * self.reduction.E_C.mT).conj()

    def _carried(
        self, moments: Values, through: Tensor, before: Tensor, after: Tensor, *, squared: bool = False
    ) -> dict[str, Tensor]:
        """Real and imaginary parts mapped by a complex matrix, or, if `squared`, by the squares of its entries."""
        re, im = through.real, through.imag if through.is_complex() else torch.zeros_like(through)
        rows = ((re, -im), (im, re))
        if squared:
            before, after = before.square(), after.square()
            rows = ((re.square(), im.square()), (im.square(), re.square()))
        held = [moments.get(name) for name in (RATES, IMAGINARY)]
        parts = [None if held[0] is None else held[0] * before, held[1]]
        sums = [
            sum((row @ part[..., None])[..., 0] for row, part in zip(both, parts, strict=True) if part is not None)
            for both in rows
        ]
        carried = {RATES: sums[0] * after, IMAGINARY: sums[1]}
        return {name: torch.as_tensor(carried[name]) for name in moments}
