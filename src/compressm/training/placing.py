"""Data in the memory of the device where it fits there, and otherwise batch by batch."""

from __future__ import annotations

import torch
from torch import Tensor

from compressm.data.task import Batch, Split, Task

_SHARE = 0.5  # of what is free on a GPU: the rest is for model, gradients and activations


def placed(task: Task, device: torch.device) -> Task:
    """On the device, or as it was where a GPU has no room for it."""
    if device.type == "cuda" and not fits(task, torch.cuda.mem_get_info(device)[0]):
        return task
    return task.to(device)


def fits(task: Task, free: int) -> bool:
    """Whether so many free bytes leave room beside all splits."""
    return sum(split.bytes for split in (task.train, task.validation, task.test)) <= _SHARE * free


def batch_on(device: torch.device, task: Task, split: Split, indices: Tensor) -> Batch:
    """The examples, on the device; nothing is copied where they are there already."""
    home = split.inputs.device
    batch = task.batch(split, indices.to(home))
    if home == device:
        return batch
    return Batch(*(None if part is None else part.to(device, non_blocking=True) for part in batch))  # type: ignore[arg-type]
