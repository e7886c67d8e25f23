"""Observation of linear layers: a hook gets a layer's input, and its recurrence gives the states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressm.control import DiagonalSystem
from compressm.control.linear_algebra import coarse_scale, largest_part
from compressm.errors import CompressionError
from compressm.families import observing
from compressm.families.observing import InputObserver, Observations, sequences_at_once
from compressm.ops import linear_recurrence

_NO_POLE = -700.0  # log |λ| of a pole at 0


@final
@dataclass
class LinearObserver(InputObserver):
    """A hook on the input of a linear layer."""

    observations: Observations
    system: DiagonalSystem

    def attach(self) -> Sequence[RemovableHandle]:
        return [self.module.register_forward_pre_hook(self._observe, with_kwargs=True)]

    def _observe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.passes >= self.choice.batches:
            return
        x = args[0] if args else next(iter(kwargs.values()))
        lengths = kwargs.get("lengths", args[2] if len(args) > 2 else None)
        if not isinstance(x, Tensor) or x.ndim != 3:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise CompressionError(
                f"{self.observations.said} was called with {got}, expected (batch, length, channels)"
            )
        inside = None
        if lengths is not None:
            inside = torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None]
        self.add(x.detach(), inside)

    def accumulate(self, u: Tensor, counts: Tensor | None) -> None:
        covariance = self.observations.covariance
        assert covariance is not None
        steps, share = self.sampled_steps(u, counts), sequences_at_once(u.shape[1], self.system.poles.numel())
        for start in range(0, len(u), share):
            here = steps[start : start + share]
            h = states(self.system, u[start : start + share])[torch.arange(len(here), device=u.device)[:, None], here]
            mask = None if counts is None else counts[start : start + share].gather(1, here)
            # (batch, steps, *bank, n) to (*bank, samples, n).
            samples = h.flatten(0, 1).movedim(0, -2)
            covariance.add(samples, None if mask is None else mask.flatten().expand(samples.shape[:-1]))


def scaled_gramian(observations: Observations) -> tuple[Tensor, Tensor]:
    """E[h hᴴ] / scale² over the observed steps, which must be at least as many as the states, and the scale."""
    covariance = observations.covariance
    assert covariance is not None
    if covariance.total is not None and covariance.count is not None:
        observations.require_enough(int(covariance.count.min()), covariance.total.shape[-1])
    return covariance.scaled_gramian()


def states(system: DiagonalSystem, u: Float[Tensor, "batch length channels"]) -> Tensor:
    """All states of a system, or of a bank with one channel each, in complex128: (batch, length, *bank, n)."""
    poles = system.poles.to(torch.complex128)
    logs = system.log_poles if system.log_poles is not None else torch.log(poles)
    modulus = torch.nan_to_num(logs.real, neginf=_NO_POLE)
    B = system.B.to(torch.complex128)
    driven = u @ B.mT.real if not system.bank else u[..., None] * B[..., 0].real
    turned = u @ B.mT.imag if not system.bank else u[..., None] * B[..., 0].imag
    x = torch.stack([driven.flatten(2), turned.flatten(2)], dim=2)
    h, _ = linear_recurrence(x, torch.stack([modulus.flatten(), torch.nan_to_num(logs.imag).flatten()]))
    return torch.complex(h[:, :, 0], h[:, :, 1]).reshape(*h.shape[:2], *poles.shape)


def outputs(system: DiagonalSystem, u: Float[Tensor, "batch length channels"]) -> Tensor:
    """Re(C h), the layer's output without its skip."""
    h = states(system, u)
    if system.bank:
        return (h * system.C[..., 0, :]).sum(-1).real
    return (h @ system.C.mT.to(h.dtype)).real


def squared_change(old: DiagonalSystem, new: DiagonalSystem, observations: Observations) -> Float[Tensor, "2"]:
    """‖y_new − y_old‖² and ‖y_old‖² of the layer's output without its skip D·u, scaled up to all observed steps."""
    share = sequences_at_once(observations.sample.longest, old.poles.numel())
    unit = 1.0
    if observations.covariance is not None and observations.covariance.scale is not None:
        # All processes know these sizes, so their sums have the same unit.
        unit = float(coarse_scale(largest_part(old.C).max() * observations.covariance.scale.max()))
    return observing.squared_change(outputs, old, new, observations.sample, share, unit)
