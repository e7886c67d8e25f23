"""All data sets by name, and data sets of your own by the path of their class."""

from __future__ import annotations

import importlib
import traceback
from dataclasses import fields
from typing import Any, get_type_hints

from compressm.errors import did_you_mean
from compressm_lab.data.dataset import DataSet
from compressm_lab.data.images import Digits, FashionMNIST, SequentialCIFAR, SequentialMNIST
from compressm_lab.data.listops import ListOps
from compressm_lab.data.pathfinder import Pathfinder
from compressm_lab.data.synthetic import DelayedCopy, LTITeacher
from compressm_lab.data.task import DataError
from compressm_lab.data.text import AAN, IMDB

_KINDS: tuple[type[DataSet], ...] = (
    *(SequentialMNIST, SequentialCIFAR, FashionMNIST, ListOps, IMDB, AAN, Pathfinder),
    *(Digits, DelayedCopy, LTITeacher),
)
CATALOGUE = {kind.name: kind for kind in _KINDS}


def make(name: str, **options: Any) -> DataSet:
    """The data set of that name, or of a class "package.module:Name", with these options; unknown ones are refused."""
    kind = CATALOGUE[name] if name in CATALOGUE else _own(name)
    allowed = {field.name: field.default for field in fields(kind)}
    for option, value in options.items():
        if option not in allowed:
            known = ", ".join(f"{key}={default}" for key, default in allowed.items()) or "none"
            near = did_you_mean(option, allowed)
            raise DataError(f"{name} has no option {option!r}; its options: {known}{near}")
        hint = get_type_hints(kind)[option]
        fits = type(value) in (int, float) if hint is float else isinstance(value, hint)
        if not fits or (isinstance(value, bool) and hint is not bool):
            wanted = getattr(hint, "__name__", None) or str(hint)
            raise DataError(f"{option} of {name} is {value!r}, expected {wanted}")
        options[option] = float(value) if hint is float else value
    return kind(**options)


def _own(path: str) -> type[DataSet]:
    if ":" not in path:
        near = did_you_mean(path, CATALOGUE)
        raise DataError(
            f"no data set is called {path!r}, expected one of {', '.join(CATALOGUE)}, or a class of your own as"
            f" package.module:Name{near}"
        )
    kind = imported(path)
    if not (isinstance(kind, type) and issubclass(kind, DataSet)):
        raise DataError(f"{path} is {kind!r:.80}, expected a class of compressm_lab.data.DataSet")
    if missing := sorted(kind.__abstractmethods__):
        raise DataError(f"{path} has no {' and no '.join(missing)}: a data set has a form and parses")
    name = getattr(kind, "name", None)
    if not isinstance(name, str):
        raise DataError(f"{path} has the name {name!r}, expected text: files in the cache are named by it")
    if CATALOGUE.get(name, kind) is not kind:
        raise DataError(f"{path} has the name {name!r}, which is taken: it would read that data set's cached files")
    return kind


def imported(path: str) -> Any:
    """Import the module of "package.module:Name" and return the object of that name."""
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise DataError(f"{path!r} names no class, expected package.module:Name")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise DataError(f"{module_name} of {path!r} cannot be imported: {error}") from error
        raise DataError(
            f"no module {error.name!r} of {path!r} is found; expected one that is installed, or a file in the folder"
            " where the command is given"
        ) from None
    except Exception as error:  # the module is not ours
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"{module_name} of {path!r} cannot be imported: {type(error).__name__}: {error}"
            f" ({last.filename}, line {last.lineno})"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        classes = [known for known, value in vars(module).items() if isinstance(value, type)]
        near = did_you_mean(name, classes)
        raise DataError(f"{module_name} has no {name!r}, which {path!r} names{near}") from None
