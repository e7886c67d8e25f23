"""Readers of recipes: strict YAML files, with single values set by key=value."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from compressm.adapters.base import adapter_of
from compressm.compression.policies import TargetOrder, obstacles
from compressm.errors import CompressionError, did_you_mean
from compressm.families.choices import LayerOrders, as_allowed_orders
from compressm_lab.training.config import Recipe, TrainingConfig
from compressm_lab.training.model_config import Config, ConfigError, layer_class

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_LEVELS, _VALUES = 20, 10_000  # more than any recipe has


Importing = Callable[[str], None]  # told the modules that a recipe names, before they are imported


def read_recipe(
    path: Path | str,
    settings: Iterable[str] = (),
    *,
    spoken: Mapping[str, str] | None = None,
    importing: Importing | None = None,
) -> Recipe:
    """Read the recipe of a YAML file, with settings such as "compression.tau=0.02" on top.

    An error names the setting that caused it, or else the file. `spoken` maps settings that did not come from --set to
    what the user typed instead.
    """
    contents, settings = _contents(Path(path)), tuple(settings)
    changed = with_settings(contents, settings)
    _announce(changed, importing)
    recipe, problems = _checked(changed)
    if recipe is None:
        words = {setting: f"--set {setting!r}" for setting in settings} | dict(spoken or {})
        raise ConfigError(_blamed(problems, contents, settings, str(path), words))
    return recipe


def make_recipe(contents: Mapping[str, Any], *, source: str = "recipe", importing: Importing | None = None) -> Recipe:
    """Make a recipe from plain values; the error names every wrong value and what is allowed."""
    _announce(contents, importing)
    recipe, problems = _checked(contents, begins=False)
    if recipe is None:
        raise ConfigError(f"{source}: {'; '.join(problems)}")
    return recipe


def modules_named(contents: Mapping[str, Any]) -> list[str]:
    """The modules that a recipe imports: those of its own task, layer and factory."""
    task, model = contents.get("task"), contents.get("model")
    named = [task.get("name") if isinstance(task, Mapping) else task]
    named += [model.get("layer"), model.get("factory")] if isinstance(model, Mapping) else []
    found = [name.partition(":")[0] for name in named if isinstance(name, str) and ":" in name]
    return [name for name in dict.fromkeys(found) if name.partition(".")[0] not in ("compressm", "compressm_lab")]


def _announce(contents: Mapping[str, Any], importing: Importing | None) -> None:
    if importing is not None:
        for module in modules_named(contents):
            importing(module)


def _contents(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a file; expected a recipe, a YAML file")  # a pipe would be waited for
    try:
        contents = _parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected a recipe, a YAML file") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML of a recipe: {error}") from None
    if not isinstance(contents, dict) or not all(isinstance(key, str) for key in contents):
        raise ConfigError(f"{path} holds {contents!r:.80}, expected the keys of a recipe")
    return contents


def _parsed(text: str) -> Any:
    """The value of a YAML text; a ValueError says what is wrong with it, and where."""
    return copy.deepcopy(_parsed_once(text))


@lru_cache(maxsize=1024)  # an experiment reads one recipe with a hundred settings
def _parsed_once(text: str) -> Any:
    import yaml

    try:
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):  # unlike values, events are read without recursion
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            _require_level(depth, event)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        for number, inner in enumerate(_nodes(node)):
            if number == _VALUES:
                raise ValueError(f"more than {_VALUES} values, with aliases written out; a recipe has a hundred")
            _require_keys_once(inner)
            _require_plain_integer(inner)
        return None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        place = f" at {_line(error.problem_mark)}" if error.problem_mark else ""
        said = str(error.problem or error.context).replace("'<stream end>'", "the end of the text")
        raise ValueError(f"{said}{place}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _require_level(depth: int, where: Any) -> None:
    if depth > _LEVELS:
        raise ValueError(f"more than {_LEVELS} levels at {_place(where)}; a recipe has four")


def _nodes(node: Any, depth: int = 0) -> Iterator[Any]:
    """Every node at or below this one; an alias counts as what it stands for."""
    import yaml

    _require_level(depth, node)  # an alias of what it is in has no end
    yield node
    if isinstance(node, yaml.CollectionNode):
        for inner in node.value:
            for one in inner if isinstance(inner, tuple) else (inner,):
                yield from _nodes(one, depth + 1)


def _require_keys_once(node: Any) -> None:
    """Refuse a key that is there twice: the last would win without a word."""
    import yaml

    first: dict[tuple[str, str], Any] = {}
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(key, yaml.ScalarNode):
            continue
        before = first.setdefault((key.tag, key.value), key)
        if before is not key:
            raise ValueError(
                f"{key.value} is there twice, at {_place(before)} and {_place(key)}: leave one of them out"
            )


def _require_plain_integer(node: Any) -> None:
    """Refuse 050, which YAML reads as 40, and 1:30, which it reads as 90."""
    if (
        node is not None
        and node.tag == "tag:yaml.org,2002:int"
        and not re.fullmatch(r"[-+]?(0|[1-9][0-9_]*)", node.value)
    ):
        raise ValueError(f"{node.value} at {_place(node)}, expected an integer in decimal digits, without a leading 0")


def _place(node: Any) -> str:
    return _line(node.start_mark)


def _line(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


@cache
def _validator() -> TypeAdapter[Recipe]:
    from pydantic import TypeAdapter

    return TypeAdapter(Recipe)


def _checked(contents: Mapping[str, Any], *, begins: bool = True) -> tuple[Recipe | None, list[str]]:
    """The recipe, or None and all its problems; a run that did not begin now may have values without effect."""
    from pydantic import ValidationError

    try:
        recipe = _validator().validate_python(dict(contents))
    except ValidationError as error:
        return None, [_problem(problem) for problem in error.errors()]
    except ConfigError as error:
        return None, [str(error)]
    mistaken = list(_mistaken(contents, recipe.as_dict()))
    if begins:
        mistaken += [*_no_folders(recipe), *_without_effect(recipe)]
    return (None if mistaken else recipe), mistaken


def _no_folders(recipe: Recipe) -> Iterator[str]:
    """Find a name or label that cannot be part of the folder of a run."""
    for key, text in (("name", recipe.name), ("label", recipe.label)):
        plain = text.isprintable() and text.strip() not in ("", ".", "..") and not set(text) & set("/\\")
        if not plain:
            yield f"{key} is {text!r:.60}, expected a plain folder name: runs are in out/runs/NAME/LABEL-nORDER"


def _without_effect(recipe: Recipe) -> Iterator[str]:
    """Find values that the rest of the recipe leaves without effect."""
    training, compression, selective = recipe.training, recipe.compression, recipe.model.selective
    if training.schedule == "constant":
        cuts = compression is not None and compression.when.warmup_cuts is not None
        for name in ("lowest_rate",) if cuts else ("warmup", "lowest_rate"):
            if (value := getattr(training, name)) != getattr(TrainingConfig, name):
                yield f"training.{name} is {value} with schedule constant, which does not use it: expected cosine"
    for key, part in (("compression", compression), ("truncation", recipe.truncation)):
        batches = None if part is None else part.calibration_batches
        own = recipe.model.factory is not None  # it tells once it is built
        if part is None or selective or own or part.gramian == "measured" or batches == type(part).calibration_batches:
            continue
        yield f"{key}.calibration_batches is {batches} with gramian {part.gramian}, which needs no data: leave it out"
    yield from _without_cuts(recipe)


def _without_cuts(recipe: Recipe) -> Iterator[str]:
    """Find limits of orders that no cut of this model can keep."""
    config, order, adapter = recipe.compression, recipe.model.order, adapter_of(layer_class(recipe.model.layer))
    if config is None or adapter is None or recipe.model.factory is not None:
        return
    try:
        allowed = LayerOrders({"": as_allowed_orders(config.allowed_orders).of(adapter.RECURRENCE)})
    except CompressionError:  # a runtime without this layer, which the compressor refuses by name
        return
    held = obstacles({"": order}, TargetOrder(1), None, config.gate, allowed, config.at_least)
    for name in ("round_to", "at_least") if len(held) < 3 else ():
        if name in held:
            yield (
                f"compression.{name} is {getattr(config, name)!r} with model.order {order}, so that no layer could be"
                " cut: lower it, or leave compression out"
            )


def _blamed(
    problems: Sequence[str], contents: dict[str, Any], settings: Sequence[str], file: str, words: Mapping[str, str]
) -> str:
    """Say every problem after the settings that cause it, or after the file if none does."""

    def problems_without(setting: str) -> list[str]:
        try:
            return _checked(with_settings(contents, [other for other in settings if other != setting]))[1]
        except ConfigError as error:  # a setting that needed this one
            return [str(error)]

    own = _checked(contents)[1]
    without = {setting: problems_without(setting) for setting in settings}
    found: dict[str, list[str]] = {}
    for problem in problems:
        guilty = [] if problem in own else [s for s in settings if problem not in without[s]] or settings
        found.setdefault(" and ".join(dict.fromkeys(words[s] for s in guilty)) or file, []).append(problem)
    return "; ".join(f"{blamed}: {'; '.join(its)}" for blamed, its in found.items())


def _mistaken(given: Any, read: Any, key: str = "") -> Iterator[str]:
    """Find numbers given for booleans and booleans for numbers, which pydantic converts."""
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
    """Copy `contents` and set ["a"]["b"] for every setting "a.b=value"; values are read as YAML."""
    changed = copy.deepcopy(dict(contents))
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {setting!r}: expected key=value, as in compression.tau=0.02")
        *outer, last = key.strip().split(".")
        place = changed
        if outer == ["task"] and isinstance(place.get("task"), str):
            place["task"] = {"name": place["task"]}
        for name in outer:
            if place.get(name) is None:
                place[name] = {}
            place = place[name]
            if not isinstance(place, dict):
                raise ConfigError(f"--set {setting!r}: {name} holds {place!r:.40}, which has no keys")
        try:
            place[last] = _parsed(text)
        except ValueError as error:
            raise ConfigError(f"--set {setting!r:.100}: {text!r:.100} is not a value: {error}") from None
    return changed


def _problem(problem: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return _unknown(*map(str, problem["loc"]))
    if problem["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{where} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{where}: {message}" if where else message
    if problem["type"] == "dataclass_type":
        keys = [key.split(".")[-1] for key in _keys(Recipe) if key.rpartition(".")[0] == where]
        return f"{where} is {problem['input']!r:.60}: expected its keys, {', '.join(keys)}"
    if problem["type"] == "literal_error":
        allowed = problem["ctx"]["expected"]
        near = did_you_mean(problem["input"], re.findall("'([^']*)'", allowed))
        message = f"expected {allowed}{near}"
    # "int_parsing", "float_type" and the like.
    elif (expected := _EXPECTED.get(problem["type"].partition("_")[0])) is not None:
        message = f"expected {expected}"
    return f"{where} is {problem['input']!r:.60}{', ' if message.startswith('expected ') else ': '}{message}"


_EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "dict": "keys with values",
}


def _unknown(*parts: str) -> str:
    """Describe an unknown key: the allowed ones, and the one that may have been meant, there or elsewhere."""
    *above, last = parts
    places = [key.split(".") for key in _keys(Recipe)]
    allowed = [place[-1] for place in places if place[:-1] == above]
    elsewhere = " or ".join(repr(".".join(place)) for place in places if place[-1] == last)
    near = f"; did you mean {elsewhere}?" if elsewhere else did_you_mean(last, allowed)
    return f"{'.'.join(parts)} is not a key of a recipe, expected one of {', '.join(allowed)}{near}"


def _keys(kind: type[Config], prefix: str = "") -> Iterator[str]:
    """All keys of a recipe, as "model.order"."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield f"{prefix}{field.name}"
        for inner in (hints[field.name], *get_args(hints[field.name])):
            if isinstance(inner, type) and issubclass(inner, Config):
                yield from _keys(inner, f"{prefix}{field.name}.")
