"""Observation of layers with a matrix state: second moments of states and queries, and a sample of inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressm.adapters.memory import Memory, MemoryAdapter, Steps
from compressm.control import StateCovariance
from compressm.control.memory import state_moment
from compressm.errors import AdapterError, CompressionError
from compressm.families.base import Total
from compressm.families.memory.simulation import sequences_together
from compressm.families.observing import InputObserver, Observations


@final
@dataclass
class MemoryObservations(Observations):
    """E[S Sᵀ] of one layer (`covariance`), pooled over heads that share a basis, E[q qᵀ], and a sample of inputs."""

    queries: StateCovariance = field(kw_only=True, default_factory=StateCovariance)

    @classmethod
    def imagined(cls, name: str, memory: Memory) -> MemoryObservations:
        """Observations of white states and queries."""
        unit = torch.eye(memory.order, dtype=torch.float64, device=memory.device).expand(memory.bank, -1, -1)
        many = unit.new_full((memory.bank,), memory.order)
        both = [StateCovariance().add_total(unit * memory.order, many, torch.ones_like(many)) for _ in range(2)]
        return cls(name, both[0], queries=both[1])

    def over(self, total: Total) -> MemoryObservations:
        return replace(super().over(total), queries=self.queries.over(total))

    @property
    def unit(self) -> Float[Tensor, ""]:
        """A power of two at the size of the outputs, 1 for ordinary ones."""
        assert self.covariance is not None
        return self.covariance.scaled_gramian()[1].amax() * self.queries.scaled_gramian()[1].amax()

    def moments(self, order: int) -> tuple[Float[Tensor, "bank n n"], Float[Tensor, "bank n n"]]:
        """P and Q, both divided by powers of two, 1 for ordinary sizes; fewer steps than states are refused."""
        assert self.covariance is not None
        assert self.queries.count is not None
        self.require_enough(int(self.queries.count.min()), order)
        return self.covariance.scaled_gramian()[0], self.queries.scaled_gramian()[0]


@final
@dataclass
class MemoryObserver(InputObserver):
    """A hook on a layer, whose input says everything that its steps do; the first `passes_used` passes count."""

    observations: MemoryObservations
    system: Memory
    adapter: MemoryAdapter[Any]
    passes_used: int | None = None

    def attach(self) -> Sequence[RemovableHandle]:
        return [self.module.register_forward_pre_hook(self._observe, with_kwargs=True)]

    def _observe(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        try:
            x, counts = self.adapter.observed(module, args, kwargs)
        except AdapterError as error:
            raise CompressionError(f"{self.name or 'the model'}: {error}") from error
        if x.ndim != 3 or (counts is not None and counts.shape != x.shape[:2]):
            said = "" if counts is None else f" with a mask {tuple(counts.shape)}"
            raise CompressionError(
                f"{self.observations.said} got {tuple(x.shape)}{said}, expected (batch, length, width)"
            )
        self.add(x.detach(), counts)

    def accumulate(self, u: Tensor, counts: Tensor | None) -> None:
        """Add the moments of every step; states are not stored."""
        if self.passes_used is not None and self.passes >= self.passes_used:
            return
        heads = self.adapter.steps(self.module, u[:1, :1], self.system).values.shape
        share = sequences_together(u.shape[1], self.system, heads[1] * heads[2], heads[-1])
        for start in range(0, len(u), share):
            part = slice(start, start + share)
            here = None if counts is None else counts[part]
            self._add_steps(self.adapter.mapped_steps(self.module, u[part], self.system, here), here)

    def _add_steps(self, steps: Steps, counts: Tensor | None) -> None:
        steps = steps.written
        batch, bank, length, _ = steps.keys.shape
        counts = torch.ones(batch, length, dtype=torch.bool, device=steps.keys.device) if counts is None else counts
        shared = counts[:, None].expand(-1, bank, -1)
        total, scale = state_moment(steps.keys, steps.values, steps.log_decay, shared, steps.log_gates)
        assert self.observations.covariance is not None
        for own, size, steps_counted in zip(total, scale, counts.sum(1), strict=True):
            self.observations.covariance.add_total(own, steps_counted.double().expand(bank), size)
        queries = steps.queries.transpose(0, 1).flatten(1, 2)
        self.observations.queries.add(queries, shared.transpose(0, 1).flatten(1, 2))
