"""Poles as layers store them: logarithms and continuous-time poles, to the last digits and differentiable.

Values come from 1 − |λ|², which a system knows without cancellation; derivatives always run through `system.poles`,
whether the system was made of poles or of their logarithms.
"""

from __future__ import annotations

from functools import singledispatch

import torch
from jaxtyping import Float
from torch import Tensor

from compressm.adapters.errors import AdapterError
from compressm.control import DiagonalSystem
from compressm.layers import ZOH, Bilinear, Discretisation

# Smaller poles have no logarithm worth storing: λ = 0 is stored as this, which changes an output by 1e-30 of B and C.
SMALLEST_POLE = 1e-30
# Bilinear layers compute |λ|² as 1 − (1 − |λ|²), which below 1.5e-8 is rounding, and there they hold |λ| fixed.
SMALLEST_BILINEAR_POLE = 1e-7


def log_poles(system: DiagonalSystem) -> tuple[Float[Tensor, "*bank n"], Float[Tensor, "*bank n"]]:
    """log |λ| and arg λ in (−π, π]."""
    logarithm = torch.log(_away_from_zero(system, SMALLEST_POLE))
    modulus, phase = logarithm.real, logarithm.imag
    decay = system.decay.detach()
    # Below |λ|² = ½ it is 1 − |λ|² that has the fewer digits.
    exact = torch.where(decay < 0.5, torch.log1p(-decay) / 2, modulus.detach())
    # A negative real pole with an imaginary part of −0 has the phase −π.
    return _with_value(modulus, exact), torch.where(phase <= -torch.pi, -phase, phase)


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


def _away_from_zero(system: DiagonalSystem, least: float) -> Tensor:
    poles = system.poles.to(torch.complex128)
    return torch.where(poles.detach().abs() < least, least, poles)


def _with_value(computed: Tensor, value: Tensor) -> Tensor:
    """`value`, with the derivative of `computed`."""
    return computed + (value - computed.detach())
