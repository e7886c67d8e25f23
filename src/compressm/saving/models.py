"""Models on disk: safetensors with a JSON config inside, without pickle; folders of transformers are read too."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from compressm.compression.cutting import ordinary_tensors
from compressm.errors import NoSuchFileError, SavingError
from compressm.files import replacing
from compressm.saving.kinds import as_path, require_model, unreadable
from compressm.saving.rebuilding import (
    Description,
    build,
    describe,
    filled_by,
    first_names,
    plain_modules,
    plain_state,
    rebuild,
    require_usable_weights,
)

FORMAT_VERSION = 1

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_KEY, _COMMIT = "compressm", "commit"  # the keys of the config, and of a run's commit, in the file's header


def save_model(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the model, with every layer at its order, to `path/model.safetensors` and its config to `path/config.json`.

    A path that ends in .safetensors is a single file. Writing is atomic: after an error the old files are still there.
    Wrappers such as DistributedDataParallel and torch.compile are left out. Only one of several processes saves.
    """
    write_model(model, path)


def write_model(model: nn.Module, path: str | os.PathLike[str], *, commit: str | None = None) -> None:
    """Do as `save_model`; `commit` of the run that trained the model goes into the header of the file."""
    require_model(model)
    path = as_path(path)
    target = _to_write(path)
    core = plain_modules(model)[""]
    description, tensors = describe(core), _tensors(core)
    require_usable_weights(core)
    rebuild(description, tensors)  # a model that could not be loaded is not written
    config = {"version": FORMAT_VERSION, **asdict(description)}
    config["sha256"] = _digest(config, tensors)
    try:
        header = {"format": "pt", _KEY: json.dumps(config, allow_nan=False)}
        weights = _with_ordered_header(save(tensors, header if commit is None else header | {_COMMIT: commit}))
    except SafetensorError as error:
        raise SavingError(f"{target} cannot be written: {error}") from error
    if target == path:
        _write(target, weights)
        return
    copy = (json.dumps(config, indent=2) + "\n").encode()
    # Both files are written before the first is replaced: on a full disk both stay as they were.
    with replacing(target.with_name(_CONFIG), len(copy)) as scratch:
        scratch.write_bytes(copy)
        _write(target, weights)


def _write(target: Path, parts: Sequence[bytes | memoryview]) -> None:
    with replacing(target, sum(map(len, parts))) as scratch, scratch.open("wb") as file:
        file.writelines(parts)


def _with_ordered_header(weights: bytes) -> tuple[bytes, memoryview]:
    """The parts of the same file with its metadata in one order: safetensors writes it in a random one."""
    size = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    ordered = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # Data begin at a multiple of 8 bytes; spaces fill the header up to it.
    ordered += b" " * (-len(ordered) % 8)
    return len(ordered).to_bytes(8, "little") + ordered, memoryview(weights)[8 + size :]


def load_model(
    path: str | os.PathLike[str], *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """The model that `save_model` wrote, in evaluation mode, on `device` (default CPU), in `dtype` (default its own).

    Nothing is unpickled: only our classes and `savable` ones are built. If transformers is imported, a folder may also
    come from its `save_pretrained`.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise SavingError(f"dtype is {dtype!r}, expected a floating-point dtype of torch")
    path = as_path(path)
    _require_device(device)
    pretrained = is_pretrained(path)
    source = path if pretrained else _to_read(path)
    with ordinary_tensors():
        config, tensors = ({}, {}) if pretrained else _read(source)
        try:
            description, tensors = read_pretrained(source) if pretrained else (_described(config, tensors), tensors)
            model = rebuild(description, {name: _moved(value, device, dtype) for name, value in tensors.items()}).eval()
        except SavingError as error:
            raise SavingError(f"{source}: {error}") from error
    if not pretrained and source != path:
        _compare_with_copy(source, config)
    return model


def commit_of(path: Path) -> str | None:
    """The commit of the run that trained a saved model, if the file says it."""
    with safe_open(_to_read(path), framework="pt") as opened:
        return (opened.metadata() or {}).get(_COMMIT)


def _require_device(device: object) -> None:
    """Refuse a device that is not here, or that holds no values."""
    if device is None:
        return
    try:
        made = torch.empty(0, device=device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SavingError(f"device is {device!r:.100}, expected a device of torch that is here: {reason}") from None
    if made.is_meta:
        raise SavingError(f"device is {device!r}, which holds no values, expected the CPU or a GPU")


def _to_write(path: Path) -> Path:
    if path.suffix == ".safetensors" and not path.is_dir():
        return path
    if path.exists() and not path.is_dir():
        raise SavingError(f"{path} is a file, expected a directory or a name that ends in .safetensors")
    return path / _WEIGHTS


def _to_read(path: Path) -> Path:
    source = path / _WEIGHTS if path.is_dir() else path
    if not source.is_file():
        raise NoSuchFileError(f"{source} does not exist: load_model takes what save_model was given")
    return source


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """A contiguous copy of every tensor on the CPU, once each."""
    state = plain_state(model)
    again = first_names(state)
    empty = [name for name, value in state.items() if value.is_meta]
    if empty:
        raise SavingError(f"{empty[0]} is on the meta device: it has no values to save")
    copies = {name: value.detach().cpu() for name, value in state.items() if name not in again}
    return {name: value.clone(memory_format=torch.contiguous_format) for name, value in copies.items()}


def _read(source: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    metadata, tensors = read_safetensors(source)
    if _KEY not in metadata:
        found = ", ".join(sorted(metadata)) or "nothing"
        said = f"{source} was not written by save_model: its header has {found}, expected {_KEY!r}"
        raise SavingError(f"{said}{_about_config(source.with_name(_CONFIG))}")
    try:
        config = json.loads(metadata[_KEY])
    except (ValueError, RecursionError) as error:
        raise SavingError(f"{source}: the config in its header is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SavingError(f"{source}: the config in its header is {config!r:.80}, expected an object")
    return config, tensors


def _about_config(path: Path) -> str:
    """The end of an error about a config.json that cannot be read; empty if it can, or if there is none."""
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, RecursionError) as error:
        return f"; {path.name} beside it cannot be read: {error}"
    return ""


def _described(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Description:
    """The description in a config; another version or another digest is refused."""
    version = config.get("version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise SavingError(f"the format has version {version!r}, this compressm reads version {FORMAT_VERSION}")
    if config.get("sha256") != _digest(config, tensors):
        raise SavingError("the contents are not those that were saved: they do not have the SHA-256 in the config")
    return Description.from_dict({name: value for name, value in config.items() if name not in ("version", "sha256")})


def _digest(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the config without its digest, and of every tensor with its name, dtype and shape."""
    rest = {name: value for name, value in config.items() if name != "sha256"}
    total = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _moved(value: Tensor, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    return value.to(device=device, dtype=dtype if value.is_floating_point() else None)


def _compare_with_copy(source: Path, config: Mapping[str, Any]) -> None:
    """Warn about a config.json that differs from the loaded config, after an edit or a crash."""
    copy = source.with_name(_CONFIG)
    if not copy.is_file():
        return
    try:
        same = json.loads(copy.read_text(encoding="utf-8")) == config
    except (OSError, ValueError, RecursionError):
        same = False
    if not same:
        warnings.warn(f"{copy} differs from the config in {source.name}, which was loaded", stacklevel=3)


_GENERATION, _INDEX = "generation_config.json", "model.safetensors.index.json"


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
    tensors = _pretrained_tensors(folder)
    with filled_by(tensors):
        return describe(build(stored)), tensors


def _pretrained_tensors(folder: Path) -> dict[str, Tensor]:
    files = [_WEIGHTS]
    if (folder / _INDEX).is_file():
        places = _json(folder / _INDEX).get("weight_map")
        if not isinstance(places, dict):
            raise SavingError(f"{_INDEX} has no weight_map")
        odd = [place for place in places.values() if not isinstance(place, str) or not Path(place).name]
        if odd:
            raise SavingError(f"{_INDEX} has {odd[0]!r:.80} in its weight_map, expected names of files")
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
    except OSError as error:
        raise unreadable(file, error) from error
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise SavingError(f"{file} is not a whole safetensors file: {error}") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(file, error) from error
    except (ValueError, RecursionError) as error:
        raise SavingError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise SavingError(f"{file} holds {found!r:.80}, expected an object")
    return found
