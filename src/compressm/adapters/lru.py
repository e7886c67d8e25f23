"""The LRU as a system: λ = exp(−exp(ν) + i exp(θ)), B scaled by γ."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import final

import torch
from torch import Tensor

from compressm.adapters.base import SSMAdapter, adapts, finite_doubles
from compressm.adapters.poles import encodable, log_poles, old_modes, same_turn
from compressm.control import DiagonalSystem
from compressm.control.linear_algebra import exponential
from compressm.control.poles import decay
from compressm.layers import LRU

# A share of 1 − |λ|: a phase of 0 has no logarithm; this one moves the mode's resonance by at most 1e-3 of its width.
_LEAST_PHASE = 1e-3


@adapts(LRU)
@final
class LRUAdapter(SSMAdapter[LRU]):
    """An LRU as one system for all channels; B includes γ when read, and a new mode gets γ = √(1 − |λ|²).

    A mode whose pole (or its conjugate) was there before keeps its learned γ, and encoding the system that was read
    changes no parameter. Phases of new modes are stored in (0, 2π): a pole in the lower half disc has a phase above π.
    A phase below 1e-3 (1 − |λ|) is stored as this value, because log 0 is not finite and the relative steps of an
    optimizer would never leave 0.
    """

    def read(self, module: LRU) -> DiagonalSystem:
        nu_log, theta_log, gamma_log, B_re, B_im, C_re, C_im = finite_doubles(module, LRU.STATE_AXES)
        logarithms = _logarithms(nu_log, theta_log)
        B = torch.exp(gamma_log)[..., None] * torch.complex(B_re, B_im)
        return DiagonalSystem.from_log_poles(logarithms, B, torch.complex(C_re, C_im))

    def setting(self, module: LRU) -> Hashable:
        return ()

    def encode(self, module: LRU, system: DiagonalSystem) -> dict[str, Tensor]:
        B, C = encodable(module, system)
        log_modulus, phase = log_poles(system)
        with torch.no_grad():
            logarithms = _logarithms(*finite_doubles(module, ("nu_log", "theta_log")))
            old = exponential(logarithms)
            known, place, mirrored = old_modes(system, old, decay(old, logarithms))
            old_gamma, old_phase = (part.double().gather(-1, place) for part in (module.gamma_log, module.theta_log))
            old_phase = torch.exp(old_phase)
        gamma_log = torch.where(known, old_gamma, torch.log(-torch.expm1(2 * log_modulus)) / 2)
        turned = same_turn(phase, old_phase, known & ~mirrored)
        kept = known & ~mirrored & (turned.detach() > 0)
        phase = torch.where(kept, turned, _stored_phase(log_modulus, phase))
        B = torch.exp(-gamma_log)[..., None] * B
        return {
            "nu_log": torch.log(-log_modulus),
            "theta_log": torch.log(phase),
            "gamma_log": gamma_log,
            "B_re": B.real,
            "B_im": B.imag,
            "C_re": C.real,
            "C_im": C.imag,
        }


def _logarithms(nu_log: Tensor, theta_log: Tensor) -> Tensor:
    return torch.complex(-torch.exp(nu_log), torch.exp(theta_log))


def _stored_phase(log_modulus: Tensor, phase: Tensor) -> Tensor:
    # A phase of −1e-17 would round to 2π itself, which is not allowed.
    lower = (phase + 2 * math.pi).clamp_max(math.nextafter(2 * math.pi, 0))
    least = -_LEAST_PHASE * torch.expm1(log_modulus.detach())
    return torch.where(phase < 0, lower, torch.maximum(phase, least))
