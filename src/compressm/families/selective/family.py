"""A selective layer before a cut, and a cut of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compressm.adapters import Adapter, SelectiveAdapter
from compressm.compression.distributed import Processes
from compressm.compression.options import Options
from compressm.compression.orders import choose_channel_orders, restricted
from compressm.control import ControlError, numerical_rank
from compressm.control.selective import SelectiveSystem
from compressm.errors import AdapterError, CompressionError
from compressm.families.base import Change, Layer, PlannedCut, Writing
from compressm.families.choices import Selection
from compressm.families.observing import ratio_of
from compressm.families.selective.methods import Calibrated, SelectiveMethod
from compressm.families.selective.reduction import Reduction
from compressm.families.selective.simulation import squared_change


@final
@dataclass(frozen=True)
class SelectiveLayer(Layer):
    """A module with the system it is now, what it saw, and how it would be cut."""

    name: str
    module: nn.Module
    adapter: SelectiveAdapter[Any]
    data: Calibrated
    method: SelectiveMethod

    @property
    def system(self) -> SelectiveSystem:
        return self.data.system

    @property
    def order(self) -> int:
        return self.system.order

    def over(self, processes: Processes) -> SelectiveLayer:
        return replace(self, data=Calibrated(self.system, self.data.seen.over(processes)))

    def received(self, sent: Any) -> SelectiveCut:
        reduction, lost = sent
        return SelectiveCut(self, reduction.to(self.system.device), None, lost)

    def spectrum(self) -> Float[Tensor, "*channels n"]:
        """Values of the states; what cannot be computed is said with the layer's name."""
        try:
            return self.method.spectrum(self.data)
        except ControlError as error:
            raise CompressionError(f"{self.name or 'the model'}: {error}") from error

    def cut(self, kept: Sequence[Tensor], lost: float) -> SelectiveCut:
        """Onto the states at these places of the spectrum."""
        try:
            reduction = self.method.reduce(self.data, kept)
        except ControlError as error:
            raise CompressionError(f"{self.name or 'the model'}: {error}") from error
        cut = SelectiveCut(self, reduction, None, lost)
        return cut.measured(ratio_of(cut.squared_change()))


@final
@dataclass(frozen=True)
class SelectiveCut(PlannedCut):
    """How the states of one layer become fewer; no bound holds for all that its input may choose."""

    layer: SelectiveLayer
    reduction: Reduction
    measured_error: float | None
    energy_lost: float
    error_bound: float | None = None

    @property
    def rank(self) -> int:
        return self.reduction.order

    @property
    def system(self) -> SelectiveSystem:
        """What the layer becomes."""
        return self.reduction.applied(self.layer.system)

    def change(self) -> Change:
        return self.reduction.change(self.layer.module, self.layer.adapter, self.layer.system)

    def following(self, module: nn.Module, adapter: Adapter[Any, Any]) -> Writing:
        assert isinstance(adapter, SelectiveAdapter)
        return self.reduction.change(module, adapter, adapter.read(module).detach()).writing

    def sent(self) -> Any:
        return self.reduction.to("cpu"), self.energy_lost

    def squared_change(self) -> Float[Tensor, "2"]:
        return squared_change(self.layer.system, self.system, self.layer.data.seen.sample)

    def measured(self, error: float) -> SelectiveCut:
        return replace(self, measured_error=error)


def read_selective(name: str, module: nn.Module, adapter: SelectiveAdapter[Any]) -> SelectiveSystem:
    """A layer as it is now; what is wrong with it is said with its name."""
    try:
        return adapter.read(module).detach()
    except (ControlError, AdapterError) as error:
        raise CompressionError(f"{name or 'the model'}: {error}") from error


def plan_channels(
    layers: Iterable[SelectiveLayer], values: Mapping[str, Tensor], options: Options, salt: int
) -> dict[str, SelectiveCut]:
    """The layers of which some channels are to have fewer states."""
    named = {layer.name: layer for layer in layers}
    orders = choose_channel_orders(
        {name: values[name] for name in named},
        options.keep,
        overrides=restricted(options.overrides, named),
        gate=options.gate,
        round_to=options.round_to,
        at_least=options.at_least,
    )
    planned = {}
    for name, layer in named.items():
        sigma = values[name].cpu()
        wanted = _within_rank(torch.tensor(orders[name]), sigma)
        wanted = torch.where(wanted < _present(layer), wanted, layer.order)
        if bool((wanted < layer.order).any()):
            kept = [
                _chosen(one, int(order), options.select, f"{name}[{channel}]@{salt}")
                for channel, (one, order) in enumerate(zip(sigma, wanted, strict=True))
            ]
            planned[name] = layer.cut(kept, _lost(sigma, kept))
    return planned


def _chosen(sigma: Float[Tensor, " n"], order: int, select: Selection, salt: str) -> Int[Tensor, " _"]:
    """Of the states that are there: those whose σ is rounding have no direction, and a mode made of one no rate."""
    there = max(int(numerical_rank(sigma)), order)
    return select(sigma[:there], order, salt=salt)


def _present(layer: SelectiveLayer) -> Int[Tensor, " channels"]:
    """States that each channel has."""
    maps = layer.system.maps
    return torch.full((layer.system.channels,), layer.order) if maps is None else maps.orders.cpu()


def _within_rank(orders: Tensor, sigma: Float[Tensor, "channels n"]) -> Int[Tensor, " channels"]:
    """No channel that is cut keeps more than its numerical rank; those without a trace are left alone."""
    rank = numerical_rank(sigma)
    cut = (orders < sigma.shape[-1]) & (rank > 0)
    return torch.where(cut, torch.minimum(orders, rank), orders)


def _lost(sigma: Float[Tensor, "channels n"], kept: list[Int[Tensor, " _"]]) -> float:
    """The share of Σσ over all channels that goes."""
    stays = torch.stack([one[states].sum() for one, states in zip(sigma, kept, strict=True)]).sum()
    whole = float(sigma.sum())
    return max(0.0, 1 - float(stays) / whole) if whole > 0 else 0.0
