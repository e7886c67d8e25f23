"""Tasks that are made, not fetched: delayed copy, and the outputs of a random linear system."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from compressm_lab.data.dataset import DataSet, Form
from compressm_lab.data.files import Progress
from compressm_lab.data.task import IGNORED, DataError, Split, Splits, TaskKind, require_counts, seeded

BLANK, GO = 0, 1  # symbols begin at 2


@final
@dataclass(frozen=True)
class DelayedCopy(DataSet):
    """Show `copied` symbols, then `delay` blanks, then ask at every GO for the next of the symbols."""

    symbols: int = 8
    copied: int = 10
    delay: int = 100
    examples: int = 10_000
    held_out: int = 1_000
    seed: int = 0

    name = "delayed_copy"
    version = 2

    def __post_init__(self) -> None:
        require_counts(2, symbols=self.symbols)
        require_counts(copied=self.copied, examples=self.examples, held_out=self.held_out)
        require_counts(0, delay=self.delay)
        # A power of more than 64 is larger than any number of examples, and may take for ever to compute.
        wanted, there = self.examples + 2 * self.held_out, self.symbols ** min(self.copied, 64)
        # Half of all messages: more, and drawing them without repetition takes its time.
        if 2 * wanted > there:
            raise DataError(
                f"{wanted} examples of {self.copied} out of {self.symbols} symbols: there are {there}, "
                f"expected at most half of them, so that splits are disjoint"
            )

    @property
    def form(self) -> Form:
        length = 2 * self.copied + self.delay
        return Form(length=length, classes=self.symbols, kind=TaskKind.LABEL_STEPS, vocabulary=self.symbols + 2)

    def parse(self, paths: Sequence[Path], progress: Progress) -> Splits:
        counts = (self.examples, self.held_out, self.held_out)
        messages = self._messages(sum(counts))
        # Two bytes a token where they are enough.
        kind = torch.int16 if self.symbols + 2 <= 2**15 else torch.int64
        inputs = torch.full((sum(counts), self.form.length), BLANK, dtype=kind)
        inputs[:, : self.copied] = messages + 2
        inputs[:, -self.copied :] = GO
        targets = torch.full(inputs.shape, IGNORED)
        targets[:, -self.copied :] = messages
        return Splits(*map(Split, inputs.split(counts), targets.split(counts)))

    def _messages(self, count: int) -> Tensor:
        """Messages that all differ, so that no split holds a message of another."""
        generator, found = seeded("delayed copy", self.seed), torch.empty(0, self.copied, dtype=torch.int64)
        while len(found) < count:
            drawn = torch.randint(self.symbols, (count, self.copied), generator=generator)
            found = torch.cat([found, drawn]).unique(dim=0)
        return found[torch.randperm(len(found), generator=generator)[:count]]


class TeacherSystem(NamedTuple):
    """The system h[t] = λ ⊙ h[t−1] + B u[t], y[t] = Re(C h[t])."""

    poles: Complex[Tensor, " n"]
    B: Complex[Tensor, "n inputs"]
    C: Complex[Tensor, "outputs n"]


@final
@dataclass(frozen=True)
class LTITeacher(DataSet):
    """Outputs of `order` modes on a ring of the unit disc, at angles up to `angle`; variance 1 plus `noise`²."""

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
    version = 2

    def __post_init__(self) -> None:
        require_counts(order=self.order, inputs=self.inputs, outputs=self.outputs, length=self.length)
        require_counts(examples=self.examples, held_out=self.held_out)
        if not 0 <= self.smallest_radius <= self.largest_radius < 1:
            raise DataError(
                f"radii {self.smallest_radius} to {self.largest_radius}, expected 0 <= smallest <= largest < 1"
            )
        if not 0 <= self.noise < math.inf:
            raise DataError(f"noise is {self.noise}, expected a finite number of at least 0")
        if not math.isfinite(self.angle):
            raise DataError(f"angle is {self.angle}, expected a finite number")

    @property
    def form(self) -> Form:
        return Form(length=self.length, classes=self.outputs, kind=TaskKind.REGRESS, channels=self.inputs)

    def teacher(self) -> TeacherSystem:
        """The system that the targets come from, scaled so that white noise gives outputs of variance 1."""
        generator = seeded("lti teacher", self.seed)
        low, high = self.smallest_radius, self.largest_radius
        # Uniform over the ring, as the LRU begins (Orvieto et al. 2023).
        radius = (low**2 + (high**2 - low**2) * torch.rand(self.order, generator=generator, dtype=torch.float64)).sqrt()
        angle = self.angle * torch.rand(self.order, generator=generator, dtype=torch.float64)
        B = torch.randn(self.order, self.inputs, generator=generator, dtype=torch.complex128)
        C = torch.randn(self.outputs, self.order, generator=generator, dtype=torch.complex128)
        teacher = TeacherSystem(torch.polar(radius, angle), B, C)
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


def impulse_response(teacher: TeacherSystem, length: int) -> Float[Tensor, "{length} outputs inputs"]:
    """The response Re(C Λᵗ B) at t = 0, 1, …"""
    powers = teacher.poles.new_ones(length, len(teacher.poles))
    powers[1:] = teacher.poles ** torch.arange(1, length)[:, None]  # a complex 0⁰ is no number
    return torch.einsum("on,tn,ni->toi", teacher.C, powers, teacher.B).real


def _filtered(
    u: Float[Tensor, "batch length inputs"], response: Complex[Tensor, "frequencies outputs inputs"]
) -> Float[Tensor, "batch length outputs"]:
    length = u.shape[1]
    spectrum = torch.fft.rfft(u.double(), n=2 * length, dim=1)
    y = torch.fft.irfft(torch.einsum("bfi,foi->bfo", spectrum, response), n=2 * length, dim=1)
    return y[:, :length].float()
