"""S5 (Smith et al. 2022): one continuous-time diagonal system for all channels, with one learned step per mode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.layers.base import SystemLayer, keeps_arguments
from compressm.layers.discretisation import ZOH, Discretisation, random_log_steps, require_discretisation, times
from compressm.layers.initialisation import legs_modes
from compressm.ops import Path
from compressm.ops.dispatch import require_path


@final
@keeps_arguments
class S5(SystemLayer):
    """h' = a h + B u, y = 2 Re(C h) + D u, a = −exp(log_A_real) + i A_imag; each mode stands for a conjugate pair.

    The poles start as the eigenvalues of the normal part of HiPPO-LegS of size 2n; B and C start as real random
    matrices, expressed in its eigenvectors: Vᴴ B, C V.
    """

    STATE_AXES: ClassVar[Mapping[str, int]] = {
        "log_A_real": 0,
        "A_imag": 0,
        "log_step": 0,
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
        discretisation: Discretisation = ZOH(),
        step_min: float = 1e-3,
        step_max: float = 1e-1,
        path: Path | None = None,
    ) -> None:
        super().__init__(width, order)
        self.discretisation = require_discretisation(discretisation)
        require_path(path, *Path)
        self.path = path
        log_step = random_log_steps(order, step_min, step_max)
        poles, vectors = legs_modes(order)
        dtype = torch.get_default_dtype()
        self.log_A_real = nn.Parameter(torch.log(-poles[0]).to(dtype))
        self.A_imag = nn.Parameter(poles[1].to(dtype))
        self.log_step = nn.Parameter(log_step)
        B = torch.randn(2 * order, width, dtype=torch.float64) / math.sqrt(width)
        C = torch.randn(width, 2 * order, dtype=torch.float64) / math.sqrt(2 * order)
        B, C = vectors.mH @ B.to(vectors.dtype), C.to(vectors.dtype) @ vectors
        self.B_re, self.B_im = (nn.Parameter(part.to(dtype)) for part in (B.real, B.imag))
        self.C_re, self.C_im = (nn.Parameter(part.to(dtype)) for part in (C.real, C.imag))
        self.D = nn.Parameter(torch.randn(width))

    def discrete(self) -> tuple[Float[Tensor, "2 n"], Float[Tensor, "2 n width"], Float[Tensor, "2 width n"]]:
        """(log λ, s B, 2 C) of the recurrence h[t] = λ h[t−1] + s B u[t], y[t] = Re(2 C h[t]) + D u[t]."""
        # In float64: for Im a = 1e5, an error of 6e-8 in Δ Im a grows to 1e-2 in the phase over the mode's lifetime.
        a = torch.stack([-torch.exp(self.log_A_real.double()), self.A_imag.double()])
        log_poles, scale = self.discretisation(a, torch.exp(self.log_step.double()))
        B = times(scale.to(self.B_re.dtype)[..., None], torch.stack([self.B_re, self.B_im]))
        return log_poles, B, 2 * torch.stack([self.C_re, self.C_im])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, discretisation={self.discretisation}"
