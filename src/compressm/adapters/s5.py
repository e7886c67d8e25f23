"""The adapter of S5: continuous-time poles a, sampled at one step Δ per mode; each mode is a conjugate pair."""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

import torch
from torch import Tensor

from compressm.adapters.base import SSMAdapter, adapts, finite_doubles
from compressm.adapters.poles import continuous_poles, encodable, nearest_old, old_modes, with_old_frequencies
from compressm.control import DiagonalSystem
from compressm.layers import S5


@adapts(S5)
@final
class S5Adapter(SSMAdapter[S5]):
    """One system for all channels: the layer's own discretisation of (a, B) at steps Δ, and 2 C for the pairs.

    A discrete pole does not fix its step: any Δ > 0 with a = log λ / Δ will do. A new mode gets the step of the old
    mode whose pole is nearest to its own (or to its conjugate). The reason: Δ sets how far an optimizer's step on Im a
    turns the phase, Δ·lr, and how large the stored B is, about 1/Δ. In a layer, slow poles have small steps. The
    nearest step keeps the phase of a new slow mode as steady, relative to its narrow resonance, as before, and a and B
    in the sizes that the optimizer knows. With one mean step for all, a mode at Δ = 1e-3 among others at 1e-1 would
    turn ten times as fast. An unchanged mode keeps its step and Im a: encoding what was read changes nothing.

    With ZOH Im a of a new mode is arg λ / Δ for arg λ in (−π, π], the slowest of all with the same samples. A mode
    whose pole was there before keeps its frequency, even above the sampling rate. With the bilinear rule poles below
    1e-7 are stored as 1e-7, the smallest that the layer can tell from 0.
    """

    def read(self, module: S5) -> DiagonalSystem:
        log_A_real, A_imag, log_step, B_re, B_im, C_re, C_im = finite_doubles(module, S5.STATE_AXES)
        logarithms, scale = module.discretisation(torch.stack([-torch.exp(log_A_real), A_imag]), torch.exp(log_step))
        B = torch.complex(*scale)[..., None] * torch.complex(B_re, B_im)
        return DiagonalSystem.from_log_poles(torch.complex(*logarithms), B, 2 * torch.complex(C_re, C_im))

    def setting(self, module: S5) -> Hashable:
        return module.discretisation

    def encode(self, module: S5, system: DiagonalSystem) -> dict[str, Tensor]:
        B, C = encodable(module, system)
        with torch.no_grad():
            old = self.read(module)
            known, place, mirrored = old_modes(system, old.poles, old.decay)
            place = torch.where(known, place, nearest_old(system, old))
            log_step, old_imag = (part.double().gather(-1, place) for part in (module.log_step, module.A_imag))
        a = continuous_poles(module.discretisation, system, torch.exp(log_step))
        a = with_old_frequencies(module.discretisation, a, old_imag, torch.exp(log_step), known & ~mirrored)
        _, scale = module.discretisation(a, torch.exp(log_step))
        B, C = B / torch.complex(*scale)[..., None], C / 2
        return {
            "log_A_real": torch.log(-a[0]),
            "A_imag": a[1],
            "log_step": log_step,
            "B_re": B.real,
            "B_im": B.imag,
            "C_re": C.real,
            "C_im": C.imag,
        }
