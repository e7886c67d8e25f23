"""Open runs for the library's commands, and the tasks of recipes for our own."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

from torch import nn

from compressm.cli.saved import SavedModel
from compressm.compression import load_model
from compressm.errors import SavingError
from compressm.ops import SequenceError
from compressm.saving.checkpoints import load_checkpoint
from compressm_lab.cli.terminal import score_text
from compressm_lab.data import DataError, Order, Source, Store, Task, make
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.records import RunError
from compressm_lab.training import ConfigError, Recipe
from compressm_lab.training.building import build_method, build_model, held_out, require_fit
from compressm_lab.training.evaluation import score
from compressm_lab.training.loop import checkpoints, require_recipe_of
from compressm_lab.training.reading import make_recipe

_BATCHES, _SIZE = 4, 50  # training data that a model is calibrated on


def open_run(path: Path, *, with_data: bool, data: Path | None, offline: bool) -> SavedModel:
    """The final model of a run, or the newest checkpoint of one that has not ended; the commands' `Opener`."""
    run = RunDirectory(path)

    @cache
    def source() -> Source:
        return make(**recipe.task)

    @cache
    def task() -> Task:
        try:  # data that are only for a test are not fetched
            return load_task(source(), store_in(data, offline or not with_data))
        except DataError as error:
            raise SavingError(str(error)) from error

    try:
        recipe = make_recipe(run.config(), source=str(path / "config.json"))
        whole, step = (run.model / "model.safetensors").is_file(), 0
        if whole:
            run.require_own_model()
        # Code of a task is imported only if the data are asked for.
        model: nn.Module = load_model(run.model) if whole else build_model(recipe.model, source().form or task())
        if not whole:
            step = _load_newest(run, model)
    except (ConfigError, DataError, RunError) as error:
        raise SavingError(str(error)) from error

    return SavedModel(
        model.eval(),
        calibrate=partial(_calibrate, task=task()) if with_data else None,
        loss=partial(_loss, task=task(), recipe=recipe) if with_data else None,
        tested=lambda: _tested(model, task(), recipe.training.evaluation_batch),
        method=None if recipe.compression is None else build_method(recipe.compression.selective),
        note="" if whole else f"{path} has not finished: this is its model of step {step} of {recipe.training.steps}",
        commit=_commit(run),
    )


def _commit(run: RunDirectory) -> str | None:
    try:
        return run.environment().commit
    except (RunError, TypeError):  # there is none, or it is of another version
        return None


def store_in(folder: Path | None, offline: bool) -> Store:
    """The store in a folder, by default in `default_root()`."""
    return Store(offline=offline) if folder is None else Store(folder, offline=offline)


def task_of(recipe: Recipe, data: Path | None, offline: bool) -> Task:
    """The task that a recipe is trained on; nothing is fetched for a model that cannot answer it."""
    try:
        source = make(**recipe.task)
    except DataError as error:
        raise DataError(f"task: {error}") from error
    if source.form is not None:
        require_fit(recipe.model, source.form.kind)
    return load_task(source, store_in(data, offline))


def load_task(source: Source, store: Store) -> Task:
    """Load a task; one that does not fit into memory is refused."""
    try:
        return source.load(store)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "alloc" not in str(error):
            raise
        raise DataError(f"the data of {source} do not fit into memory: set smaller sizes") from error


def _load_newest(run: RunDirectory, model: nn.Module) -> int:
    """Load the weights of the newest checkpoint that is whole; returns its step."""
    problems = []
    for path in checkpoints(run):
        try:
            found = load_checkpoint(path, model=model)
            require_recipe_of(path, found.extra, run.config())
            return found.step
        except (ConfigError, SavingError) as error:
            problems.append(str(error))
    raise SavingError("; ".join(problems) or f"{run.path} holds neither a model nor a checkpoint yet")


def _calibrate(model: nn.Module, task: Task) -> None:
    """Run the model on some training examples."""
    order = Order(len(task.train), min(_SIZE, len(task.train)), 0)
    for step in range(1, _BATCHES + 1):
        batch = task.batch(task.train, order.at(step))
        model(batch.inputs, batch.lengths)


def _loss(model: nn.Module, task: Task, recipe: Recipe) -> float:
    """The loss on the validation examples on which a training would judge trial cuts."""
    return score(model, task, held_out(recipe, task), size=recipe.training.evaluation_batch).loss


def _tested(model: nn.Module, task: Task, size: int) -> str:
    """The accuracy, or the errors, on the test split; a model that cannot read the task is named."""
    try:
        found = score(model, task, task.test, size=size)
    except SequenceError as error:
        raise SavingError(f"the model cannot read {task.name}, the task of its run: {error}") from error
    return score_text(found)
