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
class Norms:
    """RMS norms of `step_in` u, of B and of C: x ← weight ∘ x / √(mean x² + ε), with the mean over all entries.

    If they are `tied`, the weights of B are one number, and so are those of C.
    """

    step: Float[Tensor, " rank"]
    B: Float[Tensor, " m"]
    C: Float[Tensor, " m"]
    eps: float
    tied: bool = False

    def detach(self) -> Norms:
        """Detach all weights from the autograd graph."""
        return replace(self, step=self.step.detach(), B=self.B.detach(), C=self.C.detach())


@dataclass(frozen=True)
class Resized:
    """Factors of the rows of B or C before their norm, and of the weights of the norm, in a change of basis.

    A norm over r of n states divides by another mean: without factors B and C would grow by about √(n/r).
    """

    rows: Float[Tensor, ""]
    weights: Float[Tensor, " r"]

    def to(self, device: torch.device | str) -> Resized:
        """Copy the factors to another device."""
        return Resized(self.rows.to(device), self.weights.to(device))


@dataclass(frozen=True)
class SelectiveSystem:
    """h[t] = exp(Δ a) h[t−1] + Δ B u[t], y[t] = Re(C h[t]) for every channel; all channels share B and C.

    Δ = softplus(W_Δ u + bias) with W_Δ = `step_out` `step_in`, B = W_B u, C = W_C u, from the inputs u[t] of all
    channels. With `maps` each channel has its own B and C, and rates may be complex. `norms` follow the projections.
    """

    rates: Inexact[Tensor, "channels n"]
    step_in: Float[Tensor, "rank channels"]
    step_out: Float[Tensor, "channels rank"]
    step_bias: Float[Tensor, " channels"]
    W_B: Float[Tensor, "m channels"]
    W_C: Float[Tensor, "m channels"]
    maps: ChannelMaps | None = None
    norms: Norms | None = None

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
        step, B, C = (u @ rows.mT for rows in (self.step_in, self.W_B, self.W_C))
        if self.norms is not None:
            of = self.norms
            step, B, C = (rms_normed(x, own, of.eps) for x, own in ((step, of.step), (B, of.B), (C, of.C)))
        return softplus(step @ self.step_out.mT + self.step_bias), B, C

    @property
    def scales(self) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Powers of two at the sizes of B and C, by W_B and W_C or by the weights of norms; 1 for ordinary weights."""
        sizes = (self.W_B, self.W_C) if self.norms is None else (self.norms.B, self.norms.C)
        return coarse_scale(sizes[0].detach().abs().max()), coarse_scale(sizes[1].detach().abs().max())

    def divided(self, input_scale: Float[Tensor, ""], output_scale: Float[Tensor, ""]) -> SelectiveSystem:
        """The system with B and C divided by these numbers: averages of B Bᵀ and C Cᵀ hold squares."""
        if self.norms is None:
            return replace(self, W_B=self.W_B / input_scale, W_C=self.W_C / output_scale)
        return replace(self, norms=replace(self.norms, B=self.norms.B / input_scale, C=self.norms.C / output_scale))

    def projected(
        self,
        E_B: Float[Tensor, "r n"],
        E_C: Float[Tensor, "n r"],
        rates: Float[Tensor, "channels r"],
        resized: tuple[Resized, Resized] | None = None,
    ) -> SelectiveSystem:
        """The system with B ← E_B B and C ← C E_C in all channels, and new rates.

        Norms, whose factors for B and C are `resized`, follow: the result is near, as the norm of another vector
        differs by one factor at each step. A selection of all states is exact.
        """
        if self.norms is None or resized is None:
            return replace(self, rates=rates, W_B=E_B @ self.W_B, W_C=E_C.mT @ self.W_C)
        (of_B, of_C), (B, C) = resized, (before_norm(E_B, self.norms.B), before_norm(E_C.mT, self.norms.C))
        norms = replace(self.norms, B=B[1] * of_B.weights, C=C[1] * of_C.weights)
        W_B, W_C = of_B.rows * (B[0] @ self.W_B), of_C.rows * (C[0] @ self.W_C)
        return replace(self, rates=rates, W_B=W_B, W_C=W_C, norms=norms)

    def detach(self) -> SelectiveSystem:
        """Detach all tensors from the autograd graph."""
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "maps"}
        return replace(self, **{name: part.detach() for name, part in parts.items() if part is not None})


def before_norm(
    E: Float[Tensor, "r n"], weight: Float[Tensor, " n"]
) -> tuple[Float[Tensor, "r n"], Float[Tensor, " r"]]:
    """M and v with diag(v) M = E diag(weight): E behind the weights of a norm is M before them, and new weights v.

    Rows of M are as long as those of E, and a selection E gives M = E. v has the sign of the weight that counts most.
    """
    behind, size = E * weight, E.square().sum(-1).sqrt()
    sign = torch.where(weight[E.abs().argmax(-1)] < 0, -1.0, 1.0).to(E)
    v = sign * behind.square().sum(-1).sqrt() / torch.where(size > 0, size, 1)
    return behind / torch.where(v != 0, v, 1)[..., None], v


def rms_normed(x: Float[Tensor, "*steps m"], weight: Float[Tensor, " m"], eps: float) -> Float[Tensor, "*steps m"]:
    """The RMS norm weight ∘ x / √(mean x² + ε)."""
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


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
