"""All data sets by name."""

from __future__ import annotations

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

CATALOGUE: dict[str, type[DataSet]] = {
    kind.name: kind
    for kind in (
        SequentialMNIST,
        SequentialCIFAR,
        FashionMNIST,
        ListOps,
        IMDB,
        AAN,
        Pathfinder,
        Digits,
        DelayedCopy,
        LTITeacher,
    )
}


def make(name: str, **options: Any) -> DataSet:
    """The data set of that name with these options; what is unknown is refused, with what is known."""
    if name not in CATALOGUE:
        near = did_you_mean(name, CATALOGUE)
        raise DataError(f"no data set is called {name!r}, expected one of {', '.join(CATALOGUE)}{near}")
    kind = CATALOGUE[name]
    allowed = {field.name: field.default for field in fields(kind)}
    for option, value in options.items():
        if option not in allowed:
            known = ", ".join(f"{key}={default}" for key, default in allowed.items()) or "none"
            near = did_you_mean(option, allowed)
            raise DataError(f"{name} has no option {option!r}; its options: {known}{near}")
        hint = get_type_hints(kind)[option]
        _require_type(name, option, value, hint)
        options[option] = float(value) if hint is float else value
    return kind(**options)


def _require_type(name: str, option: str, value: Any, hint: Any) -> None:
    fits = type(value) in (int, float) if hint is float else isinstance(value, hint)
    if not fits or (isinstance(value, bool) and hint is not bool):
        wanted = getattr(hint, "__name__", None) or str(hint)
        raise DataError(f"{option} of {name} is {value!r}, expected {wanted}")
