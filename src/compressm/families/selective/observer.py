"""Observation of selective layers: averages over data of Δ, B and C, states, and a sample of inputs, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressm.adapters import AdapterError, SelectiveAdapter
from compressm.control.selective import SelectiveSystem
from compressm.errors import CompressionError
from compressm.families.base import Total
from compressm.families.observing import InputObserver, Observations, sequences_at_once
from compressm.families.selective.simulation import states, steps_at_once


@final
@dataclass
class Averages:
    """Sums over steps without padding: of Δ for every channel, of B and C, and of B Bᵀ and C Cᵀ.

    B and C are those of the system divided by its `scales`.
    """

    count: Float[Tensor, ""]
    step: Float[Tensor, " channels"]
    B: Float[Tensor, " m"]
    C: Float[Tensor, " m"]
    BB: Float[Tensor, "m m"]
    CC: Float[Tensor, "m m"]

    @classmethod
    def nothing(cls, system: SelectiveSystem) -> Averages:
        """The sums over no steps."""
        m, zeros = len(system.W_B), system.step_bias.new_zeros
        return cls(zeros(()), zeros(system.channels), zeros(m), zeros(m), zeros(m, m), zeros(m, m))

    @classmethod
    def imagined(cls, system: SelectiveSystem) -> Averages:
        """Sums as if B and C were white noise, for a rehearsal."""
        m = len(system.W_B)
        one, white = system.step_bias.new_ones, torch.eye(m, dtype=torch.float64, device=system.device)
        return cls(one(()) * m, one(system.channels) * m, one(m), one(m), white * m, white * m)

    def add(self, delta: Tensor, B: Tensor, C: Tensor, counts: Bool[Tensor, "batch length"] | None) -> None:
        """Add a batch: Δ (batch, length, channels), B and C (batch, length, m)."""
        delta, B, C = (part.flatten(0, 1) if counts is None else part[counts] for part in (delta, B, C))
        self.count = self.count + len(B)
        self.step = self.step + delta.sum(0)
        self.B, self.C = self.B + B.sum(0), self.C + C.sum(0)
        self.BB, self.CC = self.BB + B.mT @ B, self.CC + C.mT @ C

    def over(self, total: Total) -> Averages:
        """The sums over all processes."""
        return Averages(*(total(getattr(self, part.name)) for part in fields(self)))

    def mean(self, of: str) -> Tensor:
        """E[Δ], E[B], E[C], E[B Bᵀ] or E[C Cᵀ]."""
        total: Tensor = getattr(self, of)
        return total / self.count


@final
@dataclass
class SelectiveObservations(Observations):
    """Averages over one layer's data, the covariance of its states if that is needed, and a sample of its inputs u."""

    averages: Averages = field(kw_only=True)

    def over(self, total: Total) -> SelectiveObservations:
        return replace(super().over(total), averages=self.averages.over(total))

    def require_data(self, order: int) -> None:
        """Refuse fewer steps than states."""
        count = int(self.averages.count)
        if self.covariance is not None and self.covariance.count is not None:
            count = min(count, int(self.covariance.count.min()))
        self.require_enough(count, order)


@final
@dataclass
class SelectiveObserver(InputObserver):
    """Hooks on a selective layer, whose arguments show which steps are padding, and on its part whose input is u."""

    observations: SelectiveObservations
    system: SelectiveSystem
    adapter: SelectiveAdapter[Any]
    # Whether the layer's forward is running, and its mask of steps that are not padding.
    observing: bool = False
    counts: Tensor | None = None

    def attach(self) -> Sequence[RemovableHandle]:
        return [
            self.module.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.adapter.observed(self.module).register_forward_pre_hook(self._observe),
            self.module.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.observing = True
        try:
            self.counts = self.adapter.counted(module, args, kwargs)
            u = self.adapter.inputs(module, args, kwargs)
        except AdapterError as error:
            raise CompressionError(f"{self.name or 'the model'}: {error}") from error
        if u is not None:
            self.observing = False
            self.add(u.detach(), self.counts)

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        self.observing = False

    def _observe(self, part: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.observing:
            return
        u, counts = args[0].detach(), self.counts
        if u.ndim != 3 or u.shape[-1] != self.system.channels or (counts is not None and counts.shape != u.shape[:2]):
            said = "" if counts is None else f" with a mask {tuple(counts.shape)}"
            raise CompressionError(
                f"{self.observations.said} gave its x_proj {tuple(u.shape)}{said}, expected (batch, length, channels)"
                f" with {self.system.channels} channels"
            )
        self.add(u, counts)

    def accumulate(self, u: Tensor, counts: Tensor | None) -> None:
        """Add averages of every pass, and states, which cost more, of the first `batches` passes."""
        (batch, length, _), system = u.shape, self.system.divided(*self.system.scales)
        sampled = torch.zeros(batch, length, dtype=torch.bool, device=u.device)
        sampled = sampled.scatter(1, self.sampled_steps(u, counts), True)
        sampled = sampled if counts is None else sampled & counts
        share = sequences_at_once(length, system.rates.numel())
        covariance = self.observations.covariance if self.passes < self.choice.batches else None
        for start in range(0, batch, share):
            part = slice(start, start + share)
            self.observations.averages.add(*system.selected(u[part]), None if counts is None else counts[part])
            if covariance is not None and bool(sampled[part].any()):
                covariance.add(_states_at(system, u[part], sampled[part]))


def _states_at(
    system: SelectiveSystem, u: Float[Tensor, "batch length channels"], sampled: Bool[Tensor, "batch length"]
) -> Tensor:
    """The states at the sampled steps: (channels, samples, n)."""
    steps = steps_at_once(system, batch=len(u))
    found = [h[here] for h, here in zip(states(system, u, steps), torch.split(sampled.mT, steps), strict=True)]
    return torch.cat(found).movedim(0, 1)
