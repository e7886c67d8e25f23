"""The adapter of LinOSS: each oscillator is a complex mode, with poles on a circle or, if it is damped, anywhere."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar, final

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from compressm.adapters.base import SSMAdapter, adapts, finite_doubles
from compressm.adapters.poles import SMALLEST_POLE, encodable, log_poles, nearest_old, old_modes
from compressm.control import DiagonalSystem
from compressm.control.linear_algebra import modulus, square_modulus
from compressm.control.norms import with_poles
from compressm.layers import LinOSS
from compressm.layers.discretisation import exponential
from compressm.layers.linoss import modal

# The largest Δω: a pole that only a faster oscillator could have becomes one of modulus 1e-6.
_FASTEST = 1e6
# A share of 1 − |λ|: a damped oscillator has a pair of complex poles, so a real pole is turned by this much.
_LEAST_PHASE = 1e-3
# A share of 1 − |λ|²: a pole that is moved by less is not moved.
_STAYS = 1e-12


@adapts(LinOSS)
@final
class LinOSSAdapter(SSMAdapter[LinOSS]):
    """One system for all channels, whose modes are velocity + κ position of every oscillator.

    With `IM` poles lie on the circle |z − ½| = ½, and those of a cut beside it: `nearest` moves them onto the circle
    along a line of constant Im (1 + λ)/(1 − λ), the shortest way in hyperbolic distance, and refits C. With
    `DampedIMEX` every pair of complex poles is stored as it is; a real pole becomes a pair with a phase of
    1e-3 (1 − |λ|), and C is refitted. A mode in the lower half disc is stored as its conjugate. A new mode gets the
    step of the nearest old pole, as in S5.
    """

    IDLE: ClassVar[complex] = 0.5 + 0.5j

    def read(self, module: LinOSS) -> DiagonalSystem:
        frequency, step = (torch.exp(part) for part in finite_doubles(module, ("log_frequency", "log_step")))
        damping = torch.exp(finite_doubles(module, ("log_damping",))[0]) if module.scheme.damped else None
        forces = finite_doubles(module, ("B_velocity", "B_position", "C_velocity", "C_position"))
        logarithms, basis = module.scheme(frequency, damping, step)
        B, C = modal(step * exponential(logarithms), basis, *forces)
        return DiagonalSystem.from_log_poles(*(torch.complex(*pair) for pair in (logarithms, B, C)))

    def setting(self, module: LinOSS) -> Hashable:
        return module.scheme

    def nearest(self, module: LinOSS, system: DiagonalSystem) -> DiagonalSystem:
        poles = system.poles.to(torch.complex128)
        upper = torch.complex(poles.real, poles.imag.abs())
        moved = _stored_pole(upper) if module.scheme.damped else 1 / (1 - 1j * _angle(upper))
        moved = torch.where(poles.imag < 0, moved.conj(), moved)
        stays = modulus(moved - poles) <= _STAYS * system.decay
        return system if bool(stays.all()) else with_poles(system, torch.where(stays, poles, moved))

    def encode(self, module: LinOSS, system: DiagonalSystem) -> dict[str, Tensor]:
        B, C = encodable(module, system)
        below = system.poles.detach().imag < 0 if system.poles.is_complex() else torch.zeros_like(B[..., 0].real) > 0
        B = torch.where(below[..., :, None], B.conj(), B)
        C = torch.where(below[..., None, :], C.conj(), C)
        with torch.no_grad():
            old = self.read(module)
            known, place, _ = old_modes(system, old.poles, old.decay)
            log_step = module.log_step.double().gather(-1, torch.where(known, place, nearest_old(system, old)))
        step = torch.exp(log_step)
        frequency, damping = _oscillators(system, step) if module.scheme.damped else (_on_circle(system) / step, None)
        logarithms, basis = module.scheme(frequency, damping, step)
        forces = B / torch.complex(*(step * exponential(logarithms)))[..., None]
        B_position = forces.imag / basis[1][..., None]
        values = {
            "log_frequency": torch.log(frequency),
            "log_step": log_step,
            "B_velocity": forces.real - basis[0][..., None] * B_position,
            "B_position": B_position,
            "C_velocity": C.real,
            "C_position": basis[0][..., None, :] * C.real - basis[1][..., None, :] * C.imag,
        }
        return values if damping is None else {**values, "log_damping": torch.log(damping)}


def _angle(poles: Complex[Tensor, "*bank n"]) -> Float[Tensor, "*bank n"]:
    """Δω of the pole 1/(1 − iΔω) with the same Im (1 + λ)/(1 − λ) = 2 Im λ / |1 − λ|², which is 2/Δω there."""
    square = square_modulus(1 - poles)
    return square / torch.maximum(poles.imag, square / _FASTEST)


def _on_circle(system: DiagonalSystem) -> Float[Tensor, "*bank n"]:
    poles = system.poles.to(torch.complex128)
    return _angle(torch.complex(poles.real, poles.imag.abs()))


def _oscillators(
    system: DiagonalSystem, step: Float[Tensor, "*bank n"]
) -> tuple[Float[Tensor, "*bank n"], Float[Tensor, "*bank n"]]:
    """ω and g of damped oscillators with these poles."""
    log_modulus, phase = log_poles(system)
    phase = _within(log_modulus, phase.abs())
    return 2 * torch.tan(phase / 2) / step, torch.expm1(-2 * log_modulus) / step


def _stored_pole(upper: Complex[Tensor, "*bank n"]) -> Complex[Tensor, "*bank n"]:
    """The nearest pole of a damped oscillator."""
    size = modulus(upper).clamp_min(SMALLEST_POLE)
    return torch.polar(size, _within(torch.log(size), torch.angle(upper)))


def _within(log_modulus: Tensor, phase: Tensor) -> Tensor:
    least = -_LEAST_PHASE * torch.expm1(log_modulus.detach())
    return torch.minimum(torch.maximum(phase, least), torch.pi - least)
