"""What the inputs of a selective layer chose while the model ran on real data: averages, in float64, and a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressm.adapters import AdapterError, SelectiveAdapter
from compressm.control import ControlError, StateCovariance
from compressm.control.selective import SelectiveSystem
from compressm.control.validation import require_finite
from compressm.errors import CompressionError
from compressm.families.base import Observer, Total
from compressm.families.choices import Measured
from compressm.families.observing import Sample, close_enough, sampled_steps, sequences_at_once, without_padding
from compressm.families.selective.simulation import states, steps_at_once


@final
@dataclass
class Averages:
    """Sums over the steps that count: of Δ for every channel, of B and C, and of B Bᵀ and C Cᵀ."""

    count: Float[Tensor, ""]
    step: Float[Tensor, " channels"]
    B: Float[Tensor, " m"]
    C: Float[Tensor, " m"]
    BB: Float[Tensor, "m m"]
    CC: Float[Tensor, "m m"]

    @classmethod
    def nothing(cls, system: SelectiveSystem) -> Averages:
        """Of no step yet."""
        m, zeros = len(system.W_B), system.step_bias.new_zeros
        return cls(zeros(()), zeros(system.channels), zeros(m), zeros(m), zeros(m, m), zeros(m, m))

    @classmethod
    def imagined(cls, system: SelectiveSystem) -> Averages:
        """As if B and C were white: for a cut that nobody sees."""
        m = len(system.W_B)
        one, white = system.step_bias.new_ones, torch.eye(m, dtype=torch.float64, device=system.device)
        return cls(one(()) * m, one(system.channels) * m, one(m), one(m), white * m, white * m)

    def add(self, delta: Tensor, B: Tensor, C: Tensor, counts: Bool[Tensor, "batch length"] | None) -> None:
        """See a batch: Δ (batch, length, channels), B and C (batch, length, m)."""
        delta, B, C = (part.flatten(0, 1) if counts is None else part[counts] for part in (delta, B, C))
        self.count = self.count + len(B)
        self.step = self.step + delta.sum(0)
        self.B, self.C = self.B + B.sum(0), self.C + C.sum(0)
        self.BB, self.CC = self.BB + B.mT @ B, self.CC + C.mT @ C

    def over(self, total: Total) -> Averages:
        """Of all processes together."""
        return Averages(*(total(getattr(self, part.name)) for part in fields(self)))

    def mean(self, of: str) -> Tensor:
        """E[Δ], E[B], E[C], E[B Bᵀ] or E[C Cᵀ]."""
        total: Tensor = getattr(self, of)
        return total / self.count


@final
@dataclass
class SelectiveObservations:
    """Of one layer: averages, the covariance of its states where that was asked for, and some of its inputs u."""

    name: str
    averages: Averages
    covariance: StateCovariance | None
    sample: Sample = field(default_factory=Sample)
    passes: int = 0

    def over(self, total: Total) -> SelectiveObservations:
        """With what all processes saw; the inputs that are kept stay those of this one."""
        shared = None
        if self.covariance is not None:
            assert self.covariance.total is not None
            assert self.covariance.count is not None
            shared = StateCovariance()
            shared.total = total(self.covariance.total)
            shared.count = total(self.covariance.count)
        return replace(self, averages=self.averages.over(total), covariance=shared)

    def require_enough(self, order: int) -> None:
        """Fewer steps than states would call the others dead."""
        count = int(self.averages.count)
        if self.covariance is not None and self.covariance.count is not None:
            count = min(count, int(self.covariance.count.min()))
        if count < order:
            raise CompressionError(
                f"calibrate showed {count} steps to a layer of {order} states ({self.name or 'the model'!r}), expected"
                " at least as many steps as states: run it on more data"
            )


@final
class SelectiveObserver(Observer):
    """Hooks on a selective layer, whose arguments tell what is padding, and on the part of it whose input is u."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        adapter: SelectiveAdapter[Any],
        system: SelectiveSystem,
        choice: Measured,
        *,
        covariance: bool,
    ) -> None:
        self.module, self.adapter, self.system, self.choice = module, adapter, system, choice
        self.observations = SelectiveObservations(
            name, Averages.nothing(system), StateCovariance() if covariance else None
        )
        self._observing = False
        self._counts: Tensor | None = None

    @property
    def name(self) -> str:
        return self.observations.name

    @property
    def passes(self) -> int:
        return self.observations.passes

    def attach(self) -> Sequence[RemovableHandle]:
        return [
            self.module.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.adapter.observed(self.module).register_forward_pre_hook(self._observe),
            self.module.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._observing = True
        try:
            self._counts = self.adapter.counted(module, args, kwargs)
        except AdapterError as error:
            raise CompressionError(f"{self.name or 'the model'}: {error}") from error

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        self._observing = False

    def _observe(self, part: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._observing:
            return
        u, counts, observations = args[0].detach(), self._counts, self.observations
        if u.ndim != 3 or u.shape[-1] != self.system.channels or (counts is not None and counts.shape != u.shape[:2]):
            said = "" if counts is None else f" with a mask {tuple(counts.shape)}"
            raise CompressionError(
                f"{observations.name or 'the model'!r} gave its x_proj {tuple(u.shape)}{said}, expected (batch, length,"
                f" channels) with {self.system.channels} channels"
            )
        u = without_padding(u, counts)
        try:
            require_finite("u", u)
            self._accumulate(u.to(torch.float64), counts)
        except ControlError as error:
            raise CompressionError(
                f"calibrate gave {observations.name or 'the model'!r} what cannot be measured, expected finite inputs:"
                f" {error}"
            ) from error
        observations.sample.add(u, counts)
        observations.passes += 1

    def _accumulate(self, u: Tensor, counts: Tensor | None) -> None:
        """Some sequences at a time; averages of every pass, states, which cost more, of the first `batches` alone."""
        (batch, length, _), system = u.shape, self.system
        available = batch * length if counts is None else int(counts.sum())
        steps = sampled_steps(batch, length, close_enough(self.choice.stride, available, system.order)).to(u.device)
        looked = torch.zeros(batch, length, dtype=torch.bool, device=u.device).scatter(1, steps, True)
        looked = looked if counts is None else looked & counts
        share = sequences_at_once(length, system.rates.numel())
        for start in range(0, batch, share):
            part = slice(start, start + share)
            self.observations.averages.add(*system.selected(u[part]), None if counts is None else counts[part])
            simulate = self.observations.passes < self.choice.batches
            if self.observations.covariance is not None and simulate and bool(looked[part].any()):
                self.observations.covariance.add(_states_at(system, u[part], looked[part]))


def _states_at(
    system: SelectiveSystem, u: Float[Tensor, "batch length channels"], looked: Bool[Tensor, "batch length"]
) -> Tensor:
    """The states at the steps that are looked at: (channels, samples, n)."""
    steps = steps_at_once(system, batch=len(u))
    found = [h[here] for h, here in zip(states(system, u, steps), torch.split(looked.mT, steps), strict=True)]
    return torch.cat(found).movedim(0, 1)
