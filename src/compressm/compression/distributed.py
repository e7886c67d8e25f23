"""Processes that train together cut together: sums over all of them, and one decision for all."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")


def processes() -> int:
    """How many train together; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def summed_over_processes(tensor: Tensor) -> Tensor:
    """A new tensor, the same on all."""
    if processes() == 1:
        return tensor
    total = tensor.clone().contiguous()
    # Complex sums are not everywhere supported; real pairs are.
    dist.all_reduce(total if not total.is_complex() else total.view(total.real.dtype))
    return total


def as_first_process(value: Value) -> Value:
    """What the first process has, on every process."""
    if processes() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def broadcast_from_first(tensor: Tensor) -> Tensor:
    """The first process's values in a tensor that has the same shape on all."""
    if processes() == 1:
        return tensor
    shared = tensor.clone().contiguous()
    dist.broadcast(shared if not shared.is_complex() else shared.view(shared.real.dtype), src=0)
    return shared
