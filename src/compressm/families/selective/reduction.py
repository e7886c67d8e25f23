"""Reductions of selective layers, and how an optimizer's moments go through the same change of basis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Inexact, Int
from torch import Tensor, nn

from compressm.adapters import SelectiveAdapter
from compressm.adapters.mamba import IMAGINARY, PROJECTION, RATES
from compressm.control.projection import Modes
from compressm.control.selective import ChannelMaps, Norms, Resized, SelectiveSystem, before_norm
from compressm.families.base import Change, Values, Writing


@final
@dataclass(frozen=True)
class SharedChange(Change):
    """One projection for all channels: W_B' = E_B W_B and W_C' = E_Cᵀ W_C in x_proj, rates a' = M a = −exp(A_log').

    A step d of W_B' is a step E_C d of W_B, hence g_B' = E_Cᵀ g_B; in the same way g_C' = E_B g_C and g_a' = M g_a,
    because the diagonal of E_C diag(a') E_B is Mᵀ a'. The rows of Δ do not change. Norms put `maps` in the place of E_B
    and E_C, and add parameters: weights go as rates do, and others are multiplied by `factors`.
    """

    module: nn.Module
    writing: Writing
    old: SelectiveSystem
    new: SelectiveSystem
    reduction: SharedReduction
    weights: tuple[str, str] | None = None  # the names of the norms' weights of B and C
    factors: Values = field(default_factory=dict)

    @property
    def resized(self) -> Sequence[str]:
        return [name for name in self.values if name not in self.writing.added]

    def gradient(self, moments: Values) -> dict[str, Tensor]:
        return self._carried(moments, covectors=True)

    def gradient_squares(self, squares: Values) -> dict[str, Tensor]:
        return self._carried(squares, covectors=True, squared=True)

    def update(self, moments: Values) -> dict[str, Tensor]:
        return self._carried(moments)

    def update_squares(self, squares: Values) -> dict[str, Tensor]:
        return self._carried(squares, squared=True)

    def first(self, name: str, moment: Tensor) -> Tensor:
        if name in self.factors:
            return moment.clone()
        if name != PROJECTION:
            return moment[..., : self.new.order].clone()
        step, B, C = self._blocks(moment)
        return torch.cat([step, B[: self.new.order], C[: self.new.order]])

    def _carried(self, moments: Values, *, covectors: bool = False, squared: bool = False) -> dict[str, Tensor]:
        """Map rows of B and C, and rates by diag(after) M diag(before); `squared` squares the entries of all maps."""
        of = self.reduction.covector_maps(self.old) if covectors else self.reduction.vector_maps(self.old)
        before, after = self.old.rates, 1 / self.new.rates
        if covectors:
            # ∂/∂A_log = a ∂/∂a.
            before, after = 1 / self.old.rates, self.new.rates
        carried = {}
        for name, moment in moments.items():
            if name in self.factors:
                factor = 1 / self.factors[name] if covectors else self.factors[name]
                carried[name] = moment * _entries(factor, squared)
            elif name == RATES:
                mixing = _entries(self.reduction.mixing, squared)
                carried[name] = (moment * _entries(before, squared)) @ mixing.mT * _entries(after, squared)
            elif name == PROJECTION:
                step, *both = self._blocks(moment)
                rows = [_entries(matrix, squared) @ part for matrix, part in zip(of.rows, both, strict=True)]
                carried[name] = torch.cat([step, *rows])
            else:
                assert self.weights is not None
                carried[name] = _entries(of.weights[self.weights.index(name)], squared) @ moment
        return carried

    def _blocks(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of Δ, B and C."""
        rank, n = len(self.old.step_in), self.old.order
        return rows[:rank], rows[rank : rank + n], rows[rank + n :]


def _entries(matrix: Tensor, squared: bool) -> Tensor:
    return matrix.square() if squared else matrix


class _Maps(NamedTuple):
    """The factors of moments of the rows of B and C, and of the weights of their norms, if there are norms."""

    rows: tuple[Float[Tensor, "r n"], Float[Tensor, "r n"]]
    weights: tuple[Float[Tensor, "r n"], ...] = ()


class Added(NamedTuple):
    """The sums that a fit adds to the rows of B and C, to log −a, and to the weights of norms if there are some."""

    W_B: Float[Tensor, "r channels"]
    W_C: Float[Tensor, "r channels"]
    log_rates: Float[Tensor, "channels r"]
    B: Float[Tensor, " r"] | None = None
    C: Float[Tensor, " r"] | None = None

    @classmethod
    def between(cls, start: SelectiveSystem, found: SelectiveSystem) -> Added:
        """The difference between two systems of the same order."""
        rows = (found.W_B - start.W_B, found.W_C - start.W_C, torch.log(found.rates / start.rates))
        if start.norms is None or found.norms is None:
            return cls(*rows)
        return cls(*rows, found.norms.B - start.norms.B, found.norms.C - start.norms.C)

    def to_system(self, system: SelectiveSystem) -> SelectiveSystem:
        """The system with all of it added."""
        found = replace(
            system, rates=system.rates * torch.exp(self.log_rates), W_B=system.W_B + self.W_B, W_C=system.W_C + self.W_C
        )
        if system.norms is None or self.B is None or self.C is None:
            return found
        return replace(found, norms=replace(system.norms, B=system.norms.B + self.B, C=system.norms.C + self.C))


class SelectiveReduction(ABC):
    """A change of basis that can be applied to any layer of the same shapes; states become E_B h."""

    E_B: Tensor
    added: Added | None = None

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
    """B ← E_B B, C ← C E_C and a ← M a in all channels, with E_B E_C = I; each row of M sums to 1.

    Norms of B and C take factors, `resized`. What a fit found is `added`; it does not move with the old values.
    """

    E_B: Float[Tensor, "r n"]
    E_C: Float[Tensor, "n r"]
    mixing: Float[Tensor, "r n"]
    resized: tuple[Resized, Resized] | None = None
    added: Added | None = None

    @property
    def order(self) -> int:
        return self.E_B.shape[0]

    def applied(self, system: SelectiveSystem) -> SelectiveSystem:
        found = system.projected(self.E_B, self.E_C, system.rates @ self.mixing.mT, self.resized)
        return found if self.added is None else self.added.to_system(found)

    def change(self, module: nn.Module, adapter: SelectiveAdapter[Any], system: SelectiveSystem) -> Change:
        new = self.applied(system)
        writing = Writing.of(module, adapter, new, new.order)
        return SharedChange(module, writing, system, new, self, adapter.NORMED, adapter.factors(new))

    def vector_maps(self, old: SelectiveSystem) -> _Maps:
        """The maps from steps of the old parameters to steps of the new ones."""
        if old.norms is None or self.resized is None:
            return _Maps((self.E_B, self.E_C.mT))
        rows, weights = [], []
        for E, w, by in self._parts(old.norms, self.resized):
            M, v = before_norm(E, w)
            rows.append(by.rows * M)
            # v² Σ_j E_ij² = Σ_j E_ij² w_j², so v moves by Σ_j E_ij² w_j dw_j / (v Σ_j E_ij²).
            weights.append((by.weights * _inverse(v * E.square().sum(-1)))[:, None] * E.square() * w)
        return _Maps((rows[0], rows[1]), tuple(weights))

    def covector_maps(self, old: SelectiveSystem) -> _Maps:
        """The maps from gradients of the old parameters to those of the new ones; divisors of norms count as fixed."""
        if old.norms is None or self.resized is None:
            return _Maps((self.E_C.mT, self.E_B))
        rows, weights = [], []
        for (E, w, by), dual in zip(self._parts(old.norms, self.resized), (self.E_C.mT, self.E_B), strict=True):
            # A step before the norm counts by its weight, which is v now and was w.
            rows.append(before_norm(E, w)[1][:, None] * dual * _inverse(w) / by.rows)
            weights.append(E * dual / by.weights[:, None])
        return _Maps((rows[0], rows[1]), tuple(weights))

    def _parts(
        self, norms: Norms, resized: tuple[Resized, Resized]
    ) -> tuple[tuple[Tensor, Tensor, Resized], tuple[Tensor, Tensor, Resized]]:
        """The maps of B and C, the weights of their norms, and the factors."""
        return (self.E_B, norms.B, resized[0]), (self.E_C.mT, norms.C, resized[1])

    def to(self, device: torch.device | str) -> SharedReduction:
        resized = None if self.resized is None else (self.resized[0].to(device), self.resized[1].to(device))
        added = None if self.added is None else Added(*(None if p is None else p.to(device) for p in self.added))  # type: ignore[arg-type]
        return SharedReduction(self.E_B.to(device), self.E_C.to(device), self.mixing.to(device), resized, added)


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 for 0."""
    return torch.where(x != 0, 1 / torch.where(x != 0, x, 1), 0)


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
