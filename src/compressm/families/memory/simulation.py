"""Simulation of matrix states on real inputs: outputs, how they change with a cut, and rows fitted to them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters.memory import Memory, MemoryAdapter, Steps
from compressm.control.memory import chunks
from compressm.families.observing import Sample, sequences_at_once

# Steps whose products with one another are formed at once.
_CHUNK = 64
# The first step length of Adam relative to the size of the rows; it falls to zero as a cosine.
_RATE = 0.03
# A fit compares outputs in this many random directions of a head's values: on average squared errors are the same.
_DIRECTIONS = 16
# Numbers within these sizes are fitted in float32, in half the time: Adam needs no more.
_SMALLEST, _LARGEST = 1e-12, 1e12
# One of so many sequences tells whether a fit is better than its start.
_HELD_OUT = 4


def outputs(steps: Steps) -> Float[Tensor, "batch bank heads length p"]:
    """o[t] = S[t]ᵀ q[t] for all steps: within a chunk (Q Kᵀ ∘ D) V, plus what the state before it gives."""
    steps = steps.written
    state = steps.values.new_zeros(*steps.values.shape[:3], steps.keys.shape[-1], steps.values.shape[-1])
    found = []
    for part, decays in chunks(steps.log_decay, steps.log_gates):
        q, k = (x[:, :, None, part] for x in (steps.queries, steps.keys))
        v = steps.values[..., part, :]
        found.append(decays.products(q, k) @ v + decays.read(q, state))
        state = decays.state_after(state, k, v)
    return torch.cat(found, dim=-2)


def sequences_together(steps_per_sequence: int, memory: Memory, heads: int, width: int) -> int:
    """The number of sequences to simulate at once; `heads` of `width` values each."""
    return sequences_at_once(steps_per_sequence, 2 * memory.bank * memory.order + heads * (width + _CHUNK))


def squared_change(
    adapter: MemoryAdapter[Any], module: nn.Module, old: Memory, new: Memory, sample: Sample, unit: Tensor | float = 1.0
) -> Float[Tensor, "2"]:
    """‖o_new − o_old‖² and ‖o_old‖² of the read-out, scaled up to all observed steps; outputs are divided by `unit`."""
    squares = torch.zeros(2, dtype=torch.float64, device=old.device)
    for x, counts in _parts(adapter, module, old, sample):
        steps = adapter.mapped_steps(module, x, old, counts)
        both = (steps, adapter.steps_with(steps, module, x, new, counts))
        before, after = (outputs(one) / unit * counts[:, None, None, :, None] for one in both)
        squares += torch.stack([(after - before).square().sum(), before.square().sum()])
    return squares * sample.weight


def _parts(
    adapter: MemoryAdapter[Any], module: nn.Module, memory: Memory, sample: Sample
) -> Iterator[tuple[Tensor, Tensor]]:
    first = next(iter(sample.sequences.values()), None)
    if first is None:
        return
    heads = adapter.steps(module, first[None, :1].double(), memory).values.shape
    yield from sample.parts(sequences_together(sample.longest, memory, heads[1] * heads[2], heads[-1]))


def halves(sample: Sample) -> tuple[Sample, Sample]:
    """The sequences to fit to, and those that judge the fit; both are the whole sample if it has too few."""
    numbered = list(sample.sequences.items())
    if len(numbered) < _HELD_OUT:
        return sample, sample
    judging = dict(numbered[_HELD_OUT - 1 :: _HELD_OUT])
    fitting = {number: sequence for number, sequence in numbered if number not in judging}
    return tuple(Sample(part, sample.count, sample.steps, sample.longest) for part in (fitting, judging))  # type: ignore[return-value]


def fitted_rows(
    adapter: MemoryAdapter[Any], module: nn.Module, full: Memory, start: Memory, sample: Sample, steps: int
) -> Memory:
    """Rows near `start` whose outputs are nearest to those of the full memory on the sample, by `steps` of Adam."""
    with torch.no_grad():
        parts = [
            (x.to(given.values.dtype), counts, given, outputs(given))
            for x, counts in _parts(adapter, module, full, sample)
            for given in [_condensed(adapter.mapped_steps(module, x, full, counts))]
        ]
    whole = torch.stack([(y * counts[:, None, None, :, None]).square().sum() for _, counts, _, y in parts]).sum()
    if not bool(whole > 0):
        return start
    rows = [{name: value.detach().clone().requires_grad_() for name, value in part.items()} for part in start.parts]
    own = [value for part in rows for value in part.values()]
    groups = [{"params": [value], "lr": _RATE * float(value.detach().square().mean().sqrt())} for value in own]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: (1 + math.cos(math.pi * k / steps)) / 2)
    for _ in range(steps):
        total = [torch.zeros_like(value) for value in own]
        for x, counts, fixed, target in parts:
            with torch.enable_grad():
                found = outputs(adapter.steps_with(fixed, module, x, start.with_parts(rows), counts))
                loss = ((found - target) * counts[:, None, None, :, None]).square().sum() / whole
            # Not backward(), which would also fill the gradients of the module.
            total = [one + more for one, more in zip(total, torch.autograd.grad(loss, own), strict=True)]
        for value, gradient in zip(own, total, strict=True):
            value.grad = gradient
        optimizer.step()
        schedule.step()
    return start.with_parts([{name: value.detach() for name, value in part.items()} for part in rows])


def _condensed(steps: Steps) -> Steps:
    """The steps with few random mixtures of a head's values, in float32 if their sizes allow: outputs are as linear."""
    width = steps.values.shape[-1]
    if width > _DIRECTIONS:
        mixtures = torch.randn(
            width, _DIRECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu"
        )
        steps = replace(steps, values=steps.values @ (mixtures / _DIRECTIONS**0.5).to(steps.values))
    sizes = torch.stack([part.abs().amax() for part in (steps.queries, steps.keys, steps.values)])
    if not bool(((sizes > _SMALLEST) & (sizes < _LARGEST)).all()):
        return steps
    return Steps(*(None if part is None else part.float() for part in vars(steps).values()))  # type: ignore[arg-type]
