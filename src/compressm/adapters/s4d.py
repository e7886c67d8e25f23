"""The adapter of S4D, a bank with one system per channel: continuous-time poles a, sampled at the channel's step."""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

import torch
from torch import Tensor

from compressm.adapters.base import SSMAdapter, adapts, finite_doubles
from compressm.adapters.poles import continuous_poles, encodable, old_modes, with_old_frequencies
from compressm.control import DiagonalSystem
from compressm.layers import S4D


@adapts(S4D)
@final
class S4DAdapter(SSMAdapter[S4D]):
    """A bank of `width` systems with one input and one output: the layer's discretisation of (a, 1), and 2 C.

    The input matrix of the layer is 1, so the layer stores the products of B and C. Each channel keeps its step
    (`log_step` has no axis of states). a follows from λ as in S5; encoding the system that was read changes nothing.
    """

    def read(self, module: S4D) -> DiagonalSystem:
        log_A_real, A_imag, C_re, C_im, log_step = finite_doubles(module, [*S4D.STATE_AXES, "log_step"])
        step = torch.exp(log_step)[..., None].expand_as(A_imag)
        logarithms, scale = module.discretisation(torch.stack([-torch.exp(log_A_real), A_imag]), step)
        C = 2 * torch.complex(C_re, C_im)
        return DiagonalSystem.from_log_poles(
            torch.complex(*logarithms), torch.complex(*scale)[..., None], C[..., None, :]
        )

    def setting(self, module: S4D) -> Hashable:
        return module.discretisation

    def encode(self, module: S4D, system: DiagonalSystem) -> dict[str, Tensor]:
        B, C = encodable(module, system, bank=True)
        step = torch.exp(module.log_step.detach().double())[..., None].expand_as(system.poles)
        with torch.no_grad():
            old = self.read(module)
            known, place, mirrored = old_modes(system, old.poles, old.decay)
            old_imag = module.A_imag.double().gather(-1, place)
        a = continuous_poles(module.discretisation, system, step)
        a = with_old_frequencies(module.discretisation, a, old_imag, step, known & ~mirrored)
        _, scale = module.discretisation(a, step)
        C = C[..., 0, :] * B[..., 0] / (2 * torch.complex(*scale))
        return {"log_A_real": torch.log(-a[0]), "A_imag": a[1], "C_re": C.real, "C_im": C.imag}
