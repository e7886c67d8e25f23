"""LTI stand-ins for linear time-varying systems, from averages over data: what selective layers are balanced by.

A selective layer is h[k] = exp(Δₖ a) h[k−1] + Δₖ Bₖ uₖ, yₖ = Cₖ h[k], with a < 0 fixed and Δ, B, C driven by the data.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Inexact
from torch import Tensor

from compressm.control import validation
from compressm.control.errors import ShapeError, UnstableSystemError
from compressm.control.factors import psd_factor, require_semidefinite
from compressm.control.system import DenseSystem, DiagonalSystem, LinearSystem


def mean_dynamics(
    A: Inexact[Tensor, "*bank samples ..."],
    B: Inexact[Tensor, "*bank samples n p"],
    C: Inexact[Tensor, "*bank samples q n"],
    *,
    largest_radius: float = 1 - 1e-6,
) -> LinearSystem:
    """(E[A], E[B], E[C]) over the samples (app:tv); A of shape (*bank, samples, n) is diagonal, (…, n, n) dense.

    A mean need not be stable. As regularisation, a diagonal A has each pole of modulus above `largest_radius` pulled
    back to it, a dense one is scaled as a whole.
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
            f"A has shape {tuple(A.shape)}, not (*bank, samples, n) or (*bank, samples, n, n); B has {tuple(B.shape)}"
        )
    if A.ndim == B.ndim and A.shape[-1] != A.shape[-2]:
        raise ShapeError(f"A has shape {tuple(A.shape)}, expected (*bank, samples, n, n)")
    for name, axes in (("A", A.shape[: B.ndim - 2]), ("C", C.shape[:-2])):
        if axes != B.shape[:-2]:
            raise ShapeError(
                f"{name} has shape {tuple(given[name].shape)}, B {tuple(B.shape)}: bank or samples disagree"
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

    Poles above `largest_radius` are pulled back to it. Averaging B and C before balancing loses their variation:
    `second_moment_gramians` keeps it.
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
    """The step of shape (*bank), positive; B and C of that of the rates."""
    means = {"mean_step": (mean_step, ""), "mean_B": (mean_B, "n"), "mean_C": (mean_C, "n")}
    given = {name: validation.require_tensor(name, *rest) for name, rest in means.items()}
    for name, tensor in given.items():
        expected = rates.shape[:-1] if name == "mean_step" else rates.shape
        if tensor.shape != expected:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected)} beside rates {tuple(rates.shape)}"
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
    """The LTI system with B Bᴴ = E[B Bᴴ] and Cᴴ C = E[Cᴴ C]: exact for time-varying B and C that are white in time."""
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
    """Continuous-time P = E[BBᵀ] / −(aᵢ + aⱼ) and Q = E[CᵀC] / −(aᵢ + aⱼ), which do not depend on the step Δ."""
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
    if not 0 < largest_radius < 1:
        raise UnstableSystemError(f"largest_radius is {largest_radius}, expected a number between 0 and 1")


def require_negative_rates(rates: Float[Tensor, "*bank n"]) -> Float[Tensor, "*bank n"]:
    """Continuous-time poles, in double precision."""
    validation.require_tensor("rates", rates, "n")
    validation.require_one_precision(rates=rates)
    validation.require_finite("rates", rates)
    if rates.is_complex() or bool((rates >= 0).any()):
        raise UnstableSystemError(
            f"rates must be real and < 0, got {rates.dtype} with largest {rates.real.max().item():.6g}"
        )
    return validation.to_double(rates)
