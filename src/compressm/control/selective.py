"""Selective layers as systems: the rates are fixed, and the input selects the step Δ, B and C at every time step.

Averages over their choices give time-invariant surrogates and Gramians.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor
from torch.nn.functional import softplus

from compressm.control import validation
from compressm.control.factors import psd_factor, require_semidefinite
from compressm.control.linear_algebra import coarse_scale
from compressm.control.system import DenseSystem, DiagonalSystem, LinearSystem
from compressm.control.validation import ShapeError, UnstableSystemError


@dataclass(frozen=True)
class ChannelMaps:
    """Maps from the shared B and C to those of channel i: E_Bⁱ B and C E_Cⁱ; the first `orders[i]` states count."""

    B: Inexact[Tensor, "channels n m"]
    C: Inexact[Tensor, "channels m n"]
    orders: Int[Tensor, " channels"]

    def to(self, device: torch.device | str) -> ChannelMaps:
        """Copy the maps to another device."""
        return ChannelMaps(self.B.to(device), self.C.to(device), self.orders.to(device))


@dataclass(frozen=True)
class SelectiveSystem:
    """h[t] = exp(Δ a) h[t−1] + Δ B u[t], y[t] = Re(C h[t]) for every channel; all channels share B and C.

    Δ = softplus(W_Δ u + bias) with W_Δ = `step_out` `step_in`, B = W_B u, C = W_C u, from the inputs u[t] of all
    channels. With `maps` each channel has its own B and C, and rates may be complex.
    """

    rates: Inexact[Tensor, "channels n"]
    step_in: Float[Tensor, "rank channels"]
    step_out: Float[Tensor, "channels rank"]
    step_bias: Float[Tensor, " channels"]
    W_B: Float[Tensor, "m channels"]
    W_C: Float[Tensor, "m channels"]
    maps: ChannelMaps | None = None

    @property
    def order(self) -> int:
        return self.rates.shape[-1]

    @property
    def channels(self) -> int:
        return self.rates.shape[0]

    @property
    def device(self) -> torch.device:
        return self.rates.device

    def selected(
        self, u: Float[Tensor, "*steps channels"]
    ) -> tuple[Float[Tensor, "*steps channels"], Float[Tensor, "*steps m"], Float[Tensor, "*steps m"]]:
        """Δ, B and C that these inputs select."""
        delta = softplus(u @ self.step_in.mT @ self.step_out.mT + self.step_bias)
        return delta, u @ self.W_B.mT, u @ self.W_C.mT

    @property
    def scales(self) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Powers of two at the sizes of W_B and W_C, 1 for ordinary weights."""
        return coarse_scale(self.W_B.detach().abs().max()), coarse_scale(self.W_C.detach().abs().max())

    def divided(self, input_scale: Float[Tensor, ""], output_scale: Float[Tensor, ""]) -> SelectiveSystem:
        """The system with B and C divided by these numbers: averages of B Bᵀ and C Cᵀ hold squares."""
        return replace(self, W_B=self.W_B / input_scale, W_C=self.W_C / output_scale)

    def projected(
        self, E_B: Float[Tensor, "r n"], E_C: Float[Tensor, "n r"], rates: Float[Tensor, "channels r"]
    ) -> SelectiveSystem:
        """The system with B ← E_B B and C ← C E_C in all channels, and new rates."""
        return replace(self, rates=rates, W_B=E_B @ self.W_B, W_C=E_C.mT @ self.W_C)

    def detach(self) -> SelectiveSystem:
        """Detach all tensors from the autograd graph."""
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "maps"}
        return replace(self, **{name: part.detach() for name, part in parts.items()})


def mean_dynamics(
    A: Inexact[Tensor, "*bank samples ..."],
    B: Inexact[Tensor, "*bank samples n p"],
    C: Inexact[Tensor, "*bank samples q n"],
    *,
    largest_radius: float = 1 - 1e-6,
) -> LinearSystem:
    """(E[A], E[B], E[C]) over the samples (app:tv); A of shape (*bank, samples, n) is diagonal, (…, n, n) dense.

    A mean need not be stable. For a diagonal A, each pole of modulus above `largest_radius` is pulled back to it; a
    dense A is scaled as a whole.
    """
    _require_radius(largest_radius)
    _check_samples(A, B, C)
    mean_B, mean_C = validation.to_double(B).mean(-3), validation.to_double(C).mean(-3)
    if A.ndim == B.ndim - 1:
        poles = validation.to_double(A).mean(-2)
        excess = (poles.abs() / largest_radius).clamp_min(1)
        return DiagonalSystem(poles / excess, mean_B, mean_C)
    dense = validation.to_double(A).mean(-3)
    radius = torch.linalg.eigvals(dense).abs().amax(-1)
    return DenseSystem(dense / (radius / largest_radius).clamp_min(1)[..., None, None], mean_B, mean_C)


def _check_samples(A: Tensor, B: Tensor, C: Tensor) -> None:
    samples = {"A": (A, "samples n"), "B": (B, "samples n p"), "C": (C, "samples q n")}
    given = {name: validation.require_tensor(name, *rest) for name, rest in samples.items()}
    validation.require_one_precision(**given)
    validation.require_one_device(**given)
    if A.ndim not in (B.ndim, B.ndim - 1):
        raise ShapeError(
            f"A has shape {tuple(A.shape)}, expected (*bank, samples, n) or (*bank, samples, n, n); B {tuple(B.shape)}"
        )
    if A.ndim == B.ndim and A.shape[-1] != A.shape[-2]:
        raise ShapeError(f"A has shape {tuple(A.shape)}, expected (*bank, samples, n, n)")
    for name, axes in (("A", A.shape[: B.ndim - 2]), ("C", C.shape[:-2])):
        if axes != B.shape[:-2]:
            raise ShapeError(
                f"{name} has shape {tuple(given[name].shape)}, B {tuple(B.shape)}: expected the same bank and samples"
            )
    for name, tensor in given.items():
        validation.require_finite(name, tensor)


def mean_selective_system(
    rates: Float[Tensor, "*bank n"],
    mean_step: Float[Tensor, "*bank"],
    mean_B: Float[Tensor, "*bank n"],
    mean_C: Float[Tensor, "*bank n"],
    *,
    largest_radius: float = 1 - 1e-6,
) -> DiagonalSystem:
    """The paper's surrogate of a selective channel (app:mamba): exp(E[Δ] a), E[Δ] E[B], E[C].

    Poles above `largest_radius` are pulled back to it. Averages of B and C lose their variation, which
    `second_moment_gramians` keeps.
    """
    _require_radius(largest_radius)
    rates = require_negative_rates(rates)
    _check_means(rates, mean_step, mean_B, mean_C)
    step = validation.to_double(mean_step)[..., None]
    poles = torch.exp(step * rates).clamp_max(largest_radius)
    return DiagonalSystem(
        poles, (step * validation.to_double(mean_B))[..., None], validation.to_double(mean_C)[..., None, :]
    )


def _check_means(rates: Tensor, mean_step: Tensor, mean_B: Tensor, mean_C: Tensor) -> None:
    """Require a positive step of shape (*bank), and B and C of the shape of the rates."""
    means = {"mean_step": (mean_step, ""), "mean_B": (mean_B, "n"), "mean_C": (mean_C, "n")}
    given = {name: validation.require_tensor(name, *rest) for name, rest in means.items()}
    for name, tensor in given.items():
        expected = rates.shape[:-1] if name == "mean_step" else rates.shape
        if tensor.shape != expected:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected)} for rates {tuple(rates.shape)}"
            )
    validation.require_one_precision(**given)
    validation.require_one_device(rates=rates, **given)
    validation.require_real("mean_step", mean_step)
    for name, tensor in given.items():
        validation.require_finite(name, tensor)
    if bool((mean_step <= 0).any()):
        raise UnstableSystemError(f"the smallest mean_step is {mean_step.min().item():.6g}, expected > 0")


def second_moment_system(
    poles: Inexact[Tensor, "*bank n"], moment_B: Inexact[Tensor, "*bank n n"], moment_C: Inexact[Tensor, "*bank n n"]
) -> DiagonalSystem:
    """The LTI system with B Bᴴ = E[B Bᴴ] and Cᴴ C = E[Cᴴ C]: exact if B and C vary and are white in time."""
    validation.require_one_precision(poles=validation.require_tensor("poles", poles, "n"))
    n, bank = poles.shape[-1], poles.shape[:-1]
    moments = (
        validation.require_gramian(name, moment, bank, n, poles.device)
        for name, moment in (("moment_B", moment_B), ("moment_C", moment_C))
    )
    left, right = (psd_factor(moment, "moment") for moment in moments)
    return DiagonalSystem(validation.to_double(poles), left, right.mH)


def second_moment_gramians(
    rates: Float[Tensor, "*bank n"], moment_B: Float[Tensor, "*bank n n"], moment_C: Float[Tensor, "*bank n n"]
) -> tuple[Float[Tensor, "*bank n n"], Float[Tensor, "*bank n n"]]:
    """Continuous-time P = E[BBᵀ] / −(aᵢ + aⱼ) and Q = E[CᵀC] / −(aᵢ + aⱼ), both independent of the step Δ."""
    rates = require_negative_rates(rates)
    bank, n = rates.shape[:-1], rates.shape[-1]
    total = -(rates[..., :, None] + rates[..., None, :])
    checked = []
    for name, moment in (("moment_B", moment_B), ("moment_C", moment_C)):
        moment = validation.require_gramian(name, moment, bank, n, rates.device)
        checked.append(validation.require_real(name, moment))
        require_semidefinite(name, moment)
    return checked[0] / total, checked[1] / total


def _require_radius(largest_radius: float) -> None:
    if not validation.is_number(largest_radius) or not 0 < largest_radius < 1:
        raise UnstableSystemError(f"largest_radius is {largest_radius!r}, expected a number between 0 and 1")


def require_negative_rates(rates: Float[Tensor, "*bank n"]) -> Float[Tensor, "*bank n"]:
    """Require rates, the continuous-time poles, that are real and < 0; return them in double precision."""
    validation.require_tensor("rates", rates, "n")
    validation.require_one_precision(rates=rates)
    validation.require_finite("rates", rates)
    if rates.is_complex() or bool((rates >= 0).any()):
        raise UnstableSystemError(
            f"rates are {rates.dtype} with largest {rates.real.max().item():.6g}, expected real and < 0"
        )
    return validation.to_double(rates)
