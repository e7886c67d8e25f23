"""What a path on the command line may name: a saved model, or a run with the model and the task it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from compressm.adapters import SelectiveAdapter, find
from compressm.compression import Baked, PerChannel, load_model
from compressm.errors import SavingError
from compressm.families.selective.methods import SelectiveMethod
from compressm.layers import Mamba
from compressm.saving.checkpoints import load_checkpoint
from compressm_lab.data import Order, Store, Task, make
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.training import Recipe
from compressm_lab.training.building import build_method, build_model
from compressm_lab.training.reading import make_recipe
from compressm_lab.training.resuming import checkpoints


@dataclass(frozen=True)
class Saved:
    """A model, and the recipe and task where it comes from a run."""

    model: nn.Module
    recipe: Recipe | None = None
    task: Task | None = None

    def selective(self) -> SelectiveMethod:
        """How selective layers are cut: as the run did it, else so that layers with maps can go on from them."""
        if self.recipe is not None and self.recipe.compression is not None:
            return build_method(self.recipe.compression.selective)
        mapped = any(isinstance(module, Mamba) and module.B_map is not None for module in self.model.modules())
        return PerChannel() if mapped else Baked()

    def require_data(self) -> None:
        """Selective layers have no spectra without it."""
        selective = [name for name, (_, adapter) in find(self.model).items() if isinstance(adapter, SelectiveAdapter)]
        if selective and self.task is None:
            raise SavingError(
                f"{', '.join(name or 'the model' for name in selective)}: selective layers are looked at and cut by"
                " what their inputs choose, which takes data: give the folder of a run, and --measured"
            )

    def calibrate(self, batches: int = 4, size: int = 50) -> None:
        """Run the model on some training examples."""
        assert self.task is not None
        order = Order(len(self.task.train), min(size, len(self.task.train)), 0)
        for step in range(1, batches + 1):
            batch = self.task.batch(self.task.train, order.at(step))
            self.model(batch.inputs, batch.lengths)


def open_saved(path: Path, *, with_data: bool, store: Store) -> Saved:
    """The final model of a run, or the newest checkpoint of one that has not ended."""
    run = RunDirectory(path)
    if not (path / "status.json").is_file():
        if with_data:
            raise SavingError(f"{path} is a saved model without its data: give the folder of a run")
        return Saved(load_model(path).eval())
    recipe = make_recipe(run.config(), source=str(path / "config.json"))
    options = {key: value for key, value in recipe.task.items() if key != "name"}
    dataset = make(recipe.task["name"], **options)
    whole = (run.model / "model.safetensors").is_file()
    model = load_model(run.model) if whole else _unfinished(run, build_model(recipe.model, dataset.form))
    return Saved(model.eval(), recipe, dataset.load(store) if with_data else None)


def _unfinished(run: RunDirectory, model: nn.Module) -> nn.Module:
    """The model with the weights of the newest checkpoint that is whole."""
    problems = []
    for path in checkpoints(run):
        try:
            load_checkpoint(path, model=model)
        except SavingError as error:
            problems.append(str(error))
        else:
            return model
    raise SavingError("; ".join(problems) or f"{run.path} holds neither a model nor a checkpoint yet")
