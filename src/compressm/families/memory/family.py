"""The family of layers with a matrix state, S ← α S + k vᵀ and o = Sᵀ q: moments over data replace Gramians."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters.memory import KEY_MAP, Memory, MemoryAdapter
from compressm.errors import CompressionError, warn_caller
from compressm.families.base import ComparedForm, PlannedCut, Values, reads
from compressm.families.choices import Choices, Measured, WhiteNoise, require_count
from compressm.families.memory.forms import Form, Mapped, ObservedMemory, changed_by_eps, compared_forms, default_form
from compressm.families.memory.observer import MemoryObservations, MemoryObserver
from compressm.families.memory.reduction import MemoryReduction
from compressm.families.observing import ZERO_INPUTS, MeasuredCut, MeasuredFamily, MeasuredLayer
from compressm.layers.base import StateMap

# The share of a norm's output above which a change by its ε is worth a warning.
_COUNTS = 0.01


@final
@dataclass(frozen=True)
class MemoryLayer(MeasuredLayer):
    """A module, the rows of its keys and queries, the form of its cuts, and its observations."""

    name: str
    module: nn.Module
    adapter: MemoryAdapter[Any]
    system: Memory
    form: Form
    observations: MemoryObservations | None = None

    @property
    def way(self) -> Form:
        return self.form

    @property
    def why_zero(self) -> str:
        for name, rows in (("keys", self.system.keys), ("queries", self.system.queries)):
            if not any(bool(part.any()) for part in rows.values()):
                return f"its {name} are zero"
        return ZERO_INPUTS

    @property
    def data(self) -> ObservedMemory:
        """The memory and its observations."""
        assert self.observations is not None  # `require_choices` requires data
        return ObservedMemory(self.module, self.adapter, self.system, self.observations)

    def observer(self, choices: Choices) -> MemoryObserver:
        used = choices.gramian.batches if isinstance(choices.gramian, Measured) else None
        observations = MemoryObservations(self.name)
        return MemoryObserver(observations, self.module, self.system, choices.measurement, self.adapter, used)

    def imagined(self) -> MemoryLayer:
        return replace(self, observations=MemoryObservations.imagined(self.name, self.system))

    def _cut(self, reduction: MemoryReduction, lost: float) -> MemoryCut:
        return MemoryCut(self, reduction, None, lost)

    def state_bytes(self, order: int) -> int:
        if isinstance(self.form, Mapped):
            return self.adapter.mapped_state_bytes(self.module, order)
        return super().state_bytes(order)

    def state_parameters(self) -> int:
        if isinstance(self.form, Mapped):
            raise CompressionError(
                f"{self.said}: Budget(parameters=...) needs a form that makes parameters fewer, but {self.form} keeps"
                " all of them and adds maps; expected form=Fitted() or Selected(), or a budget of states or state_bytes"
            )
        return super().state_parameters()

    def compared_forms(self, order: int) -> list[ComparedForm]:
        return compared_forms(self.data, require_count("order", order, high=self.order))


@final
@dataclass(frozen=True)
class MemoryCut(MeasuredCut):
    """A reduction of one layer; `measured_error` is that of the form which is stored.

    `energy_lost` is the share of Σσ² that was dropped: for `Folded` and `Mapped` its root estimates the error, exactly
    so if queries and states are uncorrelated.
    """

    def state_map(self, module: nn.Module, adapter: MemoryAdapter[Any], values: Values) -> StateMap:
        """Ŝ = Wᵀ S for states (batch, heads, …, n); windows of convolutions keep their rows if maps follow them."""
        W = self.reduction.W

        def carried(state: Float[Tensor, "batch heads _ kept"]) -> Float[Tensor, "batch heads _ remaining"]:
            by_group = state.double().reshape(len(state), len(W), -1, *state.shape[2:])
            return torch.einsum("bgh...n,gnr->bgh...r", by_group, W.to(state.device)).flatten(1, 2).to(state.dtype)

        vars(carried)["keeps_windows"] = KEY_MAP in values
        return carried

    def squared_change(self) -> Float[Tensor, "2"]:
        found: Tensor = self.layer.data.squared_change(self.reduction)
        return found


@reads(MemoryAdapter)
@final
class MemoryFamily(MeasuredFamily):
    """Cuts by measured moments of states and queries; `form=` says how a cut is stored."""

    called = "layers with a matrix state"
    gramians = "Measured(...)"
    uses = frozenset({"form"})

    def require_choices(self, names: Sequence[str], choices: Choices) -> None:
        super().require_choices(names, choices)
        said = ", ".join(name or "the model" for name in names)
        if isinstance(choices.gramian, WhiteNoise):
            raise CompressionError(
                f"{said}: {choices.gramian} needs fixed keys and queries; their means, the paper's surrogate, give a"
                " system of rank one whatever the order is; expected gramian=None or Measured(...), with calibrate"
            )

    def read(self, name: str, module: nn.Module, adapter: MemoryAdapter[Any], choices: Choices) -> MemoryLayer:
        memory = adapter.read(module).detach()
        return MemoryLayer(name, module, adapter, memory, choices.form or default_form(adapter, module, memory))

    def plan(
        self,
        layers: Sequence[MemoryLayer],
        orders: Mapping[str, Any],
        spectra: Mapping[str, Tensor],
        choices: Choices,
        salt: int,
    ) -> dict[str, PlannedCut]:
        cuts = super().plan(layers, orders, spectra, choices, salt)
        _warn_of_eps(list(cuts.values()))
        return cuts


def _warn_of_eps(cuts: Sequence[Any]) -> None:
    """Warn of norms behind the read-out that change with the size of their input, which a cut multiplies."""
    changes = [changed_by_eps(cut.layer.data, cut.reduction) for cut in cuts]
    count, most = sum(change > _COUNTS for change in changes), max(changes, default=0.0)
    if count == 0:
        return
    worst = cuts[changes.index(most)]
    layer, more = worst.layer, "" if count == 1 else f" (and {count - 1} more)"
    warn_caller(
        f"{layer.said}{more}: outputs of this {type(layer.module).__name__} are so small that the ε"
        f" {layer.adapter.norm_eps(layer.module):.3g} of the norm behind them counts: with {worst.rank} in place of"
        f" {layer.order} states the norm's output changes by {100 * most:.2g} %, which the measured error"
        " leaves out. Training after the cut makes up for it; a model with a smaller ε avoids it"
    )
