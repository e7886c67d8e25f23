"""Trained Mamba models cut once, in every way: what changes at once, and what is left of it 200 steps later?"""

from __future__ import annotations

import copy
import multiprocessing
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import nn

from command import Progress, run, silent
from compressm.compression import (
    Baked,
    CompressionError,
    Measured,
    PerChannel,
    Random,
    SharedIndex,
    TargetOrder,
    WhiteNoise,
    compress_,
)
from compressm_lab.data import DataSet, DelayedCopy, Digits, Order, Store, Task
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.training import ModelConfig, TrainingConfig
from compressm_lab.training.building import build_model, build_optimizer
from compressm_lab.training.evaluation import Score, score
from compressm_lab.training.steps import Learner, task_objective


@dataclass(frozen=True)
class TrainedModel:
    """A model, its data, and the steps of its training before the cut and after it."""

    name: str
    data: DataSet
    pooling: Literal["last", "steps"]
    steps: int
    more: int = 200
    depth: int = 2
    width: int = 16
    order: int = 32
    learning_rate: float = 5e-3
    batch: int = 50

    def learner(self, task: Task, seed: int) -> Learner:
        """Make a learner with a new model."""
        torch.manual_seed(seed)
        model = build_model(
            ModelConfig(
                layer="Mamba",
                depth=self.depth,
                width=self.width,
                order=self.order,
                norm="rms",
                dropout=0.0,
                dropout_form="element",
                pooling=self.pooling,
            ),
            task,
        )
        config = TrainingConfig(
            steps=self.steps + self.more,
            batch=self.batch,
            learning_rate=self.learning_rate,
            weight_decay=0.01,
            clip=1.0,
        )
        optimizer = build_optimizer(model, config, torch.device("cpu"))
        order = Order(len(task.train), self.batch, seed)
        return Learner(model, optimizer, task_objective(task.kind), task, order, config)


SETTINGS = (
    TrainedModel("delayed copy, 24 steps", DelayedCopy(copied=8, delay=8, examples=4000), "steps", steps=1500),
    TrainedModel("digits, 64 steps", Digits(), "last", steps=600),
)
QUICK = (
    TrainedModel(
        "delayed copy, 12 steps",
        DelayedCopy(copied=4, delay=4, examples=400, held_out=100),
        "steps",
        *(60, 10),
        depth=1,
        width=4,
        order=8,
    ),
)
SHARES = (2, 4, 8)
_CALIBRATION_BATCHES = 4


def ways(seed: int) -> dict[str, Mapping[str, Any]]:
    """Options of `compress_` by way; the first is the paper's."""
    return {
        "per channel, means": {"selective": PerChannel("mean")},
        "per channel, means, symmetric": {"selective": PerChannel("mean", two_sided=False)},
        "per channel, second moments": {"selective": PerChannel("second_moment")},
        "per channel, measured": {"selective": PerChannel("measured"), "gramian": Measured()},
        "baked": {"selective": Baked()},
        "baked, measured": {"selective": Baked(), "gramian": Measured(_CALIBRATION_BATCHES)},
        "baked, two-sided": {"selective": Baked(two_sided=True)},
        "baked, refitted": {"selective": Baked(refit=True)},
        "states": {"selective": SharedIndex()},
        "states, refitted": {"selective": SharedIndex(refit=True)},
        "random states": {"selective": SharedIndex(), "select": Random(seed)},
    }


def measure_selective_cuts(
    *,
    seeds: int = 3,
    quick: bool = False,
    progress: Progress = silent,
    settings: Iterable[TrainedModel] | None = None,
    processes: int = 1,
) -> Measurement:
    """Measure one row a model, way and order: the change of outputs, and accuracy after the cut and steps later."""
    models = [(setting, seed) for setting in settings or (QUICK if quick else SETTINGS) for seed in range(seeds)]
    if processes == 1:
        found = [measure_model(*model, progress) for model in models]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            found = list(pool.map(measure_model, *zip(*models, strict=True), repeat(progress)))
    rows = [row for rows in found for row in rows]
    return Measurement("selective_cuts", "Mamba layers right after one cut, and later", seeds, rows)


def measure_model(setting: TrainedModel, seed: int, progress: Progress = silent) -> list[Row]:
    """Measure all rows of one model."""
    return cut_in_every_way(setting, trained(setting, load(setting.data), seed), seed, progress)


def trained(setting: TrainedModel, task: Task, seed: int) -> Learner:
    """Train a learner for all steps before the cut; the random state outside is not changed."""
    with torch.random.fork_rng(devices=[]):
        learner = setting.learner(task, seed)
        learn(learner, 1, setting.steps)
    return learner


def learn(learner: Learner, first: int, last: int) -> Score:
    """Train from step `first` to `last`; returns the test score then."""
    learner.model.train()
    for step in range(first, last + 1):
        learner.learn(learner.order.at(step))
    return score(learner.model, learner.task, learner.task.test)


def cut_in_every_way(setting: TrainedModel, learner: Learner, seed: int, progress: Progress = silent) -> list[Row]:
    """Cut copies of one model in every way and train on, on the same batches as a copy without a cut."""
    steps = (setting.steps + 1, setting.steps + setting.more)
    before = score(learner.model, learner.task, learner.task.test)
    uncut = learn(_copied(learner), *steps)
    progress(f"{setting.name}, seed {seed}: {before.value:.3f}, without a cut {uncut.value:.3f} later")
    rows: list[Row] = []
    for rank in (setting.order // share for share in SHARES):
        for way, options in ways(seed).items():
            other = _copied(learner)
            try:
                error = cut(other, rank, options)
            except CompressionError as refusal:
                progress(f"{setting.name}, seed {seed}: {way} to {rank} refused: {refusal}")
                continue
            now, later = score(other.model, other.task, other.task.test), learn(other, *steps)
            progress(f"{setting.name}, seed {seed}: {way} to {rank}: {error:.3f}, {now.value:.3f}, {later.value:.3f}")
            row: Row = {"setting": setting.name, "seed": seed, "way": way, "order": setting.order, "rank": rank}
            rows.append(row | {"error": error, "accuracy": now.value, "accuracy_later": later.value})
    common: Row = {"more": setting.more, "full_accuracy": before.value, "full_later": uncut.value, "device": "cpu"}
    return [row | common for row in rows]


def cut(learner: Learner, rank: int, options: Mapping[str, Any]) -> float:
    """Cut a learner's model in place; returns the relative change of layer outputs, as the mean over layers."""
    batches = Order(len(learner.task.train), learner.config.batch, seed=0)

    def calibrate(model: nn.Module) -> None:
        for step in range(1, _CALIBRATION_BATCHES + 1):
            batch = learner.task.batch(learner.task.train, batches.at(step))
            model(batch.inputs, batch.lengths)

    options = {"gramian": WhiteNoise(), **options}
    cuts = compress_(learner.model, keep=TargetOrder(rank), optimizer=learner.optimizer, calibrate=calibrate, **options)
    return fmean(found.measured_error for found in cuts if found.measured_error is not None)


def _copied(learner: Learner) -> Learner:
    """Copy a learner with its model and the optimizer of that model."""
    model, optimizer = copy.deepcopy((learner.model, learner.optimizer))
    return Learner(model, optimizer, learner.objective, learner.task, learner.order, learner.config)


def load(data: DataSet) -> Task:
    """Load data that need no files."""
    with tempfile.TemporaryDirectory() as folder:
        return data.load(Store(Path(folder), offline=True))


if __name__ == "__main__":
    run(measure_selective_cuts, seeds=3, description=__doc__ or "", parallel=True)
