"""The paper's form of a cut (app:mamba): every channel has states of its own, and maps that lead to them are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compressm.adapters import SelectiveAdapter
from compressm.compression.gramian import Gramian
from compressm.compression.selective.calibrated import Calibrated
from compressm.compression.selective.channel_reduction import ChannelReduction
from compressm.compression.selective.methods import SelectiveMethod, require_truth
from compressm.control import DiagonalSystem, galerkin_projection, hankel_singular_values, mean_selective_system
from compressm.control.balancing import GramianPair, balance, hankel_values
from compressm.control.hankel import gramian_pair
from compressm.control.projection import Modes, diagonal_modes
from compressm.errors import CompressionError

_SURROGATES = ("mean", "second_moment", "measured")


@final
@dataclass(frozen=True)
class PerChannel(SelectiveMethod):
    """Every channel is balanced by itself, to an order of its own; maps of B and C stay in the layer.

    Only the r columns that are kept of the paper's T and T⁻¹ are stored: whole ones do not exist in any precision.
    What stands in for a channel is the paper's `mean` system exp(E[Δ] a), E[Δ] E[B], E[C], or Gramians from
    `second_moment`s, which keep the variation of B and C, or of states `measured` on the data. With
    `two_sided=False` the projection is the symmetric one of `Baked`, whose rates are real; balancing may give complex
    ones, and a layer with complex states then. A policy is asked about every channel by itself.

    With means the reduced A is log(Wᵀ exp(E[Δ] A) T) / E[Δ], which is stable for all channels, as Wᵀ A T is not.
    """

    by_channel: ClassVar[bool] = True

    surrogate: str = "second_moment"
    two_sided: bool = True

    def __post_init__(self) -> None:
        if self.surrogate not in _SURROGATES:
            raise CompressionError(
                f"PerChannel: surrogate is {self.surrogate!r}, expected {', '.join(map(repr, _SURROGATES))}"
            )
        require_truth(self, two_sided=self.two_sided)

    def measures(self, gramian: Gramian | None) -> bool:
        return self.surrogate == "measured"

    def require(self, name: str, module: nn.Module, adapter: SelectiveAdapter[Any]) -> None:
        if not adapter.keeps_maps:
            raise CompressionError(
                f"{name}: a {type(module).__name__} cannot keep maps for every channel, which {self} needs; expected"
                " selective=Baked() or SharedIndex()"
            )
        if not self.two_sided and adapter.read(module).rates.is_complex():
            raise CompressionError(
                f"{name}: rates are complex since an earlier cut, of which {self} can make nothing; expected"
                " two_sided=True"
            )

    def spectrum(self, layer: Calibrated) -> Float[Tensor, "channels n"]:
        if self.surrogate == "mean":
            return hankel_singular_values(_mean_system(layer))
        return hankel_values(GramianPair.of(*layer.gramians))

    def reduce(self, layer: Calibrated, kept: Sequence[Int[Tensor, " _"]]) -> ChannelReduction:
        orders, gramians = [len(states) for states in kept], self._gramians(layer)
        parts: dict[tuple[int, ...], Modes] = {}
        for order in sorted(set(orders)):
            members = [channel for channel, own in enumerate(orders) if own == order]
            states = torch.stack([kept[member] for member in members]).to(layer.system.device)
            parts[tuple(members)] = self._modes(layer, gramians, members, states)
        return ChannelReduction.of(layer.system, parts)

    def _modes(
        self, layer: Calibrated, gramians: tuple[Tensor, Tensor], members: list[int], states: Int[Tensor, "members r"]
    ) -> Modes:
        rates, maps = layer.system.rates[members], layer.system.maps
        if states.shape[-1] == rates.shape[-1]:
            return _as_they_are(rates, None if maps is None else maps.orders[members])
        if self.surrogate == "mean" and self.two_sided:
            return _of_means(_mean_system(layer)[members], layer.seen.averages.mean("step")[members], states)
        P, Q = (gramian[members] for gramian in gramians)
        if not self.two_sided:
            found = galerkin_projection(rates, P, Q, states.shape[-1], states=states)
            return _single(found.rates, found.E_B, found.E_C)
        result = balance(GramianPair.of(P, Q), states)
        return diagonal_modes(result.left.mH @ (rates[..., :, None] * result.right), result.left, result.right)

    def _gramians(self, layer: Calibrated) -> tuple[Tensor, Tensor]:
        if self.surrogate != "mean":
            return layer.gramians
        B, C = (layer.seen.averages.mean(of) for of in ("B", "C"))
        return layer.gramians_of(B[:, None] * B, C[:, None] * C)


def _mean_system(layer: Calibrated) -> DiagonalSystem:
    """The paper's stand-in for every channel."""
    layer.seen.require_enough(len(layer.system.W_B))
    system, averages = layer.system, layer.seen.averages
    step, B, C = (averages.mean(of) for of in ("step", "B", "C"))
    if system.maps is None:
        return mean_selective_system(system.rates, step, B.expand_as(system.rates), C.expand_as(system.rates))
    maps = system.maps
    inputs, outputs = maps.B @ B.to(maps.B.dtype), C.to(maps.C.dtype) @ maps.C
    return DiagonalSystem(
        torch.exp(step[:, None] * system.rates), (step[:, None] * inputs)[..., None], outputs[..., None, :]
    )


def _of_means(system: DiagonalSystem, step: Float[Tensor, " members"], states: Int[Tensor, "members r"]) -> Modes:
    """In discrete time, at the mean step; the rates whose samples those are."""
    result = balance(gramian_pair(system, None), states)
    modes = diagonal_modes(result.left.mH @ (system.poles[..., :, None] * result.right), result.left, result.right)
    values = modes.values if bool((modes.values.real > 0).all()) else modes.values.to(torch.complex128)
    there = torch.arange(values.shape[-1], device=values.device) < modes.count[:, None]
    rates = torch.log(torch.where(there, values, 0.5)) / step[:, None]
    return Modes(rates, modes.E_B, modes.E_C, modes.twice, modes.count)


def _as_they_are(rates: Tensor, count: Tensor | None) -> Modes:
    """Channels that are not cut."""
    unit = torch.eye(rates.shape[-1], dtype=rates.dtype, device=rates.device).expand(len(rates), -1, -1)
    return _single(rates, unit, unit, count)


def _single(rates: Tensor, E_B: Tensor, E_C: Tensor, count: Tensor | None = None) -> Modes:
    """None of them for two, and all of them there unless a count is given."""
    count = torch.full((len(rates),), rates.shape[-1], device=rates.device) if count is None else count
    return Modes(rates, E_B, E_C, torch.zeros_like(rates, dtype=torch.bool), count)
