"""Layers read y = Re(C h) from real inputs. What that allows: fold conjugate modes, or write out the real system."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compressm.control.errors import PrecisionError
from compressm.control.system import DenseSystem, DiagonalSystem


def fold(system: DiagonalSystem) -> DiagonalSystem:
    """Every mode (λ, b, c) with Im λ < 0 replaced by (λ̄, b̄, c̄): Re(C h) is the same for every real input.

    The poles then crowd in the upper half disc, where fewer balanced states carry the same real output, and an
    optimizer's relative step on θ near 0 is small where near 2π it is large.
    """
    if not system.poles.is_complex():
        return system
    if system.log_poles is not None:
        log_poles, below = _folded_logarithms(system.log_poles)
        poles = torch.exp(log_poles)
    else:
        log_poles, below = None, system.poles.imag < 0
        poles = torch.where(below, system.poles.conj(), system.poles)
    B = torch.where(below[..., :, None], system.B.conj(), system.B)
    C = torch.where(below[..., None, :], system.C.conj(), system.C)
    return DiagonalSystem._unchecked(poles, log_poles, B, C)


def _folded_logarithms(log_poles: Tensor) -> tuple[Tensor, Tensor]:
    """Phases in [0, π], and where they were not."""
    phase = torch.remainder(log_poles.imag, 2 * math.pi)
    below = phase > math.pi
    # 2π − θ and not −θ: the stored phase of a layer lies in [0, 2π).
    return torch.complex(log_poles.real, torch.where(below, 2 * math.pi - phase, phase)), below


def conjugate_pairs(system: DiagonalSystem) -> DiagonalSystem:
    """The complex system of order 2n whose output is Re(C h) itself: modes (λ, b, c/2) and (λ̄, b̄, c̄/2)."""
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
    poles, B, C = system.poles, system.B, system.C
    if not poles.is_complex():
        raise PrecisionError(f"a {poles.dtype} system is real already")
    re, im = torch.diag_embed(poles.real), torch.diag_embed(poles.imag)
    A = torch.cat([torch.cat([re, -im], dim=-1), torch.cat([im, re], dim=-1)], dim=-2)
    return DenseSystem._unchecked(A, torch.cat([B.real, B.imag], dim=-2), torch.cat([C.real, -C.imag], dim=-1))
