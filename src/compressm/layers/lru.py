"""The linear recurrent unit (Orvieto et al. 2023): one complex diagonal system for all channels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.layers.base import LTILayer, keeps_arguments, require_batch, require_numbers, wide
from compressm.layers.streaming import SystemStepper
from compressm.ops import Path, SequenceError, lti_layer
from compressm.ops.block.norm import Link
from compressm.ops.dispatch import require_path
from compressm.ops.lti import layer_dtype
from compressm.ops.lti.lru_system import lru_system, plain_system
from compressm.ops.lti.states import raised


@final
@keeps_arguments
class LRU(LTILayer):
    """h[t] = λ h[t−1] + γ B u[t], y[t] = Re(C h[t]) + D u[t], λ = exp(−exp(ν) + i exp(θ)).

    At the start λ is uniform in area on the ring r_min ≤ |λ| ≤ r_max, with a phase up to max_phase. γ starts at
    √(1 − |λ|²), which makes all modes equally strong, and is learned.
    """

    STATE_AXES: ClassVar[Mapping[str, int]] = {
        "nu_log": 0,
        "theta_log": 0,
        "gamma_log": 0,
        "B_re": 0,
        "B_im": 0,
        "C_re": 1,
        "C_im": 1,
    }

    def __init__(
        self,
        width: int,
        order: int,
        *,
        r_min: float = 0.9,
        r_max: float = 0.999,
        max_phase: float = 6.28,
        path: Path | None = None,
    ) -> None:
        super().__init__(width, order)
        require_numbers(r_min=r_min, r_max=r_max, max_phase=max_phase)
        require_path(path, *Path)
        if not 0 <= r_min < r_max < 1:
            raise SequenceError(f"r_min is {r_min} and r_max {r_max}, expected 0 <= r_min < r_max < 1")
        if not 0 < max_phase <= 2 * math.pi:
            raise SequenceError(f"max_phase is {max_phase}, expected a number above 0 and up to 2π")
        self.path = path
        area = r_min**2 + torch.rand(order) * (r_max**2 - r_min**2)
        self.nu_log = nn.Parameter(torch.log(-0.5 * torch.log(area)))
        self.theta_log = nn.Parameter(torch.log(max_phase * torch.rand(order).clamp_min(1e-6)))
        self.gamma_log = nn.Parameter(0.5 * torch.log(-torch.expm1(-2 * torch.exp(self.nu_log.detach()))))
        self.B_re, self.B_im = (nn.Parameter(torch.randn(order, width) / math.sqrt(2 * width)) for _ in range(2))
        self.C_re, self.C_im = (nn.Parameter(torch.randn(width, order) / math.sqrt(order)) for _ in range(2))
        self.D = nn.Parameter(torch.randn(width))

    def log_poles(self) -> Float[Tensor, "2 n"]:
        """(log |λ|, arg λ)."""
        return plain_system(*self.parameters_of_system())[0]

    def matrices(self) -> tuple[Float[Tensor, "2 n width"], Float[Tensor, "2 width n"]]:
        """γ B and C, as real pairs."""
        return plain_system(*self.parameters_of_system())[1:]

    def parameters_of_system(self) -> tuple[Tensor, ...]:
        """The parameters of poles, γ B and C."""
        return self.nu_log, self.theta_log, self.gamma_log, self.B_re, self.B_im, self.C_re, self.C_im

    def kernel_parameters(self) -> tuple[Tensor, ...] | None:
        parameters = self._at_hand() if not torch.compiler.is_compiling() else None
        parameters = self.parameters_of_system() if parameters is None else parameters
        single = {parameter.dtype for parameter in parameters} == {torch.float32}
        return parameters if self.path is None and single else None

    def _at_hand(self) -> tuple[Tensor, ...] | None:
        """The same parameters in half the time of seven attributes; None if some are computed, as by parametrizations.

        A compiler takes the sizes of what is read so as constants.
        """
        held = self._parameters
        found = tuple([parameter for name in self.STATE_AXES if (parameter := held.get(name)) is not None])
        return found if len(found) == len(self.STATE_AXES) else None

    def _mix(
        self,
        x: Tensor,
        state: Tensor | None,
        lengths: Tensor | None,
        keep_state: bool,
        D: Tensor | None,
        drive: Link | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        self._check(x, state, axes="batch length")
        system = lru_system(*self.parameters_of_system(), dtype=layer_dtype(x, self.order, self.width, self.path))
        idle = system[0].shape[-1] - self.order
        state = nn.functional.pad(state, (0, idle)) if state is not None and idle else state
        y, last = lti_layer(x, *system, state, lengths, D=D, keep_state=keep_state, path=self.path, drive=drive)
        return y, last if last is None else last[..., : self.order]

    def step(
        self, x: Float[Tensor, "batch width"], state: Float[Tensor, "batch 2 n"]
    ) -> tuple[Float[Tensor, "batch width"], Float[Tensor, "batch 2 n"]]:
        return self._stepped(x, state, self._advance)

    def _advance(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        (B_re, B_im), (C_re, C_im) = self.matrices()
        modulus, phase = torch.exp(-torch.exp(raised(self.nu_log))), torch.exp(raised(self.theta_log))
        a, b = modulus * torch.cos(phase), modulus * torch.sin(phase)
        h_re, h_im = state.unbind(1)
        h_re, h_im = a * h_re - b * h_im + x @ B_re.mT, b * h_re + a * h_im + x @ B_im.mT
        return h_re @ C_re.mT - h_im @ C_im.mT, torch.stack([h_re, h_im], dim=1)

    def stepper(self, dtype: torch.dtype, *, gain: float = 1.0, scaled: bool = False) -> SystemStepper:
        system = plain_system(*(parameter.double() for parameter in self.parameters_of_system()))
        return SystemStepper(*system, self.D, dtype, gain=gain, scaled=scaled)

    def initial_state(self, batch: int) -> Float[Tensor, "batch 2 n"]:
        require_batch(batch)
        return self.nu_log.new_zeros(batch, 2, self.order, dtype=wide(self.nu_log.dtype))
