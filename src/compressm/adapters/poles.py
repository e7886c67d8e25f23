"""Poles as layers store them: logarithms and continuous-time poles, to the last digits and differentiable.

Values come from 1 − |λ|², which a system knows without cancellation; derivatives always run through `system.poles`,
whether the system was made of poles or of their logarithms.
"""

from __future__ import annotations

from functools import singledispatch

import torch
from jaxtyping import Bool, Float, Inexact, Int
from torch import Tensor

from compressm.control import DiagonalSystem
from compressm.control.linear_algebra import logarithm, modulus
from compressm.errors import AdapterError
from compressm.layers import ZOH, Bilinear, Discretisation

# Smaller poles have no logarithm worth storing: λ = 0 is stored as this, which changes an output by 1e-30 of B and C.
SMALLEST_POLE = 1e-30
# Bilinear layers compute |λ|² as 1 − (1 − |λ|²), which below 1.5e-8 is rounding, and there they hold |λ| fixed.
SMALLEST_BILINEAR_POLE = 1e-7
# Of 1 − |λ|²: poles nearer than this are one pole, rounded twice.
_SAME = 1e-9


def log_poles(system: DiagonalSystem) -> tuple[Float[Tensor, "*bank n"], Float[Tensor, "*bank n"]]:
    """log |λ| and arg λ in (−π, π]."""
    log_modulus, phase = logarithm(_away_from_zero(system, SMALLEST_POLE))
    decay = system.decay.detach()
    # Below |λ|² = ½ it is 1 − |λ|² that has the fewer digits.
    exact = torch.where(decay < 0.5, torch.log1p(-decay) / 2, log_modulus.detach())
    # A negative real pole with an imaginary part of −0 has the phase −π.
    return _with_value(log_modulus, exact), torch.where(phase <= -torch.pi, -phase, phase)


@singledispatch
def continuous_poles(
    rule: Discretisation, system: DiagonalSystem, step: Float[Tensor, "*bank n"]
) -> Float[Tensor, "2 *bank n"]:
    """(Re a, Im a), Re a < 0, of the poles a that the rule samples to the system's at these steps.

    For a rule of one's own: `continuous_poles.register(Rule)`.
    """
    raise AdapterError(f"{rule!r} is not known backwards; register its inverse with continuous_poles.register")


@continuous_poles.register
def _(rule: ZOH, system: DiagonalSystem, step: Tensor) -> Tensor:
    """a = log λ / Δ, with the phase of λ in (−π, π]: among the poles with the same samples the slowest."""
    return torch.stack(log_poles(system)) / step


@continuous_poles.register
def _(rule: Bilinear, system: DiagonalSystem, step: Tensor) -> Tensor:
    """Δ a = 2 (λ − 1) / (λ + 1), of which the real part is −2 (1 − |λ|²) / |1 + λ|²."""
    poles = _away_from_zero(system, SMALLEST_BILINEAR_POLE)
    re, im = poles.real, poles.imag
    decay = _with_value(1 - re * re - im * im, system.decay.detach())
    square = (1 + re) ** 2 + im**2
    return torch.stack([-2 * decay, 4 * im]) / (square * step)


def old_modes(
    new: DiagonalSystem, old: Inexact[Tensor, "*bank n"], decay: Float[Tensor, "*bank n"]
) -> tuple[Bool[Tensor, "*bank r"], Int[Tensor, "*bank r"], Bool[Tensor, "*bank r"]]:
    """For each new mode: whether an old one has its pole or the conjugate of it, which one, and if it is conjugated.

    `old` holds the old poles and `decay` their 1 − |λ|².
    Among several with the same pole it is the one at the same place, or else the first: encoding what was read finds
    every mode where it was, so that what a pole leaves open (a gain, a step, a turn of the phase) stays as it was.
    """
    poles, others = (part.detach().to(torch.complex128) for part in (new.poles, old))
    (x, y), (u, v) = _upper(poles), _upper(others)
    within = _SAME * decay.detach()
    dx, dy = x[..., :, None] - u[..., None, :], y[..., :, None] - v[..., None, :]
    same = dx * dx + dy * dy <= (within * within)[..., None, :]
    place = same.to(torch.int8).argmax(-1)
    here = torch.arange(new.order, device=place.device).expand_as(place)
    beside = torch.diagonal(same, dim1=-2, dim2=-1)
    beside = torch.nn.functional.pad(beside, (0, new.order - beside.shape[-1]))
    place = torch.where(beside, here, place)
    mirrored = modulus(poles - others.gather(-1, place)) > within.gather(-1, place)
    return same.any(-1), place, mirrored


def with_old_frequencies(
    rule: Discretisation,
    a: Float[Tensor, "2 *bank n"],
    old: Float[Tensor, "*bank n"],
    step: Float[Tensor, "*bank n"],
    kept: Bool[Tensor, "*bank n"],
) -> Float[Tensor, "2 *bank n"]:
    """a with the old Im a among all those that ZOH samples to the same pole, where the mode was kept."""
    if not isinstance(rule, ZOH):
        return a
    return torch.stack([a[0], same_turn(a[1] * step, old * step, kept) / step])


def same_turn(
    phase: Float[Tensor, "*bank n"], old: Float[Tensor, "*bank n"], kept: Bool[Tensor, "*bank n"]
) -> Float[Tensor, "*bank n"]:
    """The phase as many times 2π away as the old one was, where it was kept."""
    turns = torch.round((old - phase.detach()) / (2 * torch.pi))
    return phase + torch.where(kept, turns, 0) * (2 * torch.pi)


def _upper(poles: Tensor) -> tuple[Tensor, Tensor]:
    return poles.real, poles.imag.abs()


def _away_from_zero(system: DiagonalSystem, least: float) -> Tensor:
    poles = system.poles.to(torch.complex128)
    return torch.where(modulus(poles.detach()) < least, least, poles)


def _with_value(computed: Tensor, value: Tensor) -> Tensor:
    """`value`, with the derivative of `computed`."""
    return computed + (value - computed.detach())
