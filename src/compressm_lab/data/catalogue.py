"""All tasks by name, and tasks of your own by the path of a class or of a function."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import MISSING as DATACLASS_MISSING
from dataclasses import dataclass, field, fields
from typing import Any, final, get_args, get_type_hints

from compressm.errors import did_you_mean
from compressm_lab.data.dataset import DataSet, Source
from compressm_lab.data.files import Store
from compressm_lab.data.images import Digits, FashionMNIST, SequentialCIFAR, SequentialMNIST
from compressm_lab.data.listops import ListOps
from compressm_lab.data.pathfinder import Pathfinder
from compressm_lab.data.synthetic import DelayedCopy, LTITeacher
from compressm_lab.data.table import Table
from compressm_lab.data.task import DataError, Task
from compressm_lab.data.text import AAN, IMDB

_KINDS: tuple[type[DataSet], ...] = (
    *(SequentialMNIST, SequentialCIFAR, FashionMNIST, ListOps, IMDB, AAN, Pathfinder),
    *(Digits, DelayedCopy, LTITeacher),
)
CATALOGUE = {kind.name: kind for kind in _KINDS}
_TABLES = {Table.name: Table}  # read from files that a recipe names


def make(name: str, **options: Any) -> Source:
    """The source of a task by its name, with these options; unknown ones are refused.

    A name is that of a data set, `table`, or "package.module:name": a class of `DataSet`, or a function that returns a
    `Task`.
    """
    found = _TABLES.get(name) or CATALOGUE.get(name) or _own(name)
    return _built(name, found, options) if isinstance(found, type) else Made(name, found, options)


def _built(name: str, kind: type[DataSet] | type[Table], options: dict[str, Any]) -> Source:
    """The data set of a class; its options are the fields."""
    allowed = {field.name: field.default for field in fields(kind)}
    for option, value in options.items():
        if option not in allowed:
            defaults = {
                key: "required" if default is DATACLASS_MISSING else default for key, default in allowed.items()
            }
            known = ", ".join(f"{key}={default}" for key, default in defaults.items()) or "none"
            near = did_you_mean(option, allowed)
            raise DataError(f"{name} has no option {option!r}; its options: {known}{near}")
        hint = get_type_hints(kind)[option]
        fits = type(value) in (int, float) if hint is float else isinstance(value, hint)
        if not fits or (isinstance(value, bool) and hint is not bool and bool not in get_args(hint)):
            wanted = getattr(hint, "__name__", None) or str(hint)
            raise DataError(f"{option} of {name} is {value!r}, expected {wanted}")
        options[option] = float(value) if hint is float else value
    if missing := [key for key, default in allowed.items() if default is DATACLASS_MISSING and key not in options]:
        raise DataError(f"{name} has no {' and no '.join(missing)}: expected {{name: {name}, {missing[0]}: …}}")
    return kind(**options)


@final
@dataclass(frozen=True)
class Made(Source):
    """A task that a function makes; its keywords are the options of the task in a recipe."""

    place: str
    function: Callable[..., Any] = field(compare=False)
    options: Mapping[str, Any]

    name = "own"

    def __post_init__(self) -> None:
        try:
            signature = inspect.signature(self.function)
        except ValueError:
            raise DataError(f"{self.place} has no signature, expected a function of your own") from None
        try:
            signature.bind(**self.options)
        except TypeError as error:
            near = "".join(did_you_mean(option, signature.parameters) for option in self.options)
            raise DataError(f"{self.place}{signature} cannot be called with its options: {error}{near}") from None

    def load(self, store: Store) -> Task:
        task = self.function(**self.options)
        if not isinstance(task, Task):
            raise DataError(f"{self.place} returns {task!r:.80}, expected a compressm_lab.data.Task")
        try:
            task.require_sound()
        except DataError as error:
            raise DataError(f"{self.place}: {error}") from None
        return task

    def __str__(self) -> str:
        return f"{self.place}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"


def _own(path: str) -> type[DataSet] | Callable[..., Any]:
    if ":" not in path:
        known = (*CATALOGUE, *_TABLES)
        near = did_you_mean(path, known)
        raise DataError(
            f"no data set is called {path!r}, expected one of {', '.join(known)}, or a class or a function of your own"
            f" as package.module:Name{near}"
        )
    kind = imported(path)
    if not isinstance(kind, type) and callable(kind):
        return kind
    if not (isinstance(kind, type) and issubclass(kind, DataSet)):
        raise DataError(
            f"{path} is {kind!r:.80}, expected a class of compressm_lab.data.DataSet, or a function that returns a Task"
        )
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
        named = [known for known, value in vars(module).items() if callable(value)]
        near = did_you_mean(name, named)
        raise DataError(f"{module_name} has no {name!r}, which {path!r} names{near}") from None
