"""A random linear system as teacher: white noise in, its outputs to be matched; its order is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from compressm.data.dataset import DataSet, Form
from compressm.data.errors import DataError, require_counts
from compressm.data.fetch import Progress
from compressm.data.shuffling import seeded
from compressm.data.splitting import Splits
from compressm.data.task import Split, TaskKind


class Teacher(NamedTuple):
    """h[t] = λ ⊙ h[t−1] + B u[t], y[t] = Re(C h[t])."""

    poles: Complex[Tensor, " n"]
    B: Complex[Tensor, "n inputs"]
    C: Complex[Tensor, "outputs n"]


@final
@dataclass(frozen=True)
class LTITeacher(DataSet):
    """`order` modes on a ring of the unit disc, at angles up to `angle`; outputs have variance 1 plus `noise`²."""

    order: int = 8
    inputs: int = 1
    outputs: int = 1
    length: int = 256
    smallest_radius: float = 0.8
    largest_radius: float = 0.99
    angle: float = math.pi / 4
    noise: float = 0.0
    examples: int = 8_000
    held_out: int = 1_000
    seed: int = 0

    name = "lti_teacher"

    def __post_init__(self) -> None:
        require_counts(order=self.order, inputs=self.inputs, outputs=self.outputs, length=self.length)
        require_counts(examples=self.examples, held_out=self.held_out)
        if not 0 <= self.smallest_radius <= self.largest_radius < 1:
            raise DataError(
                f"radii {self.smallest_radius} to {self.largest_radius}, expected 0 <= smallest <= largest < 1"
            )
        if self.noise < 0:
            raise DataError(f"noise is {self.noise}, expected at least 0")

    @property
    def form(self) -> Form:
        return Form(length=self.length, classes=self.outputs, kind=TaskKind.REGRESS, channels=self.inputs)

    def teacher(self) -> Teacher:
        """The system that the targets come from; scaled so that white noise gives outputs of variance 1."""
        generator = seeded("lti teacher", self.seed)
        low, high = self.smallest_radius, self.largest_radius
        # Uniform over the ring, as the LRU begins (Orvieto et al. 2023).
        radius = (low**2 + (high**2 - low**2) * torch.rand(self.order, generator=generator, dtype=torch.float64)).sqrt()
        angle = self.angle * torch.rand(self.order, generator=generator, dtype=torch.float64)
        B = torch.randn(self.order, self.inputs, generator=generator, dtype=torch.complex128)
        C = torch.randn(self.outputs, self.order, generator=generator, dtype=torch.complex128)
        teacher = Teacher(torch.polar(radius, angle), B, C)
        # ‖G‖₂² of each output, summed to where every mode has decayed below 1e-16.
        steps = math.ceil(37 / -math.log(high)) + 1 if high > 0 else 1
        power = impulse_response(teacher, min(steps, 100_000)).square().sum(dim=(0, 2))
        return teacher._replace(C=C / power.sqrt()[:, None])

    def parse(self, paths: Sequence[Path], progress: Progress) -> Splits:
        counts, teacher = (self.examples, self.held_out, self.held_out), self.teacher()
        response = torch.fft.rfft(impulse_response(teacher, self.length), n=2 * self.length, dim=0)
        splits = []
        for which, count in zip(Splits._fields, counts, strict=True):
            generator = seeded("lti signals", self.seed, which)
            u = torch.randn(count, self.length, self.inputs, generator=generator)
            y = torch.cat([_filtered(part, response) for part in u.split(500)])
            if self.noise:
                y = y + self.noise * torch.randn(y.shape, generator=generator)
            splits.append(Split(u, y))
        return Splits(*splits)


def impulse_response(teacher: Teacher, length: int) -> Float[Tensor, "{length} outputs inputs"]:
    """Re(C Λᵗ B)."""
    powers = teacher.poles[None] ** torch.arange(length)[:, None]
    return torch.einsum("on,tn,ni->toi", teacher.C, powers, teacher.B).real


def _filtered(
    u: Float[Tensor, "batch length inputs"], response: Complex[Tensor, "frequencies outputs inputs"]
) -> Float[Tensor, "batch length outputs"]:
    length = u.shape[1]
    spectrum = torch.fft.rfft(u.double(), n=2 * length, dim=1)
    y = torch.fft.irfft(torch.einsum("bfi,foi->bfo", spectrum, response), n=2 * length, dim=1)
    return y[:, :length].float()
