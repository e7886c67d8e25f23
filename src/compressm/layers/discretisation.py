"""Discretisation of continuous-time modes, and complex arithmetic on real pairs, (re, im) on the first axis."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from compressm.ops import SequenceError


def times(x: Float[Tensor, "2 ..."], y: Float[Tensor, "2 ..."]) -> Float[Tensor, "2 ..."]:
    """The complex product x y; the other axes broadcast."""
    return torch.stack([x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]])


def exponential(x: Float[Tensor, "2 *modes"]) -> Float[Tensor, "2 *modes"]:
    """eˣ."""
    return torch.exp(x[0]) * torch.stack([torch.cos(x[1]), torch.sin(x[1])])


class Discretisation(ABC):
    """A rule that samples a continuous-time mode at steps of Δ; |λ| < 1 whenever Re a < 0."""

    @abstractmethod
    def __call__(
        self, a: Float[Tensor, "2 *modes"], step: Float[Tensor, "*modes"]
    ) -> tuple[Float[Tensor, "2 *modes"], Float[Tensor, "2 *modes"]]:
        """((log |λ|, arg λ), s) of every mode: its discrete pole λ and the factor s of its input."""


@final
@dataclass(frozen=True)
class ZOH(Discretisation):
    """Zero-order hold, the input is constant over each step: λ = exp(Δa), s = (λ − 1) / a."""

    def __call__(
        self, a: Float[Tensor, "2 *modes"], step: Float[Tensor, "*modes"]
    ) -> tuple[Float[Tensor, "2 *modes"], Float[Tensor, "2 *modes"]]:
        log_poles = step * a
        decay, phase = log_poles
        # λ − 1 is summed from small parts: the plain difference loses log₁₀ 1/|Δa| digits, three at Δ = 1e-3.
        gap_re = torch.expm1(decay) * torch.cos(phase) - 2 * torch.sin(phase / 2) ** 2
        gap_im = torch.exp(decay) * torch.sin(phase)
        size = torch.hypot(a[0], a[1])
        return log_poles, times(torch.stack([gap_re, gap_im]) / size, torch.stack([a[0], -a[1]]) / size)


@final
@dataclass(frozen=True)
class Bilinear(Discretisation):
    """The trapezoidal rule: λ = (1 + Δa/2) / (1 − Δa/2), s = Δ / (1 − Δa/2)."""

    def __call__(
        self, a: Float[Tensor, "2 *modes"], step: Float[Tensor, "*modes"]
    ) -> tuple[Float[Tensor, "2 *modes"], Float[Tensor, "2 *modes"]]:
        x, y = step * a
        square = (1 - x / 2) ** 2 + (y / 2) ** 2  # |1 − Δa/2|²; |1 + Δa/2|² is larger by 2x
        # Δa = −2 gives the pole 0, whose logarithm times 0 would be NaN: one rounding away the pole is 1.5e-8.
        ratio = (2 * x / square).clamp_min(-1 + torch.finfo(x.dtype).eps)
        log_poles = torch.stack([torch.log1p(ratio) / 2, torch.atan2(y, 1 - (x * x + y * y) / 4)])
        return log_poles, torch.stack([step * (1 - x / 2), step * y / 2]) / square


def require_discretisation(discretisation: Discretisation) -> Discretisation:
    """Require a rule object, not its name or class."""
    if not isinstance(discretisation, Discretisation):
        raise SequenceError(f"discretisation is {discretisation!r}, expected an object such as ZOH() or Bilinear()")
    return discretisation


def random_log_steps(count: int, step_min: float, step_max: float) -> Float[Tensor, " count"]:
    """Random log Δ, uniform between log step_min and log step_max."""
    numbers = all(isinstance(step, Real) and not isinstance(step, bool) for step in (step_min, step_max))
    if not numbers or not 0 < step_min < step_max < math.inf:
        raise SequenceError(f"step_min is {step_min!r} and step_max {step_max!r}, expected 0 < step_min < step_max")
    low, high = math.log(step_min), math.log(step_max)
    return low + (high - low) * torch.rand(count)
