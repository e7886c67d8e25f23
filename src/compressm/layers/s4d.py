"""S4D (Gu et al. 2022): a bank of continuous-time diagonal systems, one per channel, each with a learned step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.layers.base import LTILayer, keeps_arguments, require_batch, wide
from compressm.layers.discretisation import (
    ZOH,
    Discretisation,
    exponential,
    random_log_steps,
    require_discretisation,
    times,
)
from compressm.layers.initialisation import Initialisation, Lin
from compressm.layers.streaming import BankStepper
from compressm.ops import Path, SequenceError, lti_bank
from compressm.ops.block.norm import Link
from compressm.ops.dispatch import require_path
from compressm.ops.lti.scan import BANK_PATHS


@final
@keeps_arguments
class S4D(LTILayer):
    """hᵢ' = aᵢ hᵢ + uᵢ, yᵢ = 2 Re(Cᵢ hᵢ) + Dᵢ uᵢ for every channel i, a = −exp(log_A_real) + i A_imag.

    Each mode stands for a conjugate pair. Only the product of C and the input matrix matters, so the input matrix is 1.
    """

    STATE_AXES: ClassVar[Mapping[str, int]] = {"log_A_real": 1, "A_imag": 1, "C_re": 1, "C_im": 1}

    def __init__(
        self,
        width: int,
        order: int,
        *,
        initialisation: Initialisation = Lin(),
        discretisation: Discretisation = ZOH(),
        step_min: float = 1e-3,
        step_max: float = 1e-1,
        path: Path | None = None,
    ) -> None:
        super().__init__(width, order)
        if not isinstance(initialisation, Initialisation):
            raise SequenceError(f"initialisation is {initialisation!r}, expected an object: Lin(), Inv() or Legs()")
        self.discretisation = require_discretisation(discretisation)
        require_path(path, *BANK_PATHS)
        self.path = path
        log_step = random_log_steps(width, step_min, step_max)
        poles, dtype = initialisation(order), torch.get_default_dtype()
        self.log_A_real = nn.Parameter(torch.log(-poles[0]).to(dtype).repeat(width, 1))
        self.A_imag = nn.Parameter(poles[1].to(dtype).repeat(width, 1))
        self.log_step = nn.Parameter(log_step)
        self.C_re, self.C_im = (nn.Parameter(torch.randn(width, order) / math.sqrt(2)) for _ in range(2))
        self.D = nn.Parameter(torch.randn(width))

    def discrete(self) -> tuple[Float[Tensor, "2 width n"], Float[Tensor, "2 width n"], Float[Tensor, "2 width n"]]:
        """(log λ, s, 2 C) of the recurrence h[t] = λ h[t−1] + s u[t], y[t] = Re(2 C h[t]) + D u[t] in each channel."""
        # In float64: for Im a = 1e5, an error of 6e-8 in Δ Im a grows to 1e-2 in the phase over the mode's lifetime.
        a = torch.stack([-torch.exp(self.log_A_real.double()), self.A_imag.double()])
        step = torch.exp(self.log_step.double())[:, None].expand_as(a[0])
        log_poles, scale = self.discretisation(a, step)
        return log_poles, scale.to(self.C_re.dtype), 2 * torch.stack([self.C_re, self.C_im])

    def log_poles(self) -> Float[Tensor, "2 width n"]:
        """(log |λ|, arg λ), in float64."""
        return self.discrete()[0]

    def matrices(self) -> tuple[Float[Tensor, "2 width n"], Float[Tensor, "2 width n"]]:
        """s and 2 C, as real pairs."""
        return self.discrete()[1:]

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
        return lti_bank(x, *self.discrete(), state, lengths, D=D, keep_state=keep_state, path=self.path)

    def step(
        self, x: Float[Tensor, "batch width"], state: Float[Tensor, "batch 2 width n"]
    ) -> tuple[Float[Tensor, "batch width"], Float[Tensor, "batch 2 width n"]]:
        return self._stepped(x, state, self._advance)

    def _advance(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        log_poles, scale, C = self.discrete()
        h = times(exponential(log_poles).to(x.dtype), state.movedim(1, 0)) + scale[:, None] * x[..., None]
        return (C[0] * h[0] - C[1] * h[1]).sum(-1), h.movedim(0, 1)

    def stepper(self, dtype: torch.dtype, *, gain: float = 1.0, scaled: bool = False) -> BankStepper:
        return BankStepper(*self.discrete(), self.D, dtype, gain=gain, scaled=scaled)

    def initial_state(self, batch: int) -> Float[Tensor, "batch 2 width n"]:
        require_batch(batch)
        return self.log_A_real.new_zeros(batch, 2, self.width, self.order, dtype=wide(self.log_A_real.dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, discretisation={self.discretisation}"
