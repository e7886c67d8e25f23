"""Loss and accuracy of a whole split, without dropout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from compressm.compression.distributed import unwrapped
from compressm.data.task import Split, Task, TaskKind
from compressm.training.objective import task_objective
from compressm.training.placing import batch_on
from compressm.training.steps import Learner


class Score(NamedTuple):
    """Accuracy is None where the task is a regression."""

    loss: float
    accuracy: float | None

    @property
    def value(self) -> float:
        """The accuracy, or the loss where there is none."""
        return self.loss if self.accuracy is None else self.accuracy


def evaluate(learner: Learner, split: Split) -> Score:
    """As the recipe computes, whatever the objective of training is."""
    with learner.autocast():
        return score(unwrapped(learner.model), learner.task, split, size=learner.config.evaluation_batch)


@torch.no_grad()
def score(model: nn.Module, task: Task, split: Split, *, size: int = 500) -> Score:
    """In evaluation mode; the mode is as it was afterwards."""
    objective, training = task_objective(task.kind), model.training
    model.eval()
    device = next(model.parameters()).device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    try:
        for indices in torch.arange(len(split), device=device).split(size):
            outcome = objective(model, batch_on(device, task, split, indices))
            weight = outcome.asked.double()
            sums += torch.stack([outcome.loss.double() * weight, outcome.hits.double(), weight])
    finally:
        model.train(training)
    loss, hits, count = sums.tolist()
    return Score(loss / count, None if task.kind is TaskKind.REGRESS else hits / count)
