"""Parameters that join the groups of an optimizer, or leave them; their names too, where it was given names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

_NAMES = "param_names"  # of optimizers that were made of named_parameters()


def join_(group: dict[str, Any], parameter: nn.Parameter, name: str, place: int | None = None) -> None:
    """At the end, or at a place."""
    for members, new in joining(group, parameter, name):
        members.insert(len(members) if place is None else place, new)


def joining(group: dict[str, Any], parameter: nn.Parameter, name: str) -> list[tuple[list[Any], Any]]:
    """The lists that get an entry more, each with the entry."""
    return [(group[key], new) for key, new in (("params", parameter), (_NAMES, name)) if key in group]


def leave_(optimizer: Any, gone: Collection[nn.Parameter]) -> None:
    """With their states."""
    numbers = {id(parameter) for parameter in gone}
    for group in optimizer.param_groups:
        stays = [id(parameter) not in numbers for parameter in group["params"]]
        for key in ("params", _NAMES):
            if key in group:
                group[key][:] = [item for item, kept in zip(group[key], stays, strict=True) if kept]
    for parameter in gone:
        optimizer.state.pop(parameter, None)


def name_beside(group: dict[str, Any], origin: nn.Parameter, old: str, new: str) -> str:
    """What a parameter is called in the group that joins another, which its module calls `old`, as `new`."""
    names = group.get(_NAMES)
    if names is None:
        return new
    place = next(k for k, parameter in enumerate(group["params"]) if parameter is origin)
    return f"{str(names[place]).removesuffix(old)}{new}"
