"""Folders that `save_pretrained` of transformers wrote, also with layers of unequal orders, which it cannot read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from compressm.errors import NoSuchFileError, SavingError
from compressm.saving.rebuilding import Description, described

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def is_pretrained(folder: Path) -> bool:
    """Whether its config is one of transformers; ours may stand beside a file that says it all, and be broken."""
    try:
        return (folder / _CONFIG).is_file() and "model_type" in _json(folder / _CONFIG)
    except SavingError:
        return False


def read_pretrained(folder: Path) -> tuple[Description, dict[str, Tensor]]:
    """What the model in the folder is made of, and its tensors."""
    config = _json(folder / _CONFIG)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise SavingError(f"the config has the architectures {names!r}, expected one")
    stored = {"kind": f"transformers.{names[0]}", "config": config}
    if (folder / _GENERATION).is_file():
        stored["generation_config"] = _json(folder / _GENERATION)
    return described(stored), _tensors(folder)


def _tensors(folder: Path) -> dict[str, Tensor]:
    files = [_WEIGHTS]
    if (folder / _INDEX).is_file():
        places = _json(folder / _INDEX).get("weight_map")
        if not isinstance(places, dict):
            raise SavingError(f"{_INDEX} has no weight_map")
        files = sorted(set(places.values()))
    return dict(pair for name in files for pair in _tensors_in(folder / Path(name).name))


def _tensors_in(file: Path) -> Iterator[tuple[str, Tensor]]:
    if not file.is_file():
        raise NoSuchFileError(f"{file} does not exist")
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            # Copies: the tensors of safetensors are windows into the file.
            yield from ((name, opened.get_tensor(name).clone()) for name in opened.keys())  # noqa: SIM118
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise SavingError(f"{file} is not a whole safetensors file: {error}") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SavingError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise SavingError(f"{file} holds {found!r:.80}, expected an object")
    return found
