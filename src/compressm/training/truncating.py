"""One cut after training, to each of several orders: what models that were trained whole are compared by."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import get_args

from compressm.compression import TargetOrder, compress_
from compressm.compression.distributed import unwrapped
from compressm.runs.records import SplitName, TruncationRecord
from compressm.saving.rebuilding import orders_of
from compressm.training.building import build_truncation
from compressm.training.config import Recipe
from compressm.training.evaluation import score
from compressm.training.steps import Learner


def truncations(recipe: Recipe, learner: Learner, step: int) -> Iterator[TruncationRecord]:
    """Validation and test of a copy of the model at every order; the model itself stays whole."""
    config = recipe.truncation
    if config is None:
        return
    options = build_truncation(recipe, config, learner.task)
    way = "selective" if recipe.model.layer == "Mamba" else config.gramian
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
