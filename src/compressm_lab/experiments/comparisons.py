"""What a recipe asks for beside its task: a penalty on its layers, or a teacher. `train` takes both as functions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compressm.compression import load_model
from compressm.errors import SavingError
from compressm_lab.baselines import HankelMajoriser, HankelNuclearNorm, ModalL1, Teacher, distillation_loss
from compressm_lab.data.task import IGNORED, Batch, Task, TaskKind
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.training import ConfigError, DistillationConfig, Recipe, RegulariserConfig
from compressm_lab.training.building import batch_on
from compressm_lab.training.penalty import Penalty
from compressm_lab.training.steps import Objective, StepResult

_ASKED_AT_ONCE = 500  # examples


class Comparison(NamedTuple):
    """Keywords of `train`."""

    objective: Objective | None
    penalty: Penalty | None


def comparison(recipe: Recipe, task: Task) -> Comparison:
    """None where the recipe does not ask."""
    objective = None
    if recipe.distillation is not None:
        _require_same_task(Path(recipe.distillation.teacher), recipe.task)
        objective = distillation(recipe.distillation, task)
    return Comparison(objective, None if recipe.regulariser is None else penalty(recipe.regulariser))


def penalty(config: RegulariserConfig) -> Penalty:
    """By its name."""
    return {
        "hankel-nuclear-norm": HankelNuclearNorm(floor=config.floor, fold=config.fold),
        "hankel-majoriser": HankelMajoriser(),
        "modal-l1": ModalL1(),
    }[config.kind]


def distillation(config: DistillationConfig, task: Task) -> Distilled:
    """With the teacher read from its folder; one that does not fit the task is refused."""
    if task.kind is TaskKind.REGRESS:
        raise ConfigError(f"distillation: {task.name} is a regression, expected a task with classes")
    teacher = Teacher(_teacher(Path(config.teacher)))
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
    """The objective of a student; steps at which nothing is asked count for neither part."""

    def __init__(self, teacher: Teacher, config: DistillationConfig) -> None:
        self.teacher, self.config = teacher, config

    def prepare(self, task: Task, device: torch.device, autocast: AbstractContextManager[object]) -> None:
        """The teacher where the student is, and, where answers are kept, asked about all training examples."""
        self.teacher.model.to(device)
        if self.config.cache:
            numbers = torch.arange(len(task.train)).split(_ASKED_AT_ONCE)
            batches = (batch_on(device, task, task.train, some) for some in numbers)
            with autocast:
                self.teacher.keep((batch.inputs, batch.lengths) for batch in batches)

    def __call__(self, model: nn.Module, batch: Batch) -> StepResult:
        logits = model(batch.inputs, batch.lengths).float()
        asked = batch.targets != IGNORED
        loss = distillation_loss(
            logits.flatten(0, -2),
            self._answers(batch).flatten(0, -2),
            batch.targets.flatten(),
            temperature=self.config.temperature,
            alpha=self.config.alpha,
            ignored=IGNORED,
        )
        return StepResult(loss, (logits.detach().argmax(-1) == batch.targets).sum(), asked.sum())

    def _answers(self, batch: Batch) -> Tensor:
        if self.teacher.keeps:
            assert batch.indices is not None
            return self.teacher.recall(batch.indices)
        return self.teacher(batch.inputs, batch.lengths)


def _require_same_task(teacher: Path, task: Mapping[str, Any]) -> None:
    """Where the teacher is a run, which says on what it learned."""
    learned = RunDirectory(teacher).config()["task"] if _is_run(teacher) else task
    if dict(learned) != dict(task):
        raise ConfigError(f"distillation: {teacher} learned on {learned}, expected {dict(task)}, as its student")


def _is_run(path: Path) -> bool:
    return (path / "status.json").is_file()  # a saved model has a config.json too


def _teacher(path: Path) -> nn.Module:
    """The model of a finished run, or a saved model."""
    run, is_run = RunDirectory(path), _is_run(path)
    if is_run and not run.finished:
        raise ConfigError(f"distillation: {path} is a run that has not finished: a teacher has learned what it can")
    try:
        return load_model(run.model if is_run else path)
    except SavingError as error:
        raise ConfigError(
            f"distillation: {path} is no teacher, expected the folder of a finished run, as of `compressm train NAME"
            f" --baseline`, or of a saved model: {error}"
        ) from None
