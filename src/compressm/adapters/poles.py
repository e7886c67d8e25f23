"""Poles as layers store them, logarithms and continuous-time poles, accurate to the last digits and differentiable.

Values come from 1 − |λ|², which a system computes without cancellation. Derivatives always go through `system.poles`,
even if the system was built from logarithms of poles.
"""

from __future__ import annotations

from functools import singledispatch

import torch
from jaxtyping import Bool, Float, Inexact, Int
from torch import Tensor

from compressm.control import DeviceError, DiagonalSystem, ShapeError, UnstableSystemError, validation
from compressm.control.linear_algebra import logarithm, modulus
from compressm.errors import AdapterError
from compressm.layers import ZOH, Bilinear, Discretisation, LTILayer

# Smaller poles, also λ = 0, are stored as this one; it changes an output by 1e-30 of B and C.
SMALLEST_POLE = 1e-30
# Bilinear layers compute |λ|² as 1 − (1 − |λ|²): for |λ| below 1.5e-8 this is rounding, and they hold |λ| fixed.
SMALLEST_BILINEAR_POLE = 1e-7
# A share of 1 − |λ|²: closer poles are the same pole up to rounding.
_SAME = 1e-9


def encodable(layer: LTILayer, system: DiagonalSystem, *, bank: bool = False) -> tuple[Tensor, Tensor]:
    """Require a finite, stable system of the layer's width, on its device; return B and C in complex128.

    The layer stores one system for all channels, or a `bank` with one for each.
    """
    kind = type(layer).__name__
    if not isinstance(layer, LTILayer):
        raise AdapterError(f"encode takes a linear layer, got a {kind}")
    validation.require_kind(f"encoding a {kind}", system, DiagonalSystem, hint="call diagonalise first")
    validation.require_all_finite({"poles": system.poles, "B": system.B, "C": system.C})
    unstable = ~(system.decay.detach() > 0)
    if validation.values_are_read() and bool(unstable.any()):
        worst = modulus(system.poles.detach()).max().item()
        raise UnstableSystemError(
            f"largest pole modulus is {worst:.9g}, a {kind} stores only poles < 1 ({int(unstable.sum())} poles are not)"
        )
    given = (tuple(system.bank), system.inputs, system.outputs)
    stacked = tuple(layer.D.shape[:-1])
    expected = ((*stacked, layer.width), 1, 1) if bank else (stacked, layer.width, layer.width)
    if given != expected:
        raise ShapeError(f"the system has (bank, inputs, outputs) {given}, this {kind} expected {expected}")
    if system.device != layer.D.device:
        raise DeviceError(f"the system is on {system.device}, expected {layer.D.device}, the device of the {kind}")
    return system.B.to(torch.complex128), system.C.to(torch.complex128)


def log_poles(system: DiagonalSystem) -> tuple[Float[Tensor, "*bank n"], Float[Tensor, "*bank n"]]:
    """log |λ| and arg λ in (−π, π]."""
    log_modulus, phase = logarithm(_away_from_zero(system, SMALLEST_POLE))
    decay = system.decay.detach()
    # Below |λ|² = ½ log |λ| is accurate by itself; 1 − |λ|² has fewer digits there.
    exact = torch.where(decay < 0.5, torch.log1p(-decay) / 2, log_modulus.detach())
    # A negative real pole with an imaginary part of −0 has the phase −π.
    return _with_value(log_modulus, exact), torch.where(phase <= -torch.pi, -phase, phase)


@singledispatch
def continuous_poles(
    rule: Discretisation, system: DiagonalSystem, step: Float[Tensor, "*bank n"]
) -> Float[Tensor, "2 *bank n"]:
    """(Re a, Im a), Re a < 0, of the continuous-time poles a that the rule maps to the system's poles at these steps.

    To add your own rule, call `continuous_poles.register(Rule)`.
    """
    raise AdapterError(f"{rule!r} has no known inverse; register one with continuous_poles.register")


@continuous_poles.register
def _(rule: ZOH, system: DiagonalSystem, step: Tensor) -> Tensor:
    """a = log λ / Δ with the phase of λ in (−π, π], the slowest of all poles with the same samples."""
    _require_steps(system, step)
    return torch.stack(log_poles(system)) / step


@continuous_poles.register
def _(rule: Bilinear, system: DiagonalSystem, step: Tensor) -> Tensor:
    """Δ a = 2 (λ − 1) / (λ + 1), with the real part −2 (1 − |λ|²) / |1 + λ|²."""
    _require_steps(system, step)
    poles = _away_from_zero(system, SMALLEST_BILINEAR_POLE)
    re, im = poles.real, poles.imag
    decay = _with_value(1 - re * re - im * im, system.decay.detach())
    square = (1 + re) ** 2 + im**2
    return torch.stack([-2 * decay, 4 * im]) / (square * step)


def _require_steps(system: object, step: object) -> None:
    validation.require_kind("continuous_poles", system, DiagonalSystem, hint="call diagonalise first")
    validation.require_tensor("step", step, "n")


def old_modes(
    new: DiagonalSystem, old: Inexact[Tensor, "*bank n"], decay: Float[Tensor, "*bank n"]
) -> tuple[Bool[Tensor, "*bank r"], Int[Tensor, "*bank r"], Bool[Tensor, "*bank r"]]:
    """Match each new mode to an old one with its pole or the conjugate: if there is one, which, and if conjugated.

    `old` holds the old poles and `decay` their 1 − |λ|². Of several old modes with the same pole, the one with the same
    index matches, or else the first. Encoding the system that was read thus finds every mode at its own index, and all
    that a pole does not fix (a gain, a step, a turn of the phase) keeps its value.
    """
    poles, others = (part.detach().to(torch.complex128) for part in (new.poles, old))
    (x, y), (u, v) = upper_half(poles), upper_half(others)
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


def nearest_old(new: DiagonalSystem, old: DiagonalSystem) -> Int[Tensor, "*bank r"]:
    """The old pole with the least hyperbolic distance to each new one, in the upper half disc; the first of equals.

    |λ − μ| / |1 − λ μ̄| weighs a difference by the width of the resonances. With |1 − λ μ̄|² = |λ − μ|² +
    (1 − |λ|²)(1 − |μ|²) the nearest μ has the least |λ − μ|² / (1 − |μ|²), where nothing cancels.
    """
    (x, y), (u, v) = upper_half(new.poles), upper_half(old.poles)
    square = (x[..., :, None] - u[..., None, :]) ** 2 + (y[..., :, None] - v[..., None, :]) ** 2
    return (square / old.decay[..., None, :]).argsort(dim=-1, stable=True)[..., 0]


def with_old_frequencies(
    rule: Discretisation,
    a: Float[Tensor, "2 *bank n"],
    old: Float[Tensor, "*bank n"],
    step: Float[Tensor, "*bank n"],
    kept: Bool[Tensor, "*bank n"],
) -> Float[Tensor, "2 *bank n"]:
    """Replace Im a of kept modes by the old one: ZOH maps many values of Im a to the same pole."""
    if not isinstance(rule, ZOH):
        return a
    return torch.stack([a[0], same_turn(a[1] * step, old * step, kept) / step])


def same_turn(
    phase: Float[Tensor, "*bank n"], old: Float[Tensor, "*bank n"], kept: Bool[Tensor, "*bank n"]
) -> Float[Tensor, "*bank n"]:
    """Shift the phase of kept modes by the multiple of 2π that brings it nearest to the old phase."""
    turns = torch.round((old - phase.detach()) / (2 * torch.pi))
    return phase + torch.where(kept, turns, 0) * (2 * torch.pi)


def upper_half(poles: Inexact[Tensor, "*bank n"]) -> tuple[Float[Tensor, "*bank n"], Float[Tensor, "*bank n"]]:
    """Real and imaginary parts of the poles or their conjugates in the upper half plane."""
    poles = poles.detach().to(torch.complex128)
    return poles.real, poles.imag.abs()


def _away_from_zero(system: DiagonalSystem, least: float) -> Tensor:
    poles = system.poles.to(torch.complex128)
    return torch.where(modulus(poles.detach()) < least, least, poles)


def _with_value(computed: Tensor, value: Tensor) -> Tensor:
    """`value`, with the derivative of `computed`."""
    return computed + (value - computed.detach())
