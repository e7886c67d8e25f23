"""The family of selective layers (Mamba): the input chooses step, B and C, and averages over data replace Gramians."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters import SelectiveAdapter
from compressm.adapters.base import read_with
from compressm.adapters.mamba import IMAGINARY
from compressm.control import StateCovariance, numerical_rank
from compressm.control.selective import SelectiveSystem
from compressm.families.base import Values, reads
from compressm.families.choices import Choices, Measured
from compressm.families.fitting import halves
from compressm.families.observing import ZERO_INPUTS, MeasuredCut, MeasuredFamily, MeasuredLayer
from compressm.families.selective.methods import Calibrated, SelectiveMethod
from compressm.families.selective.observer import Averages, SelectiveObservations, SelectiveObserver
from compressm.families.selective.reduction import SelectiveReduction
from compressm.families.selective.simulation import squared_change
from compressm.layers.base import StateMap


@final
@dataclass(frozen=True)
class SelectiveLayer(MeasuredLayer):
    """A module, its system, the method of its cuts, and its observations."""

    name: str
    module: nn.Module
    adapter: SelectiveAdapter[Any]
    system: SelectiveSystem
    method: SelectiveMethod
    observations: SelectiveObservations | None = None

    @property
    def way(self) -> SelectiveMethod:
        return self.method

    @property
    def why_zero(self) -> str:
        for name, rows in (("B", self.system.W_B), ("C", self.system.W_C)):
            if not bool(rows.any()):
                return f"{name} is zero"
        averages = self.data.observations.averages
        return super().why_zero if bool(averages.BB.any() and averages.CC.any()) else ZERO_INPUTS

    @property
    def data(self) -> Calibrated:
        """The system and its observations."""
        assert self.observations is not None  # `require_choices` requires data
        return Calibrated(self.system, self.observations)

    def observer(self, choices: Choices) -> SelectiveObserver:
        covariance = StateCovariance() if self.method.measures(choices.gramian) else None
        observations = SelectiveObservations(self.name, covariance, averages=Averages.nothing(self.system))
        return SelectiveObserver(observations, self.module, self.system, choices.measurement, self.adapter)

    def imagined(self) -> SelectiveLayer:
        white = SelectiveObservations(self.name, None, averages=Averages.imagined(self.system))
        return replace(self, observations=white)

    def cut(self, kept: Tensor | Sequence[Tensor], lost: float) -> SelectiveCut:
        """The cut that keeps these states: the same ones of all channels, or a list for each."""
        found: SelectiveCut = super().cut([kept] if isinstance(kept, Tensor) else kept, lost)
        return found

    def _cut(self, reduction: SelectiveReduction, lost: float) -> SelectiveCut:
        return SelectiveCut(self, reduction, None, lost)


@final
@dataclass(frozen=True)
class SelectiveCut(MeasuredCut):
    """A reduction of one layer; inputs choose step, B and C, so there is no bound."""

    @property
    def system(self) -> SelectiveSystem:
        """The reduced system."""
        found: SelectiveSystem = self.reduction.applied(self.layer.system)
        return found

    def state_map(self, module: nn.Module, adapter: SelectiveAdapter[Any], values: Values) -> StateMap | None:
        """E_B h, divided by the factor of B that a module with tied norms stores behind its scan.

        Exact for a selection without norms; a projection averages rates, and norms are over fewer entries.
        """
        E_B, past = self.reduction.E_B, adapter.state_growth(module).first
        complex_before = getattr(module, IMAGINARY, None) is not None
        norms = self.system.norms
        E_B = E_B if norms is None or not norms.tied else E_B / norms.B[0]

        def carried(state: Float[Tensor, "batch inner kept"]) -> Float[Tensor, "batch inner remaining"]:
            inputs, h = state[..., :past].double(), state[..., past:].double()
            h = torch.complex(*h.chunk(2, dim=-1)) if complex_before else h
            h = (E_B.to(h.device) @ h.to(E_B.dtype)[..., None])[..., 0]
            h = torch.cat([h.real, h.imag], dim=-1) if h.is_complex() else h
            return torch.cat([inputs, h], dim=-1).to(state.dtype)

        return carried

    def squared_change(self) -> Float[Tensor, "2"]:
        sample = self.layer.data.observations.sample
        # A fit is judged by sequences that it has not seen.
        sample = sample if self.reduction.added is None else halves(sample)[1]
        return squared_change(self.layer.system, self.system, sample)


@reads(SelectiveAdapter)
@final
class SelectiveFamily(MeasuredFamily):
    """Cuts by averages over data of step, B and C; `selective=` is the method."""

    called = "selective layers"
    gramians = "WhiteNoise() or Measured(...)"
    uses = frozenset({"selective"})

    def overrules_gramian(self, choices: Choices) -> bool:
        given = choices.gramian
        return given is not None and choices.selective.measures(given) != isinstance(given, Measured)

    def read(self, name: str, module: nn.Module, adapter: SelectiveAdapter[Any], choices: Choices) -> SelectiveLayer:
        return SelectiveLayer(name, module, adapter, read_with(adapter, module).detach(), choices.selective)

    def is_by_channel(self, choices: Choices) -> bool:
        return choices.selective.by_channel

    def planned(
        self, layer: SelectiveLayer, order: Any, sigma: Tensor, choices: Choices, salt: int
    ) -> SelectiveCut | None:
        if self.is_by_channel(choices):
            return _plan_channels(layer, order, sigma, choices, salt)
        found: SelectiveCut = super().planned(layer, order, sigma, choices, salt)
        return found


def _plan_channels(
    layer: SelectiveLayer, orders: Sequence[int], sigma: Tensor, choices: Choices, salt: int
) -> SelectiveCut | None:
    """A cut that gives every channel its own order; None if no channel gets fewer states."""
    sigma, wanted, maps = sigma.cpu(), torch.tensor(orders, device="cpu"), layer.system.maps
    # A channel that is cut keeps at most its numerical rank; a channel of rank 0 keeps its order.
    rank = numerical_rank(sigma)
    wanted = torch.where((wanted < sigma.shape[-1]) & (rank > 0), torch.minimum(wanted, rank), wanted)
    present = torch.full((layer.system.channels,), layer.order, device="cpu") if maps is None else maps.orders.cpu()
    wanted = torch.where(wanted < present, wanted, layer.order)
    if not bool((wanted < layer.order).any()):
        return None
    kept = []
    for channel, (one, order) in enumerate(zip(sigma, wanted.tolist(), strict=True)):
        # Within the rank: states whose σ is rounding have no direction and give no rate.
        usable = one[: max(int(numerical_rank(one)), order)]
        kept.append(choices.select(usable, order, salt=f"{layer.name}[{channel}]@{salt}"))
    stays = float(torch.stack([one[states].sum() for one, states in zip(sigma, kept, strict=True)]).sum())
    whole = float(sigma.sum())
    return layer.cut(kept, max(0.0, 1 - stays / whole) if whole > 0 else 0.0)
