"""Checkpoints of a training: one sealed file of tensors and plain values, which runs no code when it is read."""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, Protocol, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from compressm.compression.distributed import renew_wrappers_, require_rewrappable, unwrapped, wrappers_in
from compressm.compression.optimizer import as_optimizer, as_scheduler, join_, kind_of, leave_, parts_of
from compressm.compression.rollback import tensor_bytes
from compressm.compression.surgery import attributes_of, take_orders_
from compressm.errors import CompressionError, NoSuchFileError, SavingError
from compressm.families.observing import random_state, set_random_state
from compressm.files import replacing
from compressm.layers.parameters import replace_data
from compressm.saving.kinds import as_path, require_model, require_state
from compressm.saving.rebuilding import (
    by_forms,
    expected_shapes,
    keyed_state,
    module_versions,
    orders_of,
    plain_state,
    require_fit,
    require_orders,
    require_values,
    take_forms_,
)

_LEAVES = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)
_ALLOWED = "tensors, numbers, text, None, and dicts, lists, tuples and sets of them"


def plain(value: Any, where: str) -> Any:
    """The value in types that torch.load(weights_only=True) reads; for others an error names their place."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if isinstance(value, Tensor):
        return _stored(value, where)
    if isinstance(value, dict):
        items = [(plain(key, f"a key of {where}"), plain(item, f"{where}[{key!r}]")) for key, item in value.items()]
        # MultiStepLR needs its milestones as a Counter.
        return kind(dict(items)) if kind in (Counter, OrderedDict) else dict(items)
    if kind in (list, tuple, set):
        return kind(plain(item, f"{where}[{k}]") for k, item in enumerate(value))
    if isinstance(value, np.generic):
        return plain(value.item(), where)
    for leaf in (int, float, str):
        if isinstance(value, leaf) and not isinstance(value, Enum):
            return leaf(value)
    raise SavingError(f"{where} is a {kind.__module__}.{kind.__qualname__}, expected {_ALLOWED}")


def _stored(value: Tensor, where: str) -> Tensor:
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise SavingError(f"{where} is a {type(value).__name__}, expected a plain tensor: gather what is sharded")
    detached = value.detach()
    # torch writes the whole memory behind a tensor, even that outside a slice.
    return detached.clone() if detached.untyped_storage().nbytes() > detached.nbytes else detached


_MARK = b"compressm sha256 "
_SEAL = len(_MARK) + hashlib.sha256().digest_size * 2
_END = struct.Struct("<4s16xH")  # the last record of an archive: its signature, and the length of the comment
_END_SIGNATURE = b"PK\x05\x06"


def seal(path: Path) -> None:
    """Append the digest of a zip file to it, as its comment; it must have none."""
    with path.open("r+b") as file:
        file.seek(-_END.size, os.SEEK_END)
        signature, comment = _END.unpack(file.read(_END.size))
        assert (signature, comment) == (_END_SIGNATURE, 0)
        file.seek(-2, os.SEEK_END)
        file.write(struct.pack("<H", _SEAL))
        digest = _digest(file, file.tell())
        file.write(_MARK + digest)


def require_sealed(path: Path) -> None:
    """Refuse a file that differs in any bit from the sealed one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(max(size - _SEAL, 0))
        found = file.read()
        if size < _SEAL or not found.startswith(_MARK):
            raise SavingError(
                f"{path} is not a whole checkpoint: {size} bytes that begin with {start!r} and do not end with their "
                "digest: the end is missing, or save_checkpoint did not write it"
            )
        if _digest(file, size - _SEAL) != found.removeprefix(_MARK):
            raise SavingError(f"{path} is damaged: its {size} bytes do not have the SHA-256 at their end")


def _digest(file: BinaryIO, size: int) -> bytes:
    """The digest of the first `size` bytes; the file's position is then after them."""
    total = hashlib.sha256()
    file.seek(0)
    while size > 0:
        part = file.read(min(size, 1 << 20))
        total.update(part)
        size -= len(part)
    return total.hexdigest().encode()


CHECKPOINT_VERSION = 1

_FORMAT = "compressm checkpoint"
_PARTS = ("model", "orders", "versions", "optimizer", "groups", "scheduler", "compressor", "random", "step", "extra")


@runtime_checkable
class Stateful(Protocol):
    """Something with a state to save and restore: a scheduler, a compressor."""

    def state_dict(self) -> Any:
        """The state: tensors, numbers, text, and containers of them."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore a state."""


@runtime_checkable
class _Choosy(Protocol):
    def require_loadable(self, state: Mapping[str, Any]) -> None:
        """Refuse a state to continue from, as a compressor refuses a schedule with another past."""


@final
@dataclass(frozen=True)
class Checkpoint:
    """The step of a saved training, and the `extra` that was saved with it."""

    step: int
    extra: Any


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: Stateful | Sequence[Stateful] | None = None,
    compressor: Stateful | None = None,
    step: int = 0,
    extra: Any = None,
) -> None:
    """Write the state of everything that is passed, and of the random number generators, into one file.

    `extra` is anything made of tensors, numbers and text. Writing is atomic: after an error the old file is still
    there. Call it between steps: gradients are not saved. Each of several processes has its own random numbers, and
    needs its own file to continue exactly.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise SavingError(f"step is {step!r}, expected an integer of at least 0")
    require_model(model)
    require_state("compressor", compressor)
    path = as_path(path)
    if path.is_dir():
        raise SavingError(f"{path} is a directory, expected the name of a file")
    trainer, rates = as_optimizer(optimizer, SavingError), as_scheduler(scheduler, SavingError)
    contents = {
        "format": _FORMAT,
        "version": CHECKPOINT_VERSION,
        "model": plain_state(model),
        "orders": orders_of(model),
        "versions": module_versions(model),
        "optimizer": _state_of(trainer),
        "groups": None if trainer is None else _groups(model, trainer),
        "scheduler": _state_of(rates),
        "compressor": _state_of(compressor),
        "random": random_state(),
        "step": step,
        "extra": extra,
    }
    stored = {name: plain(value, name) for name, value in contents.items()}
    with replacing(path, tensor_bytes(stored)) as scratch:
        with scratch.open("wb") as file:
            torch.save(stored, file)
        # torch writes checksums but does not verify them: it would load weights with flipped bits.
        seal(scratch)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: Stateful | Sequence[Stateful] | None = None,
    compressor: Stateful | None = None,
) -> Checkpoint:
    """Restore the saved state of everything that is passed, and of the random number generators.

    The model may have larger orders, as it was built: its layers take the orders of the file, and its parameters stay
    the same objects. A file that does not fit model, optimizer or compressor is refused before anything is changed;
    future steps of the compressor's schedule may differ.
    """
    trainer, rates = as_optimizer(optimizer, SavingError), as_scheduler(scheduler, SavingError)
    require_model(model)
    require_state("compressor", compressor)
    contents = _read(as_path(path))
    try:
        _require_parts(contents, optimizer=trainer, scheduler=rates, compressor=compressor)
        added, gone = by_forms(model, contents["model"])
        if trainer is not None:
            _require_same_groups(contents["groups"], _groups(model, trainer), added, gone.keys())
            _require_same_shares(contents["optimizer"]["state"], trainer)
        _require_fitting(model, contents)
        if isinstance(compressor, _Choosy):
            compressor.require_loadable(contents["compressor"]["state"])
        # A scheduler cannot check a state without loading it, so it loads first, alone.
        if rates is not None:
            _load_scheduler(rates, contents["scheduler"]["state"])
    except (SavingError, CompressionError) as error:
        raise SavingError(f"{path}: {error}") from error
    _load_model(model, contents)
    if trainer is not None:
        leave_(trainer, gone.values())
        _add_to_groups_(trainer, model, contents["groups"], added)
    # The compressor comes after the optimizer. Random numbers come last: nothing may draw from them before training.
    for part, name in ((trainer, "optimizer"), (compressor, "compressor")):
        if part is not None:
            part.load_state_dict(contents[name]["state"])
    set_random_state(contents["random"])
    return Checkpoint(contents["step"], contents["extra"])


def _load_scheduler(scheduler: Stateful, state: dict[str, Any]) -> None:
    before = copy.deepcopy(scheduler.state_dict())
    try:
        scheduler.load_state_dict(state)
    except Exception as error:
        scheduler.load_state_dict(before)
        raise SavingError(
            f"the scheduler is a {kind_of(scheduler)} that does not load the state in the file: {error}"
        ) from error


def _state_of(part: Any | None) -> dict[str, Any] | None:
    return None if part is None else {"kind": kind_of(part), "state": part.state_dict()}


def _groups(model: nn.Module, optimizer: Any) -> list[list[str | None]]:
    """The names of the parameters in every group; None for one that is not the model's."""
    names: dict[int, str] = {}
    for name, value in plain_state(model).items():
        names.setdefault(id(value), name)
    return [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise NoSuchFileError(f"{path} does not exist: load_checkpoint takes the file that save_checkpoint wrote")
    require_sealed(path)
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        # torch's own message advises to run the code in the file.
        raise SavingError(f"{path} holds more than tensors and plain values") from error
    if not isinstance(contents, dict) or contents.get("format") != _FORMAT:
        found = ", ".join(map(str, contents)) if isinstance(contents, dict) else type(contents).__name__
        raise SavingError(f"{path} was not written by save_checkpoint: it holds {found:.200}")
    if contents.get("version") != CHECKPOINT_VERSION:
        version = contents.get("version")
        raise SavingError(f"{path} has version {version!r}, this compressm reads version {CHECKPOINT_VERSION}")
    missing = [name for name in _PARTS if name not in contents]
    if missing:
        raise SavingError(f"{path} has no {' and no '.join(missing)}")
    return contents


def _require_parts(contents: Mapping[str, Any], **given: object) -> None:
    """Refuse a file without the state of a given part, or with that of another class."""
    for name, part in given.items():
        if part is None:
            continue
        stored = contents[name]
        if stored is None:
            raise SavingError(f"it was saved without a {name}")
        if stored["kind"] != kind_of(part):
            one = len(parts_of(part)) == 1
            here = f"this one is a {kind_of(part)}" if one else f"here it is {kind_of(part)}, in this order"
            raise SavingError(f"it was saved with the {name} {stored['kind']}, {here}")


def _require_same_groups(
    saved: list[list[str | None]], here: list[list[str | None]], added: Set[str], gone: Set[str]
) -> None:
    """Refuse other groups: an optimizer's state goes by position, so parameters would get the state of others.

    `added` parameters are still missing in the model, and `gone` ones will be removed from it.
    """
    saved = [[name for name in group if name not in added] for group in saved]
    here = [[name for name in group if name not in gone] for group in here]
    if [len(group) for group in saved] != [len(group) for group in here]:
        sizes = [len(group) for group in saved], [len(group) for group in here]
        raise SavingError(f"the optimizer was saved with groups of {sizes[0]} parameters, this one has {sizes[1]}")
    pairs = [pair for groups in zip(saved, here, strict=True) for pair in zip(*groups, strict=True)]
    other = next(((then, now) for then, now in pairs if then != now), None)
    if other is not None:
        raise SavingError(f"the optimizer was saved with {other[0]!r} where this one has {other[1]!r}")


def _require_same_shares(states: Any, optimizer: Any) -> None:
    """Refuse groups that are shared out among several optimizers in another way."""
    parts = parts_of(optimizer)
    if len(parts) > 1:
        saved, here = ([len(each["param_groups"]) for each in states], [len(part.param_groups) for part in parts])
        if saved != here:
            raise SavingError(f"the optimizers were saved with {saved} groups, these have {here}")


def _add_to_groups_(optimizer: Any, model: nn.Module, saved: list[list[str | None]], added: Set[str]) -> None:
    """Add the parameters that layers got from the file to the optimizer's groups, at their saved places."""
    state = plain_state(model)
    for group, names in zip(optimizer.param_groups, saved, strict=True):
        for place, name in enumerate(names):
            if name is not None and name in added and isinstance(parameter := state[name], nn.Parameter):
                join_(group, parameter, name, place)


def _require_fitting(model: nn.Module, contents: Mapping[str, Any]) -> None:
    tensors: dict[str, Tensor] = contents["model"]
    orders = require_orders(model, contents["orders"])
    require_values(model, tensors)
    require_fit(tensors, expected_shapes(model, orders, tensors))
    for name, value in plain_state(model).items():
        if name in tensors and value.dtype != tensors[name].dtype:
            raise SavingError(f"{name} was saved as {tensors[name].dtype}, the model's is {value.dtype}")
    resized = _resized(model, tensors)
    if resized:
        attributes_of(model)  # refuses a model without an attribute that changes with the order
    if resized or plain_state(model).keys() != tensors.keys():
        for wrapper in wrappers_in(model):
            require_rewrappable(wrapper)


def _resized(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """The parameters that have another shape in the file."""
    return {
        name: value
        for name, value in plain_state(model).items()
        if isinstance(value, nn.Parameter) and name in tensors and value.shape != tensors[name].shape
    }


def _load_model(model: nn.Module, contents: Mapping[str, Any]) -> None:
    tensors: dict[str, Tensor] = contents["model"]
    resized, reformed = _resized(model, tensors), plain_state(model).keys() != tensors.keys()
    for name, value in resized.items():
        replace_data(value, value.new_empty(tensors[name].shape))
    take_forms_(model, tensors)
    model.load_state_dict(keyed_state(model, tensors, contents["versions"]))
    if resized:
        take_orders_(model)
    if resized or reformed:
        renew_wrappers_(model, list(unwrapped(model).modules()))
