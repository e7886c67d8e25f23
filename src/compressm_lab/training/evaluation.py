"""Loss and accuracy of a whole split, without dropout."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple, get_args

import torch
from torch import nn

from compressm.compression import TargetOrder, compress_
from compressm.compression.distributed import unwrapped
from compressm.saving.rebuilding import orders_of
from compressm_lab.data.task import Split, Task, TaskKind
from compressm_lab.runs.records import SplitName, TruncationRecord
from compressm_lab.training.building import batch_on, build_truncation
from compressm_lab.training.config import Recipe
from compressm_lab.training.layers import needs_data
from compressm_lab.training.steps import Learner, task_objective


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


def truncations(recipe: Recipe, learner: Learner, step: int) -> Iterator[TruncationRecord]:
    """Validation and test of a copy of the model at every order; the model itself stays whole."""
    config = recipe.truncation
    if config is None:
        return
    options = build_truncation(recipe, config, learner.task)
    way = "selective" if needs_data(recipe.model.layer) else config.gramian
    for order in config.orders:
        model = copy.deepcopy(unwrapped(learner.model)).eval()
        cuts = compress_(model, keep=TargetOrder(order), **options)
        bounds = [cut.error_bound for cut in cuts if cut.error_bound is not None]
        orders = orders_of(model).values()
        for split in get_args(SplitName)[1:]:
            with learner.autocast():
                found = score(model, learner.task, getattr(learner.task, split), size=learner.config.evaluation_batch)
            yield TruncationRecord(
                step,
                way,
                order,
                sum(orders) / len(orders),
                max(bounds, default=None),
                split,
                found.loss,
                found.accuracy,
            )
