"""The controllability Gramian of real data: E[h hᴴ] over the states a layer really visits."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Inexact
from torch import Tensor

from compressm.control import validation
from compressm.control.errors import PrecisionError, ShapeError


def measured_gramian(
    states: Inexact[Tensor, "*bank samples n"], mask: Bool[Tensor, "*bank samples"] | None = None
) -> Inexact[Tensor, "*bank n n"]:
    """E[h hᴴ] over `samples` (flatten batch and time into that axis first); `mask` is True where a sample counts."""
    return StateCovariance().add(states, mask).gramian()


class StateCovariance:
    """A streaming sum of h hᴴ in float64; two of them `merge`, so that batches and processes can be added up."""

    def __init__(self) -> None:
        self.total: Inexact[Tensor, "*bank n n"] | None = None
        self.count: Float[Tensor, "*bank"] | None = None

    def add(
        self, states: Inexact[Tensor, "*bank samples n"], mask: Bool[Tensor, "*bank samples"] | None = None
    ) -> StateCovariance:
        states = validation.require_tensor("states", states, "samples n")
        if mask is not None:
            validation.require_tensor("mask", mask, "samples")
        if mask is not None and mask.dtype != torch.bool:
            raise PrecisionError(f"mask has dtype {mask.dtype}, expected bool")
        if mask is not None and mask.shape != states.shape[:-1]:
            raise ShapeError(f"mask has shape {tuple(mask.shape)}, expected {tuple(states.shape[:-1])}")
        if mask is not None:  # before the check for NaN: padding may hold anything
            states = torch.where(mask[..., None], states, 0)
        validation.require_finite("states", states)
        states = validation.to_double(states.detach())
        kept = torch.ones(states.shape[:-1], device=states.device) if mask is None else mask
        return self._accumulate(states.mT @ states.conj(), kept.sum(-1, dtype=torch.float64))

    def merge(self, other: StateCovariance) -> StateCovariance:
        if other.total is None or other.count is None:
            return self
        return self._accumulate(other.total, other.count)

    def gramian(self) -> Inexact[Tensor, "*bank n n"]:
        if self.total is None or self.count is None or bool((self.count == 0).any()):
            raise ShapeError("no states were added: E[h hᴴ] needs at least one sample for every member of the bank")
        mean = self.total / self.count[..., None, None]
        return (mean + mean.mH) / 2

    def _accumulate(self, total: Tensor, count: Tensor) -> StateCovariance:
        if self.total is None or self.count is None:
            self.total, self.count = total, count
            return self
        if total.shape != self.total.shape:
            raise ShapeError(
                f"states of shape {tuple(total.shape[:-1])} added to an accumulator of {tuple(self.total.shape[:-1])}"
            )
        self.total, self.count = self.total + total, self.count + count
        return self
