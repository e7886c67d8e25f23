"""What is minimised and counted, by the kind of a task."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from compressm.data.task import IGNORED, Batch, Task, TaskKind


class Outcome(NamedTuple):
    """Of one batch: the mean loss, how many answers were right, and of how many."""

    loss: Tensor
    hits: Tensor
    asked: Tensor


# From a model and a batch to what is minimised: a comparison with other methods brings its own.
Objective = Callable[[nn.Module, Batch], Outcome]


@runtime_checkable
class Prepared(Protocol):
    """An objective with something to do before the first step, as asking a teacher about all examples."""

    def prepare(self, task: Task, device: torch.device, autocast: AbstractContextManager[object]) -> None:
        """Within `autocast` the models compute as in training."""


def task_objective(kind: TaskKind) -> Objective:
    """Cross-entropy of the classes, at the end or at every step that is asked for; mean squared error of signals."""
    return {TaskKind.CLASSIFY: _classify, TaskKind.LABEL_STEPS: _label_steps, TaskKind.REGRESS: _regress}[kind]


def _classify(model: nn.Module, batch: Batch) -> Outcome:
    logits = model(batch.inputs, batch.lengths).float()
    count = torch.full((), len(logits), device=logits.device)
    return Outcome(functional.cross_entropy(logits, batch.targets), _hits(logits, batch.targets), count)


def _label_steps(model: nn.Module, batch: Batch) -> Outcome:
    logits = model(batch.inputs, batch.lengths).float()
    loss = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
    return Outcome(loss, _hits(logits, batch.targets), (batch.targets != IGNORED).sum())


def _regress(model: nn.Module, batch: Batch) -> Outcome:
    loss = functional.mse_loss(model(batch.inputs, batch.lengths).float(), batch.targets)
    return Outcome(loss, torch.zeros((), device=loss.device), torch.full((), len(batch.targets), device=loss.device))


def _hits(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.detach().argmax(-1) == targets).sum()
