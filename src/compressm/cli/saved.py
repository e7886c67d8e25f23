"""Models that a path on the command line may name: a saved model, a folder of transformers, or a run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

from torch import nn

from compressm.adapters import find
from compressm.cli.commands import registered
from compressm.compression import SelectiveMethod, load_model
from compressm.errors import SavingError
from compressm.families import family_of
from compressm.families.selective.methods import default_method
from compressm.saving.models import commit_of, is_pretrained


@final
@dataclass(frozen=True)
class SavedModel:
    """A model, with data and settings of its training if it comes from a run.

    calibrate: runs a model on some training examples; None without data. loss: the loss of a model on a part of the
    validation data; None without data. tested: the accuracy or loss of the present
    model on the test split; a `SavingError` if its data are not on disk. method: the run's method for selective layers.
    note: a sentence for the user, if it is not the final model. commit: the commit that the run was trained at.
    """

    model: nn.Module
    calibrate: Callable[[nn.Module], None] | None = None
    loss: Callable[[nn.Module], float] | None = None
    tested: Callable[[], str] | None = None
    method: SelectiveMethod | None = None
    note: str = ""
    commit: str | None = None

    def selective(self) -> SelectiveMethod:
        """The method for selective layers: that of the run, or one that fits the model's layers."""
        return self.method or default_method(self.model)

    def require_data(self) -> None:
        """Refuse layers that need data if there is none."""
        families = {name or "the model": family_of(adapter) for name, (_, adapter) in find(self.model).items()}
        called = next((family.called for family in families.values() if family.needs_data), None)
        if self.calibrate is None and called is not None:
            names = ", ".join(name for name, family in families.items() if family.called == called)
            raise SavingError(
                f"{names}: {called} can only be inspected and cut with data: give the folder of a run, and --measured"
            )


class Opener(Protocol):
    """A function that opens the folder of a run, from an entry point of the group `compressm.openers`."""

    def __call__(self, path: Path, *, with_data: bool, data: Path | None, offline: bool) -> SavedModel:
        """The model of the run, with its data from the folder `data` if `with_data`.

        A folder or data that cannot be used raise a `SavingError`.
        """


def open_saved(path: Path, *, with_data: bool, data: Path | None, offline: bool) -> SavedModel:
    """The model at the path; only a run has data."""
    if not path.exists():
        raise SavingError(f"{path} does not exist: give the folder of a saved model, or of a run")
    if (path / "status.json").is_file():
        return _open_run(path, with_data=with_data, data=data, offline=offline)
    if with_data or data is not None:
        raise SavingError(f"{path} is a saved model without its data: give the folder of a run")
    if is_pretrained(path):
        try:
            importlib.import_module("transformers")
        except ModuleNotFoundError:
            raise SavingError(f"{path} is a folder of transformers: pip install 'compressm[huggingface]'") from None
        return SavedModel(load_model(path).eval())
    return SavedModel(load_model(path).eval(), commit=commit_of(path))


def _open_run(path: Path, *, with_data: bool, data: Path | None, offline: bool) -> SavedModel:
    missing = ""
    try:
        for opener in registered("compressm.openers", "compressm_lab.cli.opening:open_run"):
            return opener(path, with_data=with_data, data=data, offline=offline)
    except ModuleNotFoundError as error:
        missing = f" and needs the package {error.name}"
    raise SavingError(
        f"{path} is the folder of a run, which the laboratory opens{missing}: pip install 'compressm[lab]', or give"
        " the folder of a saved model"
    )
