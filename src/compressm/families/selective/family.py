"""The family of selective layers (Mamba): the input chooses step, B and C, and averages over data replace Gramians."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compressm.adapters import SelectiveAdapter
from compressm.control import ControlError, StateCovariance, numerical_rank
from compressm.control.linear_algebra import each
from compressm.control.selective import SelectiveSystem
from compressm.errors import CompressionError
from compressm.families.base import Change, Family, Layer, PlannedCut, Total, Writing, energy_lost, reads
from compressm.families.choices import Choices, Selection
from compressm.families.observing import ratio_of
from compressm.families.selective.methods import Calibrated, SelectiveMethod
from compressm.families.selective.observer import Averages, SelectiveObservations, SelectiveObserver
from compressm.families.selective.reduction import SelectiveReduction
from compressm.families.selective.simulation import squared_change


@final
@dataclass(frozen=True)
class SelectiveLayer(Layer):
    """A module, its system, the method of its cuts, and its observations."""

    name: str
    module: nn.Module
    adapter: SelectiveAdapter[Any]
    system: SelectiveSystem
    method: SelectiveMethod
    observations: SelectiveObservations | None = None

    @property
    def order(self) -> int:
        return self.system.order

    @property
    def data(self) -> Calibrated:
        """The system and its observations."""
        assert self.observations is not None  # `require_choices` requires data
        return Calibrated(self.system, self.observations)

    def observer(self, choices: Choices) -> SelectiveObserver:
        covariance = StateCovariance() if self.method.measures(choices.gramian) else None
        observations = SelectiveObservations(self.name, covariance, averages=Averages.nothing(self.system))
        return SelectiveObserver(observations, self.module, self.system, choices.measurement, self.adapter)

    def with_observations(self, observer: SelectiveObserver) -> SelectiveLayer:
        return replace(self, observations=observer.observations)

    def imagined(self) -> SelectiveLayer:
        white = SelectiveObservations(self.name, None, averages=Averages.imagined(self.system))
        return replace(self, observations=white)

    def over(self, total: Total) -> SelectiveLayer:
        return replace(self, observations=self.data.observations.over(total))

    def received(self, sent: Any) -> SelectiveCut:
        reduction, lost = sent
        return SelectiveCut(self, reduction.to(self.system.device), None, lost)

    def spectrum(self) -> Float[Tensor, "*channels n"]:
        """The values of the states; errors name the layer."""
        try:
            return self.method.spectrum(self.data)
        except ControlError as error:
            raise CompressionError(f"{self.said}: {error}") from error

    def cut(self, kept: Sequence[Tensor], lost: float) -> SelectiveCut:
        """The cut that keeps the states at these places of the spectrum."""
        try:
            reduction = self.method.reduce(self.data, kept)
        except ControlError as error:
            raise CompressionError(f"{self.said}: {error}") from error
        cut = SelectiveCut(self, reduction, None, lost)
        return replace(cut, measured_error=ratio_of(cut.squared_change()))


@final
@dataclass(frozen=True)
class SelectiveCut(PlannedCut):
    """A reduction of one layer; there is no error bound, because inputs choose step, B and C."""

    layer: SelectiveLayer
    reduction: SelectiveReduction
    measured_error: float | None
    energy_lost: float
    error_bound: float | None = None

    @property
    def rank(self) -> int:
        return self.reduction.order

    @property
    def system(self) -> SelectiveSystem:
        """The reduced system."""
        return self.reduction.applied(self.layer.system)

    def change(self) -> Change:
        return self.reduction.change(self.layer.module, self.layer.adapter, self.layer.system)

    def following(self, module: nn.Module, adapter: SelectiveAdapter[Any]) -> Writing:
        return self.reduction.change(module, adapter, adapter.read(module).detach()).writing

    def sent(self) -> Any:
        return self.reduction.to("cpu"), self.energy_lost

    def squared_change(self) -> Float[Tensor, "2"]:
        return squared_change(self.layer.system, self.system, self.layer.data.observations.sample)


@reads(SelectiveAdapter)
@final
class SelectiveFamily(Family):
    """Cuts by averages over data of step, B and C; `selective=` is the method."""

    called = "selective layers"
    needs_data = True

    def require_choices(self, names: Sequence[str], choices: Choices) -> None:
        super().require_choices(names, choices)
        if choices.is_modal:
            said = ", ".join(name or "the model" for name in names)
            raise CompressionError(
                f"{said}: {choices.gramian} needs fixed poles, which selective layers do not have; expected"
                " WhiteNoise() or Measured(...)"
            )

    def read(self, name: str, module: nn.Module, adapter: SelectiveAdapter[Any], choices: Choices) -> SelectiveLayer:
        return SelectiveLayer(name, module, adapter, adapter.read(module).detach(), choices.selective)

    def require_layer(self, layer: SelectiveLayer, choices: Choices) -> None:
        layer.method.require(layer.said, layer.module, layer.adapter, layer.system)

    def is_by_channel(self, choices: Choices) -> bool:
        return choices.selective.by_channel

    def spectra(self, layers: Sequence[SelectiveLayer], choices: Choices) -> dict[str, Float[Tensor, "*channels n"]]:
        return dict(each(lambda layer: (layer.name, layer.spectrum()), layers))

    def plan(
        self,
        layers: Sequence[SelectiveLayer],
        orders: Mapping[str, Any],
        spectra: Mapping[str, Tensor],
        choices: Choices,
        salt: int,
    ) -> dict[str, PlannedCut]:
        plan_one = _plan_channels if self.is_by_channel(choices) else _plan_shared
        cuts = {layer.name: plan_one(layer, orders[layer.name], spectra[layer.name], choices, salt) for layer in layers}
        return {name: cut for name, cut in cuts.items() if cut is not None}


def _plan_shared(layer: SelectiveLayer, order: int, sigma: Tensor, choices: Choices, salt: int) -> SelectiveCut:
    kept = choices.select(sigma, order, salt=f"{layer.name}@{salt}")
    return layer.cut([kept], energy_lost(sigma, kept))


def _plan_channels(
    layer: SelectiveLayer, orders: Sequence[int], sigma: Tensor, choices: Choices, salt: int
) -> SelectiveCut | None:
    """A cut that gives every channel its own order; None if no channel gets fewer states."""
    sigma = sigma.cpu()
    wanted = _within_rank(torch.tensor(orders), sigma)
    wanted = torch.where(wanted < _present(layer), wanted, layer.order)
    if not bool((wanted < layer.order).any()):
        return None
    kept = [
        _chosen(one, int(order), choices.select, f"{layer.name}[{channel}]@{salt}")
        for channel, (one, order) in enumerate(zip(sigma, wanted, strict=True))
    ]
    return layer.cut(kept, _lost(sigma, kept))


def _chosen(sigma: Float[Tensor, " n"], order: int, select: Selection, salt: str) -> Int[Tensor, " _"]:
    """A selection within the numerical rank: states whose σ is rounding have no direction and give no rate."""
    there = max(int(numerical_rank(sigma)), order)
    return select(sigma[:there], order, salt=salt)


def _present(layer: SelectiveLayer) -> Int[Tensor, " channels"]:
    """The number of states of each channel."""
    maps = layer.system.maps
    return torch.full((layer.system.channels,), layer.order) if maps is None else maps.orders.cpu()


def _within_rank(orders: Tensor, sigma: Float[Tensor, "channels n"]) -> Int[Tensor, " channels"]:
    """The orders, at most the numerical rank for channels that are cut; channels of rank 0 keep their order."""
    rank = numerical_rank(sigma)
    cut = (orders < sigma.shape[-1]) & (rank > 0)
    return torch.where(cut, torch.minimum(orders, rank), orders)


def _lost(sigma: Float[Tensor, "channels n"], kept: list[Int[Tensor, " _"]]) -> float:
    """The share of Σσ over all channels that is dropped."""
    stays = torch.stack([one[states].sum() for one, states in zip(sigma, kept, strict=True)]).sum()
    whole = float(sigma.sum())
    return max(0.0, 1 - float(stays) / whole) if whole > 0 else 0.0
