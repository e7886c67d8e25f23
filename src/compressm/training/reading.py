"""Recipes in files: YAML, strict; single values can be set from outside."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from compressm.training.config import ConfigError, Recipe


def read_recipe(path: Path | str, settings: Iterable[str] = ()) -> Recipe:
    """The recipe of a YAML file, with settings such as "compression.tau=0.02" on top."""
    import yaml

    path = Path(path)
    try:
        contents = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected a recipe, a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(contents, dict) or not all(isinstance(key, str) for key in contents):
        raise ConfigError(f"{path} holds {contents!r:.80}, expected the keys of a recipe")
    return make_recipe(with_settings(contents, settings), source=str(path))


def make_recipe(contents: Mapping[str, Any], *, source: str = "recipe") -> Recipe:
    """A recipe from plain values; every value that is wrong is named with what is allowed."""
    from pydantic import TypeAdapter, ValidationError

    try:
        recipe = TypeAdapter(Recipe).validate_python(dict(contents))
    except ValidationError as error:
        problems = "; ".join(_problem(problem) for problem in error.errors())
        raise ConfigError(f"{source}: {problems}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    if mistaken := "; ".join(_mistaken(contents, recipe.as_dict())):
        raise ConfigError(f"{source}: {mistaken}")
    return recipe


def _mistaken(given: Any, read: Any, key: str = "") -> Iterator[str]:
    """Pydantic reads true as 1, and 1 as true."""
    if isinstance(given, Mapping) and isinstance(read, Mapping):
        for name, value in given.items():
            yield from _mistaken(value, read.get(name), f"{key}.{name}".strip("."))
    elif isinstance(given, list | tuple) and isinstance(read, list | tuple):
        for value, number in zip(given, read, strict=True):
            yield from _mistaken(value, number, key)
    elif isinstance(given, bool) != isinstance(read, bool):
        expected = "true or false" if isinstance(read, bool) else "a number"
        yield f"{key} is {given!r}: expected {expected}"


def with_settings(contents: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """A copy in which "a.b=value" has set contents["a"]["b"]; values are read as YAML."""
    import yaml

    changed = copy.deepcopy(dict(contents))
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {setting!r}: expected key=value, as in compression.tau=0.02")
        *outer, last = key.strip().split(".")
        place = changed
        for name in outer:
            if place.get(name) is None:
                place[name] = {}
            place = place[name]
            if not isinstance(place, dict):
                raise ConfigError(f"--set {setting!r}: {name} holds {place!r:.40}, which has no keys")
        try:
            place[last] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {setting!r}: {text!r} is not a value: {error}") from None
    return changed


def _problem(problem: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{where} is not a key of a recipe"
    if problem["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{where} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where} is {problem['input']!r:.60}: {message}"
