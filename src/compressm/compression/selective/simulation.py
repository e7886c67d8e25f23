"""A selective system on real inputs: its states step by step, its outputs, and those of another beside them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from compressm.compression.sample import Sample, sequences_at_once
from compressm.control.selective import SelectiveSystem
from compressm.ops.selective_scan import selective_scan

# Numbers that a scan holds at once for each state: it, its B and C where channels have their own, all of them pairs.
_PER_STATE = 4


def states(system: SelectiveSystem, u: Float[Tensor, "batch length channels"]) -> Iterator[Tensor]:
    """h[0], h[1], … of shape (batch, channels, n)."""
    delta, B, _ = system.selected(u)
    h: Tensor | float = 0.0
    for t in range(u.shape[1]):
        b = _of_channels(system, B[:, t])
        h = torch.exp(delta[:, t, :, None] * system.rates) * h + (delta[:, t] * u[:, t])[..., None] * b
        yield h


def _of_channels(system: SelectiveSystem, B: Float[Tensor, "batch m"]) -> Tensor:
    """(batch, channels or 1, n)."""
    if system.maps is None:
        return B[:, None]
    return torch.einsum("cnm,bm->bcn", system.maps.B, B.to(system.maps.B.dtype))


def outputs(system: SelectiveSystem, u: Float[Tensor, "batch length channels"]) -> Tensor:
    """Re(C h), what the scan gives without skip and gate.

    On a GPU in float32, by the kernels that train: they have no float64, and without them it is a loop over time.
    """
    chosen = (_for_kernels(part) for part in (u, *system.selected(u)))
    u, delta, B, C = chosen
    rates = _for_kernels(system.rates)
    if system.maps is None:
        y, _ = selective_scan(u, delta, rates, B, C, keep_state=False)
        return y.double()
    maps = [_for_kernels(part) for part in (system.maps.B, system.maps.C.mT)]
    B, C = (torch.einsum("cnm,blm->blcn", rows, x.to(rows.dtype)) for rows, x in zip(maps, (B, C), strict=True))
    if rates.is_complex():
        rates = torch.stack([rates.real, rates.imag])
        B, C = torch.stack([B.real, B.imag], dim=-2), torch.stack([C.real, C.imag], dim=-2)
    y, _ = selective_scan(u, delta, rates, B, C, orders=system.maps.orders, keep_state=False)
    return y.double()


def _for_kernels(part: Tensor) -> Tensor:
    """In single precision on a GPU."""
    if not part.is_cuda:
        return part
    return part.to(torch.complex64 if part.is_complex() else torch.float32)


def _at_once(system: SelectiveSystem, length: int) -> int:
    """Sequences: kernels keep no states, so that only a B and a C of every channel take room on a GPU."""
    held = system.channels if system.rates.is_cuda and system.maps is None else system.rates.numel()
    return sequences_at_once(length, _PER_STATE * held)


def squared_change(old: SelectiveSystem, new: SelectiveSystem, sample: Sample) -> Float[Tensor, "2"]:
    """‖y_new − y_old‖² and ‖y_old‖², scaled up to all steps that were seen: they can be summed over processes."""
    squares = torch.zeros(2, dtype=torch.float64, device=old.device)
    for u, counts in sample.parts(min(_at_once(system, sample.longest) for system in (old, new))):
        before, after = (outputs(system, u) * counts[..., None] for system in (old, new))
        squares += torch.stack([(after - before).square().sum(), before.square().sum()])
    return squares * sample.weight
