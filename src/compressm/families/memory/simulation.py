"""Simulation of matrix states on real inputs: outputs, how they change with a cut, and rows fitted to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters.memory import Memory, MemoryAdapter, Steps
from compressm.control.memory import chunks
from compressm.families.fitting import fitted
from compressm.families.observing import Sample, ratio_of, sequences_at_once
from compressm.ops.dispatch import full_precision

# Steps whose products with one another are formed at once.
_CHUNK = 64
# A fit compares outputs in this many random directions of a head's values: on average squared errors are the same.
_DIRECTIONS = 16
# Numbers within these sizes are fitted in float32, in half the time: Adam needs no more.
_SMALLEST, _LARGEST = 1e-12, 1e12


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


def changed_by_eps(
    adapter: MemoryAdapter[Any], module: nn.Module, old: Memory, new: Memory, sample: Sample, eps: float
) -> float:
    """The change of the output of a norm behind the read-out if the module's gain multiplies its input and ε stays.

    y / √(mean y² + ε/g²) in place of y / √(mean y² + ε), relative to the latter, over all heads and steps.
    """
    squares = torch.zeros(2, dtype=torch.float64, device=old.device)
    for x, counts in _parts(adapter, module, old, sample):
        steps = adapter.steps_with(adapter.mapped_steps(module, x, old, counts), module, x, new, counts)
        mean = outputs(steps).square().mean(-1) * counts[:, None, None]
        gain = adapter.output_gain(module, steps.queries).square()[:, :, None]
        wanted = mean.sqrt() / torch.sqrt(mean + eps)
        squares += torch.stack(
            [(mean.sqrt() / torch.sqrt(mean + eps / gain) - wanted).square().sum(), wanted.square().sum()]
        )
    return ratio_of(squares)


def _parts(
    adapter: MemoryAdapter[Any], module: nn.Module, memory: Memory, sample: Sample
) -> Iterator[tuple[Tensor, Tensor]]:
    first = next(iter(sample.sequences.values()), None)
    if first is None:
        return
    heads = adapter.steps(module, first[None, :1].double(), memory).values.shape
    yield from sample.parts(sequences_together(sample.longest, memory, heads[1] * heads[2], heads[-1]))


def fitted_rows(
    adapter: MemoryAdapter[Any], module: nn.Module, full: Memory, start: Memory, sample: Sample, steps: int
) -> Memory:
    """Rows near `start` whose outputs are nearest to those of the full memory on the sample, by `steps` of Adam.

    It computes in float32 at least, also in a cut inside of autocast.
    """
    with full_precision(next(iter(full.keys.values()))):
        return _fitted_rows(adapter, module, full, start, sample, steps)


def _fitted_rows(
    adapter: MemoryAdapter[Any], module: nn.Module, full: Memory, start: Memory, sample: Sample, steps: int
) -> Memory:
    with torch.no_grad():
        parts = [
            (x.to(given.values.dtype), counts, given, outputs(given))
            for x, counts in _parts(adapter, module, full, sample)
            for given in [_condensed(adapter.mapped_steps(module, x, full, counts))]
        ]
    whole = torch.stack([(y * counts[:, None, None, :, None]).square().sum() for _, counts, _, y in parts]).sum()
    if not bool(whole > 0):
        return start
    places = [(part, name) for part, own in enumerate(start.parts) for name in own]

    def rows_of(values: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        found: list[dict[str, Tensor]] = [{}, {}, {}]
        for (part, name), value in zip(places, values, strict=True):
            found[part][name] = value
        return found

    def error(values: Sequence[Tensor], part: tuple[Tensor, Tensor, Steps, Tensor]) -> Tensor:
        x, counts, fixed, target = part
        found = outputs(adapter.steps_with(fixed, module, x, start.with_parts(rows_of(values)), counts))
        return ((found - target) * counts[:, None, None, :, None]).square().sum() / whole

    return start.with_parts(rows_of(fitted([start.parts[part][name] for part, name in places], parts, error, steps)))


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
