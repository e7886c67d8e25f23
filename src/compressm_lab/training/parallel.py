"""Data-parallel processes, started by torchrun: each learns from its share of every batch, the first one writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compressm.compression.distributed import Processes
from compressm_lab.training.config import ConfigError, Recipe


@contextmanager
def process_group(device: torch.device) -> Iterator[torch.device]:
    """A context that joins the processes of torchrun, each on a GPU of its own; without torchrun it does nothing."""
    if "LOCAL_RANK" not in os.environ or dist.is_initialized():
        yield device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def distributed(model: nn.Module, recipe: Recipe, processes: Processes) -> nn.Module:
    """The model, wrapped if there are several processes; a batch that they cannot share evenly is refused."""
    if processes.count == 1:
        return model
    batch = recipe.training.batch
    if batch % processes.count:
        raise ConfigError(f"training.batch is {batch}, expected a multiple of the {processes.count} processes")
    return DistributedDataParallel(model)


def any_of(processes: Processes, flag: bool) -> bool:
    """Tell if the flag is set in any of the processes, so that all stop together."""
    return flag if processes.count == 1 else bool(processes.total(torch.tensor(float(flag))) > 0)


def join(processes: Processes, seed: int, step: int) -> None:
    """Give every process but the first random numbers of its own, for dropout."""
    if processes.index:
        torch.manual_seed(hash((seed, step, processes.index)) % 2**31)
