"""Fits of reduced layers to the outputs that they had, on a sample of their inputs, by steps of Adam."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from compressm.families.observing import Sample

Part = TypeVar("Part")

# The first step length of Adam relative to the size of a tensor; it falls to zero as a cosine.
_RATE = 0.03
# One of so many sequences tells whether a fit is better than its start.
_HELD_OUT = 4


def halves(sample: Sample) -> tuple[Sample, Sample]:
    """The sequences to fit to, and those that judge the fit; both are the whole sample if it has too few."""
    numbered = list(sample.sequences.items())
    if len(numbered) < _HELD_OUT:
        return sample, sample
    judging = dict(numbered[_HELD_OUT - 1 :: _HELD_OUT])
    fitting = {number: sequence for number, sequence in numbered if number not in judging}
    return tuple(Sample(part, sample.count, sample.steps, sample.longest) for part in (fitting, judging))  # type: ignore[return-value]


def fitted(
    start: Sequence[Tensor], parts: Sequence[Part], error: Callable[[Sequence[Tensor], Part], Tensor], steps: int
) -> list[Tensor]:
    """Tensors near `start` with a small sum of errors over the parts, after `steps` of Adam."""
    own = [value.detach().clone().requires_grad_() for value in start]
    groups = [{"params": [value], "lr": _RATE * float(value.detach().square().mean().sqrt())} for value in own]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: (1 + math.cos(math.pi * k / steps)) / 2)
    for _ in range(steps):
        total = [torch.zeros_like(value) for value in own]
        for part in parts:
            with torch.enable_grad():
                found = error(own, part)
            # Not backward(), which would also fill the gradients of the module.
            total = [one + more for one, more in zip(total, torch.autograd.grad(found, own), strict=True)]
        for value, gradient in zip(own, total, strict=True):
            value.grad = gradient
        optimizer.step()
        schedule.step()
    return [value.detach() for value in own]
