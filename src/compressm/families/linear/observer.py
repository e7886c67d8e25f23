"""What each linear layer sees when the model runs on real data: hooks on its input, its recurrence gives the states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressm.control import ControlError, DiagonalSystem, StateCovariance
from compressm.control.validation import require_finite
from compressm.errors import CompressionError
from compressm.families.base import Observer, Total
from compressm.families.choices import Measured
from compressm.families.observing import (
    Sample,
    close_enough,
    ratio_of,
    sampled_steps,
    sequences_at_once,
    up_to,
    without_padding,
)
from compressm.ops import linear_recurrence

_NO_POLE = -700.0  # log |λ| of a pole at 0


@dataclass
class Observations:
    """Of one layer: the covariance of its states, and some of its inputs."""

    name: str = ""
    covariance: StateCovariance = field(default_factory=StateCovariance)
    sample: Sample = field(default_factory=Sample)
    passes: int = 0

    def gramian(self) -> Tensor:
        """E[h hᴴ] of what was seen; refused where it would have fewer samples than states."""
        total, count = self.covariance.total, self.covariance.count
        if total is not None and count is not None and bool((count < total.shape[-1]).any()):
            raise CompressionError(
                f"calibrate showed {int(count.min())} steps to a layer of {total.shape[-1]} states"
                f" ({self.name or 'the model'!r}), expected at least as many steps as states: run it on more data"
            )
        return self.covariance.gramian()

    def over(self, total: Total) -> Observations:
        """With what all processes saw; the inputs that are kept stay those of this one."""
        shared = StateCovariance()
        assert self.covariance.total is not None
        assert self.covariance.count is not None
        shared.total = total(self.covariance.total)
        shared.count = total(self.covariance.count)
        return replace(self, covariance=shared)


@dataclass(frozen=True)
class InputObserver(Observer):
    """A hook on the input of a linear layer."""

    observations: Observations
    module: nn.Module
    system: DiagonalSystem
    choice: Measured

    @property
    def name(self) -> str:
        return self.observations.name

    @property
    def passes(self) -> int:
        return self.observations.passes

    def attach(self) -> Sequence[RemovableHandle]:
        return [self.module.register_forward_pre_hook(self._observe, with_kwargs=True)]

    def _observe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observations = self.observations
        if observations.passes >= self.choice.batches:
            return
        x = args[0] if args else next(iter(kwargs.values()))
        lengths = kwargs.get("lengths", args[2] if len(args) > 2 else None)
        if not isinstance(x, Tensor) or x.ndim != 3:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise CompressionError(
                f"{observations.name or 'the model'!r} was called with {got}, expected (batch, length, channels)"
            )
        counts = up_to(lengths, x)
        x = without_padding(x.detach(), counts)
        try:
            require_finite("x", x)
            _accumulate(observations.covariance, self.system, x.to(torch.float64), counts, self.choice.stride)
        except ControlError as error:
            raise CompressionError(
                f"calibrate gave {observations.name or 'the model'!r} what cannot be measured, expected finite inputs:"
                f" {error}"
            ) from error
        observations.sample.add(x, counts)
        observations.passes += 1


def _accumulate(
    covariance: StateCovariance, system: DiagonalSystem, u: Tensor, counts: Tensor | None, stride: int
) -> None:
    """Add the states of all sequences, at one of every `stride` steps, some sequences at a time."""
    length, modes = u.shape[1], system.poles.numel()
    available = len(u) * length if counts is None else int(counts.sum())
    steps = sampled_steps(len(u), length, close_enough(stride, available, system.order)).to(u.device)
    share = sequences_at_once(length, modes)
    for start in range(0, len(u), share):
        here = steps[start : start + share]
        h = states(system, u[start : start + share])[torch.arange(len(here), device=u.device)[:, None], here]
        mask = None if counts is None else counts[start : start + share].gather(1, here)
        # (batch, steps, *bank, n) to (*bank, samples, n).
        samples = h.flatten(0, 1).movedim(0, -2)
        kept = None if mask is None else mask.flatten().expand(samples.shape[:-1])
        covariance.add(samples, kept)


def states(system: DiagonalSystem, u: Float[Tensor, "batch length channels"]) -> Tensor:
    """Every state of a system, or of a bank with one channel each, in complex128: (batch, length, *bank, n)."""
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


def relative_change(old: DiagonalSystem, new: DiagonalSystem, observations: Observations) -> float:
    """‖y_new − y_old‖ / ‖y_old‖ of the layer's output without its skip D·u, over sequences from all that was seen."""
    return ratio_of(squared_change(old, new, observations))


def squared_change(old: DiagonalSystem, new: DiagonalSystem, observations: Observations) -> Float[Tensor, "2"]:
    """‖y_new − y_old‖² and ‖y_old‖², scaled up to all steps that were seen: they can be summed over processes."""
    squares = torch.zeros(2, dtype=torch.float64, device=old.device)
    for u, counts in observations.sample.parts(sequences_at_once(observations.sample.longest, old.poles.numel())):
        before, after = (outputs(system, u) * counts[..., None] for system in (old, new))
        squares += torch.stack([(after - before).square().sum(), before.square().sum()])
    return squares * observations.sample.weight
