"""Layers read y = Re(C h) from real inputs. What that allows: fold conjugate modes, or write out the real system."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool
from torch import Tensor

from compressm.control import validation
from compressm.control.errors import PrecisionError
from compressm.control.parts import exponential
from compressm.control.system import DenseSystem, DiagonalSystem

# 2π is this much more than its float64.
_TWO_PI_REST = 2.4492935982947064e-16


def fold(system: DiagonalSystem) -> DiagonalSystem:
    """Every mode (λ, b, c) with Im λ < 0 replaced by (λ̄, b̄, c̄): Re(C h) is the same for every real input.

    The poles then crowd in the upper half disc, where fewer balanced states carry the same real output, and an
    optimizer's relative step on θ near 0 is small where near 2π it is large.
    """
    _require_diagonal("fold", system)
    if not system.poles.is_complex():
        return system
    log_poles: Tensor | None = None
    if system.log_poles is not None:
        log_poles, below = _folded_logarithms(system.log_poles)
        poles = exponential(log_poles)
    else:
        below = lower_half(system)
        poles = torch.where(below, system.poles.conj(), system.poles)
    B = torch.where(below[..., :, None], system.B.conj(), system.B)
    C = torch.where(below[..., None, :], system.C.conj(), system.C)
    folded = DiagonalSystem._unchecked(poles, log_poles, B, C)
    folded._assign(_decay=system.decay)  # conjugates have the same
    return folded


def lower_half(system: DiagonalSystem) -> Bool[Tensor, "*bank n"]:
    """The modes that `fold` conjugates."""
    if not system.poles.is_complex():
        return torch.zeros_like(system.poles, dtype=torch.bool)
    return system.poles.imag < 0 if system.log_poles is None else _folded_logarithms(system.log_poles)[1]


def _folded_logarithms(log_poles: Tensor) -> tuple[Tensor, Tensor]:
    """Phases in [0, π], and where they were not: −θ for θ in [−π, 0), 2π − θ for θ in (π, 2π), where layers store it.

    2π − (θ + 2π) in place of −θ would cost 2e-16, which at |log λ| = 1e-4 is 2e-12 of the output.
    """
    phase = log_poles.imag
    size = phase.detach().abs()
    turns = torch.where(size <= math.pi, 0, torch.floor((size + math.pi) / (2 * math.pi))) * torch.sign(phase.detach())
    phase = (phase - turns * (2 * math.pi)) - turns * _TWO_PI_REST
    below = phase < 0
    folded = torch.where(below, -phase, phase).clamp_max(math.pi)
    return torch.complex(log_poles.real, folded), below


def _require_diagonal(function: str, system: object) -> None:
    validation.require_kind(function, system, DiagonalSystem, hint="call diagonalise first")


def conjugate_pairs(system: DiagonalSystem) -> DiagonalSystem:
    """The complex system of order 2n whose output is Re(C h) itself: modes (λ, b, c/2) and (λ̄, b̄, c̄/2)."""
    _require_diagonal("conjugate_pairs", system)
    if not system.poles.is_complex():
        raise PrecisionError(
            f"a {system.poles.dtype} system is real already; conjugate pairs are made of complex modes"
        )
    log_poles = None if system.log_poles is None else torch.cat([system.log_poles, system.log_poles.conj()], dim=-1)
    poles = torch.cat([system.poles, system.poles.conj()], dim=-1)
    B = torch.cat([system.B, system.B.conj()], dim=-2)
    C = torch.cat([system.C, system.C.conj()], dim=-1) / 2
    return DiagonalSystem._unchecked(poles, log_poles, B, C)


def real_form(system: DiagonalSystem) -> DenseSystem:
    """The real system of order 2n with states (Re h, Im h) and output Re(C h)."""
    _require_diagonal("real_form", system)
    poles, B, C = system.poles, system.B, system.C
    if not poles.is_complex():
        raise PrecisionError(f"a {poles.dtype} system is real already")
    re, im = torch.diag_embed(poles.real), torch.diag_embed(poles.imag)
    A = torch.cat([torch.cat([re, -im], dim=-1), torch.cat([im, re], dim=-1)], dim=-2)
    return DenseSystem._unchecked(A, torch.cat([B.real, B.imag], dim=-2), torch.cat([C.real, -C.imag], dim=-1))
