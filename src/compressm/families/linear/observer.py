"""Observation of linear layers: a hook gets a layer's input, and its recurrence gives the states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressm.adapters import AdapterError
from compressm.adapters.base import counted_steps
from compressm.control import DiagonalSystem
from compressm.control.linear_algebra import coarse_scale, largest_part
from compressm.control.system import LinearSystem
from compressm.errors import CompressionError
from compressm.families import observing
from compressm.families.linear.simulation import outputs, sampled_states
from compressm.families.observing import InputObserver, Observations, sequences_at_once
from compressm.ops.dispatch import only_reads

# Numbers to reserve for each sampled state, which has a window of inputs. A CPU thus forms 8 MB of states at a time:
# with more it would leave the memory that the process keeps, and take a third longer.
_PER_STATE = 32


@dataclass
class SequenceObserver(InputObserver):
    """A hook on the input of a layer that is called with sequences, and with `lengths` if they are padded."""

    observations: Observations

    def attach(self) -> Sequence[RemovableHandle]:
        return [self.module.register_forward_pre_hook(self._observe, with_kwargs=True)]

    @only_reads
    def _observe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.passes >= self.choice.batches:
            return
        x = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(x, Tensor) or x.ndim != 3:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise CompressionError(
                f"{self.observations.said} was called with {got}, expected (batch, length, channels)"
            )
        try:
            inside = counted_steps(module, x, args, kwargs)
        except AdapterError as error:
            raise CompressionError(f"{self.name or 'the model'}: {error}") from error
        self.add(x.detach(), inside)


@final
@dataclass
class LinearObserver(SequenceObserver):
    """The observer of a layer with poles: states are formed at the sampled steps only."""

    system: DiagonalSystem

    def accumulate(self, u: Tensor, counts: Tensor | None) -> None:
        covariance = self.observations.covariance
        assert covariance is not None
        steps = self.sampled_steps(u, counts)
        share = sequences_at_once(steps.shape[1], _PER_STATE * self.system.poles.numel())
        for start in range(0, len(u), share):
            part = slice(start, start + share)
            samples = sampled_states(self.system, u[part], steps[part])
            mask = None if counts is None else counts[part].gather(1, steps[part]).flatten()
            covariance.add(samples, None if mask is None else mask.expand(samples.shape[:-1]))


def scaled_gramian(observations: Observations) -> tuple[Tensor, Tensor]:
    """E[h hᴴ] / scale² over the observed steps, which must be at least as many as the states, and the scale."""
    covariance = observations.covariance
    assert covariance is not None
    if covariance.total is not None and covariance.count is not None:
        observations.require_enough(int(covariance.count.min()), covariance.total.shape[-1])
    return covariance.scaled_gramian()


def squared_change(
    old: LinearSystem, new: LinearSystem, observations: Observations, respond: Callable[[Any, Tensor], Tensor] = outputs
) -> Float[Tensor, "2"]:
    """‖y_new − y_old‖² and ‖y_old‖² of the layer's output without its skip D·u, scaled up to all observed steps."""
    share = sequences_at_once(observations.sample.longest, old.B.shape[:-1].numel())
    unit: Tensor | float = 1.0
    if observations.covariance is not None and observations.covariance.scale is not None:
        # All processes know these sizes, so their sums have the same unit.
        unit = coarse_scale(largest_part(old.C).max() * observations.covariance.scale.max())
    return observing.squared_change(respond, old, new, observations.sample, share, unit)
