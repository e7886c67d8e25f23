"""Loss and accuracy of a model on a whole split, and of copies of it that are cut."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import NamedTuple, get_args

import torch
from torch import nn

from compressm.compression import TargetOrder, compress_
from compressm.compression.distributed import unwrapped
from compressm.saving.rebuilding import orders_of
from compressm_lab.data.task import Batch, Split, Task
from compressm_lab.runs.records import SplitName, TruncationRecord
from compressm_lab.training.building import batch_on, build_method, build_truncation, only_with_data
from compressm_lab.training.config import Recipe
from compressm_lab.training.steps import Learner, answer_errors, task_objective


class Score(NamedTuple):
    """Loss and accuracy; a regression has instead its squared and absolute error in the units of its targets."""

    loss: float
    accuracy: float | None
    mse: float | None = None
    mae: float | None = None

    @property
    def value(self) -> float:
        """The accuracy, or the loss of a regression."""
        return self.loss if self.accuracy is None else self.accuracy


def evaluate(learner: Learner, split: Split) -> Score:
    """Score a learner's model with the precision of its recipe and the loss of its task."""
    with learner.autocast():
        return score(unwrapped(learner.model), learner.task, split, size=learner.config.evaluation_batch)


def loss_on(learner: Learner, model: nn.Module, split: Split) -> float:
    """The loss of a copy of the learner's model, with the precision of its recipe."""
    with learner.autocast():
        return score(model, learner.task, split, size=learner.config.evaluation_batch).loss


@torch.no_grad()
def score(model: nn.Module, task: Task, split: Split, *, size: int = 500) -> Score:
    """Score a model in evaluation mode, in batches of `size`; its mode is restored."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    batches = (batch_on(device, task, split, some) for some in torch.arange(len(split), device=device).split(size))
    try:
        return (_errors if task.kind.is_regression else _hits)(model, task, batches, device)
    finally:
        model.train(training)


def _hits(model: nn.Module, task: Task, batches: Iterable[Batch], device: torch.device) -> Score:
    """The mean cross-entropy, and the share of right answers."""
    objective, sums = task_objective(task.kind), torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        outcome = objective(model, batch)
        weight = outcome.asked.double()
        sums += torch.stack([outcome.loss.double() * weight, outcome.hits.double(), weight])
    loss, hits, count = sums.tolist()
    return Score(loss / count, hits / count)


def _errors(model: nn.Module, task: Task, batches: Iterable[Batch], device: torch.device) -> Score:
    """The mean squared error as in training, and the squared and the absolute error in the units of the targets."""
    unit = 1 / torch.tensor(task.target_scale, dtype=torch.float64, device=device)
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for batch in batches:
        errors, asked = answer_errors(model, batch)
        own = errors.double() * unit
        sums += torch.stack([errors.double().square().sum(), own.square().sum(), own.abs().sum(), asked.sum().double()])
    loss, squares, sizes, count = sums.tolist()
    return Score(loss / count, None, squares / count, sizes / count)


def truncations(recipe: Recipe, learner: Learner, step: int) -> Iterator[TruncationRecord]:
    """Cut a copy of the model to every order of the recipe and score it on validation and test data."""
    config = recipe.truncation
    if config is None:
        return
    options = build_truncation(recipe, config, learner.task, learner.model)
    if recipe.compression is not None:  # copies are cut as the model was
        options["selective"] = build_method(recipe.compression.selective)
    way = "selective" if only_with_data(learner.model) else config.gramian
    for order in config.orders:
        model = copy.deepcopy(unwrapped(learner.model)).eval()
        cuts = compress_(model, keep=TargetOrder(order), **options)
        bounds = [cut.error_bound for cut in cuts if cut.error_bound is not None]
        mean = fmean(orders_of(model).values())
        for split in get_args(SplitName)[1:]:
            with learner.autocast():
                found = score(model, learner.task, getattr(learner.task, split), size=learner.config.evaluation_batch)
            yield TruncationRecord(step, way, order, mean, max(bounds, default=None), split, *found)
