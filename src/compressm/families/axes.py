"""Cuts by a matrix along the axis of states of each parameter, as a base for new families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters import Adapter
from compressm.adapters.base import parameter_of
from compressm.families.base import Change, Layer, PlannedCut, Values, Writing

# For each parameter: the axis of the states, W (r, n) and the lift T (n, r) with W T = I.
Maps: TypeAlias = Mapping[str, tuple[int, Float[Tensor, "r n"], Float[Tensor, "n r"]]]


@final
@dataclass(frozen=True)
class AxisCut(PlannedCut):
    """A cut of one layer by `maps`: θ' = W θ along the axis of the states."""

    layer: Layer
    maps: Maps
    energy_lost: float
    error_bound: float | None = None
    measured_error: float | None = None

    @property
    def rank(self) -> int:
        return _order(self.maps)

    def change(self) -> AxisChange:
        return AxisChange.of(self.layer.module, self.layer.adapter, self.maps)

    def following(self, module: nn.Module, adapter: Adapter[Any, Any]) -> Writing:
        return AxisChange.of(module, adapter, self.maps).writing

    def sent(self) -> Any:
        return _moved(self.maps, "cpu"), self.energy_lost, self.error_bound

    @classmethod
    def received(cls, layer: Layer, sent: Any) -> AxisCut:
        """The cut of a layer that another process sent."""
        maps, lost, bound = sent
        return cls(layer, _moved(maps, next(layer.module.parameters()).device), lost, bound)


@final
@dataclass(frozen=True)
class AxisChange(Change):
    """A change θ' = W θ of parameters along their axis of states.

    `maps` gives the axis, W (r, n) and the lift T (n, r) with W T = I for each parameter. A step d of θ' is a step T d
    of θ, hence g' = Tᵀ g. Parameters must be linear in the states: logarithms, for example, are not.
    """

    module: nn.Module
    writing: Writing
    maps: Maps

    @classmethod
    def of(cls, module: nn.Module, adapter: Adapter[Any, Any], maps: Maps) -> AxisChange:
        """The change by these maps, with the attributes of the new order."""
        values = {}
        for name, (axis, W, _) in maps.items():
            value = parameter_of(module, name).detach().double()
            values[name] = _along(axis, W.to(value), value)
        return cls(module, Writing(values, attributes=adapter.attributes(module, _order(maps))), maps)

    @property
    def resized(self) -> Sequence[str]:
        return list(self.maps)

    def gradient(self, moments: Values) -> dict[str, Tensor]:
        return {name: self._through(name, self.maps[name][2].mT, moment) for name, moment in moments.items()}

    def gradient_squares(self, squares: Values) -> dict[str, Tensor]:
        return {name: self._through(name, self.maps[name][2].mT.square(), square) for name, square in squares.items()}

    def update(self, moments: Values) -> dict[str, Tensor]:
        return {name: self._through(name, self.maps[name][1], moment) for name, moment in moments.items()}

    def update_squares(self, squares: Values) -> dict[str, Tensor]:
        return {name: self._through(name, self.maps[name][1].square(), square) for name, square in squares.items()}

    def _through(self, name: str, matrix: Tensor, moment: Tensor) -> Tensor:
        return _along(self.maps[name][0], matrix.to(moment), moment)

    def first(self, name: str, moment: Tensor) -> Tensor:
        axis, W, _ = self.maps[name]
        return moment.narrow(axis, 0, W.shape[0]).clone()


def _along(axis: int, matrix: Tensor, value: Tensor) -> Tensor:
    return torch.tensordot(matrix, value, dims=([1], [axis])).movedim(0, axis)


def _order(maps: Maps) -> int:
    return next(iter(maps.values()))[1].shape[0]


def _moved(maps: Maps, device: torch.device | str) -> dict[str, tuple[int, Tensor, Tensor]]:
    return {name: (axis, W.to(device), T.to(device)) for name, (axis, W, T) in maps.items()}
