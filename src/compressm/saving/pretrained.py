"""Folders that `save_pretrained` of transformers wrote, also with layers of unequal orders, which it cannot load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from compressm.errors import NoSuchFileError, SavingError
from compressm.saving.rebuilding import Description, build, describe

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def is_pretrained(folder: Path) -> bool:
    """True if the folder's config is one of transformers; a broken config may be ours."""
    try:
        return (folder / _CONFIG).is_file() and "model_type" in _json(folder / _CONFIG)
    except SavingError:
        return False


def read_pretrained(folder: Path) -> tuple[Description, dict[str, Tensor]]:
    """The description of the model in the folder, and its tensors."""
    config = _json(folder / _CONFIG)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise SavingError(f"the config has the architectures {names!r}, expected one")
    stored = {"kind": f"transformers.{names[0]}", "config": config}
    if (folder / _GENERATION).is_file():
        stored["generation_config"] = _json(folder / _GENERATION)
    return describe(build(stored)), _tensors(folder)


def _tensors(folder: Path) -> dict[str, Tensor]:
    files = [_WEIGHTS]
    if (folder / _INDEX).is_file():
        places = _json(folder / _INDEX).get("weight_map")
        if not isinstance(places, dict):
            raise SavingError(f"{_INDEX} has no weight_map")
        files = sorted(set(places.values()))
    missing = [name for name in files if not (folder / Path(name).name).is_file()]
    if missing:
        raise NoSuchFileError(f"{folder / Path(missing[0]).name} does not exist")
    contents = (read_safetensors(folder / Path(name).name)[1] for name in files)
    return {name: tensor for tensors in contents for name, tensor in tensors.items()}


def read_safetensors(file: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a file."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            # Copies: the tensors of safetensors are windows into the file.
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
            return opened.metadata() or {}, tensors
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
