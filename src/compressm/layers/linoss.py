"""LinOSS (Rusch & Rus 2024) and D-LinOSS (Boyer et al. 2025): forced oscillators, one system for all channels."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.layers.base import SystemLayer, keeps_arguments
from compressm.layers.discretisation import exponential, random_log_steps, times
from compressm.layers.streaming import SystemStepper
from compressm.ops import Path, SequenceError
from compressm.ops.dispatch import require_path


class Scheme(ABC):
    """A rule that samples an oscillator, velocity' = −a position − g velocity and position' = velocity, at steps of Δ.

    A step is x ← M (x + Δ b u) for x = (velocity, position). M has the poles λ and λ̄, and velocity + κ position is the
    state of the mode λ.
    """

    # True if the oscillator has a learned damping g.
    damped: ClassVar[bool]

    @abstractmethod
    def __call__(
        self, frequency: Float[Tensor, "*modes"], damping: Float[Tensor, "*modes"] | None, step: Float[Tensor, "*modes"]
    ) -> tuple[Float[Tensor, "2 *modes"], Float[Tensor, "2 *modes"]]:
        """((log |λ|, arg λ), κ) of every oscillator, with 0 < arg λ < π and Im κ > 0."""


@final
@dataclass(frozen=True)
class IM(Scheme):
    """Implicit steps without damping: λ = 1 / (1 − iΔω) with ω = √a, which lies on the circle |z − ½| = ½; κ = iω."""

    damped: ClassVar[bool] = False

    def __call__(
        self, frequency: Float[Tensor, "*modes"], damping: Float[Tensor, "*modes"] | None, step: Float[Tensor, "*modes"]
    ) -> tuple[Float[Tensor, "2 *modes"], Float[Tensor, "2 *modes"]]:
        angle = step * frequency
        log_poles = torch.stack([-torch.log1p(angle * angle) / 2, torch.atan(angle)])
        return log_poles, torch.stack([torch.zeros_like(frequency), frequency])


@final
@dataclass(frozen=True)
class DampedIMEX(Scheme):
    """Implicit in the velocity, explicit in the position, with damping: |λ|² = S = 1 / (1 + Δg), κ = (λ/S − 1) / Δ.

    tan(½ arg λ) = ½Δω for ω > 0 gives every pair of complex poles inside the unit circle: this is the stable and
    underdamped region that D-LinOSS keeps a in. For small steps ω is the frequency of the damped oscillation,
    √(a − g²/4); a itself is |1 − λ|² / (SΔ²).
    """

    damped: ClassVar[bool] = True

    def __call__(
        self, frequency: Float[Tensor, "*modes"], damping: Float[Tensor, "*modes"] | None, step: Float[Tensor, "*modes"]
    ) -> tuple[Float[Tensor, "2 *modes"], Float[Tensor, "2 *modes"]]:
        assert damping is not None
        shrink, phase = torch.log1p(step * damping) / 2, 2 * torch.atan(step * frequency / 2)
        # λ/S − 1 is summed from small parts: the plain difference loses digits of slow modes.
        gap_re = torch.expm1(shrink) * torch.cos(phase) - 2 * torch.sin(phase / 2) ** 2
        gap_im = torch.exp(shrink) * torch.sin(phase)
        return torch.stack([-shrink, phase]), torch.stack([gap_re, gap_im]) / step


@final
@dataclass(frozen=True)
class IMEX(Scheme):
    """Implicit in the velocity, explicit in the position, without damping: |λ| = 1, so no layer takes it."""

    damped: ClassVar[bool] = False

    def __call__(
        self, frequency: Float[Tensor, "*modes"], damping: Float[Tensor, "*modes"] | None, step: Float[Tensor, "*modes"]
    ) -> tuple[Float[Tensor, "2 *modes"], Float[Tensor, "2 *modes"]]:
        raise SequenceError(_UNDAMPED)


_UNDAMPED = (
    "scheme is IMEX(), whose oscillators have no damping: |λ| = 1, so they have no Gramians, no Hankel singular values"
    " and no cut; expected DampedIMEX(), the same steps with a learned damping, or IM()"
)


@final
@keeps_arguments
class LinOSS(SystemLayer):
    """velocity' = −a position − g velocity + B u, position' = velocity, y = C position + D u, sampled by a `Scheme`.

    The order counts oscillators; each is one complex mode. Forces on the position and a readout of the velocity start
    at 0, as in the paper, and are learned: with them the layer can store any mode, as a cut needs.
    """

    STATE_AXES: ClassVar[Mapping[str, int]] = {
        "log_frequency": 0,
        "log_damping": 0,
        "log_step": 0,
        "B_velocity": 0,
        "B_position": 0,
        "C_velocity": 1,
        "C_position": 1,
    }

    def __init__(
        self,
        width: int,
        order: int,
        *,
        scheme: Scheme = IM(),
        step_min: float = 0.5,
        step_max: float = 0.75,
        path: Path | None = None,
    ) -> None:
        super().__init__(width, order)
        if not isinstance(scheme, Scheme):
            raise SequenceError(f"scheme is {scheme!r:.100}, expected an object: IM() or DampedIMEX()")
        if isinstance(scheme, IMEX):
            raise SequenceError(_UNDAMPED)
        require_path(path, *Path)
        self.scheme, self.path = scheme, path
        self.log_step = nn.Parameter(random_log_steps(order, step_min, step_max))
        frequency, damping = _start(scheme, torch.exp(self.log_step.detach()))
        self.log_frequency = nn.Parameter(torch.log(frequency))
        self.register_parameter("log_damping", None if damping is None else nn.Parameter(torch.log(damping)))
        self.B_velocity = nn.Parameter((2 * torch.rand(order, width) - 1) / math.sqrt(width))
        self.B_position = nn.Parameter(torch.zeros(order, width))
        self.C_velocity = nn.Parameter(torch.zeros(width, order))
        self.C_position = nn.Parameter((2 * torch.rand(width, order) - 1) / math.sqrt(order))
        self.D = nn.Parameter(torch.randn(width))

    def discrete(
        self, dtype: torch.dtype | None = None
    ) -> tuple[Float[Tensor, "2 n"], Float[Tensor, "2 n width"], Float[Tensor, "2 width n"]]:
        """(log λ, B, C) of the recurrence h[t] = λ h[t−1] + B u[t], y[t] = Re(C h[t]) + D u[t]."""
        damping = None if self.log_damping is None else torch.exp(self.log_damping.double())
        step = torch.exp(self.log_step.double())
        log_poles, basis = self.scheme(torch.exp(self.log_frequency.double()), damping, step)
        dtype = self.D.dtype if dtype is None else dtype
        forces = (part.to(dtype) for part in (self.B_velocity, self.B_position, self.C_velocity, self.C_position))
        return log_poles, *modal((step * exponential(log_poles)).to(dtype), basis.to(dtype), *forces)

    def stepper(self, dtype: torch.dtype, *, gain: float = 1.0, scaled: bool = False) -> SystemStepper:
        # κ in half precision would cost digits of C.
        return SystemStepper(*self.discrete(torch.float64), self.D, dtype, gain=gain, scaled=scaled)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.scheme}"


def modal(
    drive: Float[Tensor, "2 *stack n"],
    basis: Float[Tensor, "2 *stack n"],
    B_velocity: Float[Tensor, "*stack n width"],
    B_position: Float[Tensor, "*stack n width"],
    C_velocity: Float[Tensor, "*stack width n"],
    C_position: Float[Tensor, "*stack width n"],
) -> tuple[Float[Tensor, "2 *stack n width"], Float[Tensor, "2 *stack width n"]]:
    """B and C of the modes: Δλ (B_velocity + κ B_position), and C with Re(C h) = C_velocity v + C_position x."""
    re, im = basis
    B = torch.stack([B_velocity + re[..., None] * B_position, im[..., None] * B_position])
    read = (re[..., None, :] * C_velocity - C_position) / im[..., None, :]
    return times(drive[..., None], B), torch.stack([C_velocity, read])


def _start(scheme: Scheme, step: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"] | None]:
    """The paper's a, uniform in (0, 1); with damping a ring of poles 0.9 ≤ |λ| ≤ 0.999 with phases up to π."""
    if not scheme.damped:
        return torch.rand_like(step).clamp_min(1e-6).sqrt(), None
    square = 0.9**2 + torch.rand_like(step) * (0.999**2 - 0.9**2)
    phase = math.pi * torch.rand_like(step).clamp(1e-3, 1 - 1e-3)
    return 2 * torch.tan(phase / 2) / step, (1 / square - 1) / step
