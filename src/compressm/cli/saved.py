"""What a path on the command line may name: a saved model, a folder of transformers, or a run."""

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
from compressm.saving.pretrained import is_pretrained


@final
@dataclass(frozen=True)
class SavedModel:
    """A model, and what is known of its training where it comes from a run.

    calibrate: runs a model on some training examples; None where there is no data. tested: accuracy or loss of the
    model, as it is now, on the test split. method: how selective layers were cut in the run.
    """

    model: nn.Module
    calibrate: Callable[[nn.Module], None] | None = None
    tested: Callable[[], str] | None = None
    method: SelectiveMethod | None = None

    def selective(self) -> SelectiveMethod:
        """How selective layers are cut: as the run did it, else so that layers with maps can go on from them."""
        return self.method or default_method(self.model)

    def require_data(self) -> None:
        """Refuse layers that have no spectra without data."""
        for called, names in ({} if self.calibrate is not None else _in_need_of_data(self.model)).items():
            raise SavingError(
                f"{', '.join(names)}: {called} are looked at and cut by what they do on data: give the folder of a run,"
                " and --measured"
            )


class Opener(Protocol):
    """Opens the folder of a run; the laboratory registers one by an entry point of the group `compressm.openers`."""

    def __call__(self, path: Path, *, with_data: bool, data: Path | None, offline: bool) -> SavedModel:
        """The model of the run, with its data from the folder `data` if they are wanted.

        What is wrong with the folder or the data is a `SavingError`.
        """


def open_saved(path: Path, *, with_data: bool, data: Path | None, offline: bool) -> SavedModel:
    """The model at the path; a run has data beside it."""
    if (path / "status.json").is_file():
        return _open_run(path, with_data=with_data, data=data, offline=offline)
    if with_data:
        raise SavingError(f"{path} is a saved model without its data: give the folder of a run")
    if is_pretrained(path):
        _require_transformers(path)
    return SavedModel(load_model(path).eval())


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


def _require_transformers(path: Path) -> None:
    try:
        importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise SavingError(f"{path} is a folder of transformers: pip install 'compressm[huggingface]'") from None


def _in_need_of_data(model: nn.Module) -> dict[str, list[str]]:
    """The layers that can only be valued by what they do on data, by what their family calls them."""
    found: dict[str, list[str]] = {}
    for name, (_, adapter) in find(model).items():
        if (family := family_of(adapter)).needs_data:
            found.setdefault(family.called, []).append(name or "the model")
    return found
