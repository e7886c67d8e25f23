"""Penalties and teachers of recipes, made into functions that `train` takes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from compressm.compression import load_model
from compressm.errors import SavingError
from compressm_lab.baselines import HankelMajoriser, HankelNuclearNorm, ModalL1, Teacher, distillation_loss
from compressm_lab.data.task import IGNORED, Batch, Task
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.records import RunError
from compressm_lab.training import ConfigError, DistillationConfig, Recipe, RegulariserConfig
from compressm_lab.training.building import batch_on
from compressm_lab.training.penalty import Penalty
from compressm_lab.training.steps import Objective, StepResult

_BATCH = 500  # examples that the teacher answers at once


class Comparison(NamedTuple):
    """Keywords of `train`: the objective of a student, and a penalty."""

    objective: Objective | None
    penalty: Penalty | None


def comparison(recipe: Recipe, task: Task) -> Comparison:
    """Make the objective and the penalty of a recipe; None for each that it does not have."""
    objective = None
    if recipe.distillation is not None:
        objective = distillation(recipe.distillation, recipe.task, task)
    return Comparison(objective, None if recipe.regulariser is None else penalty(recipe.regulariser))


def penalty(config: RegulariserConfig) -> Penalty:
    """Make the penalty that a recipe names."""
    return {
        "hankel-nuclear-norm": HankelNuclearNorm(config.floor, config.fold, mean=config.over == "mean"),
        "hankel-majoriser": HankelMajoriser(),
        "modal-l1": ModalL1(),
    }[config.kind]


def distillation(config: DistillationConfig, wanted: Mapping[str, Any], task: Task) -> Distilled:
    """Read the teacher from its folder; one that learned another task than `wanted`, or does not fit, is refused."""
    path = Path(config.teacher)
    is_run = (path / "status.json").is_file()  # a saved model has a config.json too
    learned = RunDirectory(path).config()["task"] if is_run else wanted
    if dict(learned) != dict(wanted):
        raise ConfigError(f"distillation: {path} learned on {learned}, expected {dict(wanted)}, as its student")
    if task.kind.is_regression:
        raise ConfigError(f"distillation: {task.name} is a regression, expected a task with classes")
    teacher = Teacher(_teacher(path, is_run))
    batch = task.batch(task.train, torch.zeros(1, dtype=torch.int64, device=task.train.inputs.device))
    try:
        answer = teacher(batch.inputs.cpu(), None if batch.lengths is None else batch.lengths.cpu())
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(f"distillation: {config.teacher} cannot read {task.name}: {error}") from error
    if answer.shape[-1] != task.classes or answer.shape[:-1] != batch.targets.shape:
        raise ConfigError(
            f"distillation: {config.teacher} answers {task.name} with {tuple(answer.shape[1:])} numbers, expected"
            f" {(*batch.targets.shape[1:], task.classes)}"
        )
    return Distilled(teacher, config)


class Distilled:
    """The objective of a student; ignored steps count for neither part."""

    def __init__(self, teacher: Teacher, config: DistillationConfig) -> None:
        self.teacher, self.config = teacher, config

    def prepare(self, task: Task, device: torch.device, autocast: AbstractContextManager[object]) -> None:
        """Move the teacher to the device and, with `cache`, keep its answers to all training examples."""
        self.teacher.model.to(device)
        if self.config.cache:
            numbers = torch.arange(len(task.train)).split(_BATCH)
            batches = (batch_on(device, task, task.train, some) for some in numbers)
            with autocast:
                self.teacher.keep((batch.inputs, batch.lengths) for batch in batches)

    def __call__(self, model: nn.Module, batch: Batch) -> StepResult:
        logits = model(batch.inputs, batch.lengths).float()
        if self.teacher.keeps:
            assert batch.indices is not None
            answers = self.teacher.recall(batch.indices)
        else:
            answers = self.teacher(batch.inputs, batch.lengths)
        rows = (logits.flatten(0, -2), answers.flatten(0, -2), batch.targets.flatten())
        temperature, alpha = self.config.temperature, self.config.alpha
        loss = distillation_loss(*rows, temperature=temperature, alpha=alpha, ignored=IGNORED)
        return StepResult(loss, (logits.detach().argmax(-1) == batch.targets).sum(), (batch.targets != IGNORED).sum())


def _teacher(path: Path, is_run: bool) -> nn.Module:
    """Load the model of a finished run, or a saved model."""
    run = RunDirectory(path)
    if is_run and not run.finished:
        raise ConfigError(f"distillation: {path} is a run that has not finished: a teacher has learned what it can")
    try:
        if is_run:
            run.require_own_model()
        return load_model(run.model if is_run else path)
    except (RunError, SavingError) as error:
        raise ConfigError(
            f"distillation: {path} is no teacher, expected the folder of a finished run, as of `compressm train NAME"
            f" --baseline`, or of a saved model: {error}"
        ) from None
