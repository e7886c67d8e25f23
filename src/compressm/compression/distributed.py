"""Processes that train together cut together: sums over all of them, the first one's decision, and one fate for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from compressm.errors import CompressionError

Value = TypeVar("Value")


@final
@dataclass(frozen=True)
class Processes:
    """Those of a group, or of all of torch.distributed; without it, this one alone.

    Every method with more than one process is to be called by all of them.
    """

    group: Any = None

    @property
    def count(self) -> int:
        """How many train together."""
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def is_first(self) -> bool:
        """Whether this is the one that decides."""
        return self.count == 1 or dist.get_rank(self.group) == 0

    @property
    def rank(self) -> int:
        """The number of this one, from 0."""
        return 0 if self.count == 1 else dist.get_rank(self.group)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all, a new tensor, the same everywhere."""
        if self.count == 1:
            return tensor
        # NCCL alone sums nothing that is on the CPU.
        only_cuda = dist.get_backend(self.group) == "nccl"
        total = tensor.to(torch.device("cuda") if only_cuda else tensor.device, copy=True).contiguous()
        # Complex sums are not everywhere supported; real pairs are.
        dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total, group=self.group)
        return total.to(tensor.device)

    def as_first(self, value: Value) -> Value:
        """What the first process has; tensors in it have to be on the CPU."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def require_same(self, what: str, value: object) -> None:
        """Refuse on all of them what is not the same on all."""
        for number, other in enumerate(self._gathered(value)):
            if other != value:
                raise CompressionError(f"{what}: {value!r:.200} here, {other!r:.200} in process {number}")

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """What is done inside succeeds on all processes, or all of them raise; none waits for one that failed."""
        if self.count == 1:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            # Raised again below, when all know of it.
            failure = error
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        results = self._gathered(said)
        if failure is not None:
            raise failure
        failed = [f"process {number} failed while {doing}: {other}" for number, other in enumerate(results) if other]
        if failed:
            raise CompressionError("; ".join(failed))

    def _gathered(self, value: object) -> list[Any]:
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values
