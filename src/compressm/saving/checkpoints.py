"""Checkpoints of a training: one sealed file of tensors and plain values, which runs no code when it is read."""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, SupportsIndex, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from compressm.compression.cutting import ordinary_tensors
from compressm.compression.distributed import renew_wrappers_, unwrapped
from compressm.compression.rollback import archive_bytes
from compressm.compression.several import as_optimizer, as_scheduler, join_, kind_of, leave_, parts_of
from compressm.compression.stored_states import require_optimizer, require_scheduler, restore_precision_, states_of
from compressm.compression.surgery import take_orders_
from compressm.control.validation import as_integer
from compressm.errors import CompressionError, NoSuchFileError, SavingError
from compressm.families.observing import random_state, set_random_state
from compressm.files import replacing, write_by
from compressm.layers.parameters import Kept, is_plain, replace_data, require_idle
from compressm.saving.fitting import (
    followers_in,
    require_contents,
    require_fitting,
    require_followers,
    require_names,
    require_parts,
    require_same_groups,
    require_same_model,
    require_same_sharing,
    require_unheld,
    resized,
    warn_of_left,
)
from compressm.saving.kinds import as_path, require_model, require_state, unreadable
from compressm.saving.orders import group_names
from compressm.saving.rebuilding import (
    by_forms,
    keyed_state,
    module_versions,
    orders_of,
    plain_state,
    require_usable_weights,
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
    if not is_plain(value):
        raise SavingError(f"{where} is a {type(value).__name__}, expected a plain tensor: gather what is sharded")
    if value.layout is not torch.strided:
        raise SavingError(f"{where} is a tensor of the layout {value.layout}, expected a dense one: use to_dense()")
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


@runtime_checkable
class _Followed(Protocol):
    @property
    def followers(self) -> Sequence[nn.Module]:
        """The models that a compressor cuts with its own."""


@runtime_checkable
class _Cutting(Protocol):
    @property
    def model(self) -> nn.Module:
        """The model that a compressor cuts."""


def _cut_by(compressor: object) -> nn.Module | None:
    model = compressor.model if isinstance(compressor, _Cutting) else None
    return model if isinstance(model, nn.Module) else None


def _followers(compressor: object) -> Sequence[nn.Module]:
    return compressor.followers if isinstance(compressor, _Followed) else ()


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
    step: SupportsIndex = 0,
    extra: Any = None,
) -> None:
    """Write the state of everything that is passed, and of the random number generators, into one file.

    The weights of models that follow the compressor (`follow=`) are written too. `extra` is anything made of tensors,
    numbers and text. Writing is atomic: after an error the old file is still there. Call it between steps: gradients
    are not saved. Each of several processes has its own random numbers, and needs its own file to continue exactly.
    """
    if (number := as_integer(step)) is None or number < 0:
        raise SavingError(f"step is {step!r}, expected an integer of at least 0")
    require_model(model)
    require_state("compressor", compressor)
    path = as_path(path)
    if path.is_dir():
        raise SavingError(f"{path} is a directory, expected the name of a file")
    trainer, rates = as_optimizer(optimizer, SavingError), as_scheduler(scheduler, SavingError)
    require_same_model(model, trainer, _cut_by(compressor))
    contents = {
        "format": _FORMAT,
        "version": CHECKPOINT_VERSION,
        **_weights(model),
        "followers": [_weights(follower) for follower in _followers(compressor)],
        "optimizer": _state_of(trainer),
        "groups": None if trainer is None else group_names(model, trainer),
        "scheduler": _state_of(rates),
        "compressor": _state_of(compressor),
        "random": random_state(),
        "step": number,
        "extra": extra,
    }
    require_usable_weights(model)
    try:
        _write(path, contents)
    except RecursionError:
        raise SavingError(f"{path} cannot be written: extra contains itself, or is nested too deeply") from None


def _write(path: Path, contents: Mapping[str, Any]) -> None:
    stored = {name: plain(value, name) for name, value in contents.items()}
    with replacing(path, archive_bytes(stored)) as scratch:
        write_by(partial(torch.save, stored), scratch)
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
    the same objects; so do models that follow the compressor. A file that does not fit model, optimizer or compressor
    is refused before anything is changed; future steps of the compressor's schedule may differ. If a compressor with
    an optimizer holds the model, other orders are loaded only with that optimizer.
    """
    trainer, rates = as_optimizer(optimizer, SavingError), as_scheduler(scheduler, SavingError)
    require_model(model)
    require_idle(model, "load_checkpoint(...)")
    require_state("compressor", compressor)
    require_same_model(model, trainer, _cut_by(compressor))
    # A model that was built in inference mode is loaded there: its tensors may not change outside.
    with nullcontext() if any(value.is_inference() for value in plain_state(model).values()) else ordinary_tensors():
        return _load(as_path(path), model, trainer, rates, compressor)


def _load(
    path: Path, model: nn.Module, trainer: Any | None, rates: Any | None, compressor: Stateful | None
) -> Checkpoint:
    contents = _read(path)
    try:
        added, gone = _require_loadable(contents, model, trainer, rates, compressor)
    except (SavingError, CompressionError) as error:
        raise SavingError(f"{path}: {error}") from error
    followers = _followers(compressor)
    before = _Before((model, *followers), *parts_of(trainer), *parts_of(rates), compressor)
    try:
        before.load_(rates, contents["scheduler"])
        for follower, stored in zip(followers, followers_in(contents), strict=False):
            _load_model(follower, stored, before.undo)
        _load_model(model, contents, before.undo)  # after its followers: averages that do not follow then say so
        if trainer is not None:
            leave_(trainer, gone.values())
            _add_to_groups_(trainer, model, contents["groups"], added)
        before.load_(trainer, contents["optimizer"])
        before.load_(compressor, contents["compressor"])  # after the optimizer
        set_random_state(contents["random"])  # last: nothing may draw before training does
    except BaseException as error:
        before.restore_()
        if isinstance(error, SavingError | CompressionError):
            raise SavingError(f"{path}: {error}") from error
        raise
    return Checkpoint(contents["step"], contents["extra"])


def _require_loadable(
    contents: Mapping[str, Any],
    model: nn.Module,
    optimizer: Any | None,
    scheduler: Any | None,
    compressor: Stateful | None,
) -> tuple[set[str], dict[str, nn.Parameter]]:
    """Refuse everything that does not fit; return the parameters that the model gets, and those that it loses."""
    require_contents(contents)
    require_parts(contents, optimizer=optimizer, scheduler=scheduler, compressor=compressor)
    require_same_sharing(model, contents)
    added, gone = by_forms(model, contents["model"])
    if optimizer is not None:
        require_names(contents["groups"])
        require_same_groups(contents["groups"], group_names(model, optimizer), added, gone.keys())
    require_fitting(model, contents)
    if optimizer is not None:
        shapes = {name: value.shape for name, value in contents["model"].items()}
        require_optimizer(optimizer, contents["optimizer"]["state"], contents["groups"], shapes)
    if scheduler is not None:
        require_scheduler(scheduler, contents["scheduler"]["state"])
    if isinstance(compressor, _Choosy):
        compressor.require_loadable(contents["compressor"]["state"])
    require_unheld(model, contents, () if optimizer is None else parts_of(optimizer))
    if compressor is not None:
        require_followers(contents, _followers(compressor))
    warn_of_left(contents, optimizer=optimizer, scheduler=scheduler, compressor=compressor)
    return added, gone


class _Before:
    """Everything that `load_checkpoint` changes, as it was before: `restore_` puts it back."""

    def __init__(self, models: Sequence[nn.Module], *parts: Any | None) -> None:
        self._models, self._random = [(model, Kept(model), _shapes(model)) for model in models], random_state()
        self.undo = ExitStack()  # for attributes of layers, and what they share
        others = [part for part in parts if part is not None and not _is_optimizer(part)]
        self._states = {id(part): _copied(part.state_dict()) for part in others}
        self._held = [entry for part in parts if hasattr(part, "__dict__") for entry in _containers(vars(part))]
        self._begun: list[Any] = []

    def load_(self, given: Any | None, stored: Mapping[str, Any]) -> None:
        """Let one part, or several of a kind, load a state; each may refuse with any error."""
        if given is None:
            return
        for part, state in zip(parts_of(given), states_of(given, stored["state"]), strict=True):
            self._begun.append(part)
            try:
                part.load_state_dict(state)
                if _is_optimizer(part):
                    restore_precision_(part, state)
            except Exception as error:
                raise SavingError(f"a {type(part).__name__} does not load its state in the file: {error}") from error

    def restore_(self) -> None:
        """Put everything back, in the same objects."""
        changed = [model for model, _, shapes in self._models if _shapes(model) != shapes]
        for _, tensors, _ in self._models:
            tensors.restore_()
        self.undo.close()
        for part in self._begun:
            # An optimizer's own dictionaries are put back below.
            if not _is_optimizer(part):
                part.load_state_dict(self._states[id(part)])
        for held, contents in self._held:
            if isinstance(held, dict):
                held.clear()
                held.update(contents)
            else:
                held[:] = contents
        for model in changed:
            renew_wrappers_(model, list(unwrapped(model).modules()))
        set_random_state(self._random)


def _is_optimizer(part: object) -> bool:
    return hasattr(part, "param_groups") and hasattr(part, "state")


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in plain_state(model).items()}


def _containers(*values: Any) -> list[tuple[Any, Any]]:
    """Every dictionary and list inside these values, with its present contents."""
    found, waiting = dict[int, tuple[Any, Any]](), list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list) and id(value) not in found:
            found[id(value)] = value, value.copy()
            waiting += value.values() if isinstance(value, dict) else value
    return list(found.values())


def _copied(value: Any) -> Any:
    """A deep copy that shares tensors, which no part changes in place when it loads a state."""
    inside = [item for held, _ in _containers(value) for item in (held.values() if isinstance(held, dict) else held)]
    return copy.deepcopy(value, {id(item): item for item in inside if isinstance(item, Tensor)})


def _weights(model: nn.Module) -> dict[str, Any]:
    return {"model": plain_state(model), "orders": orders_of(model), "versions": module_versions(model)}


def _state_of(part: Any | None) -> dict[str, Any] | None:
    return None if part is None else {"kind": kind_of(part), "state": part.state_dict()}


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise SavingError(f"{path} is a directory, expected the file that save_checkpoint wrote")
    if not path.is_file():
        raise NoSuchFileError(f"{path} does not exist: load_checkpoint takes the file that save_checkpoint wrote")
    try:
        require_sealed(path)
        # An open file: torch would read a path that ends in .safetensors as another format.
        with path.open("rb") as file:
            contents = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise unreadable(path, error) from error
    except (RuntimeError, pickle.UnpicklingError) as error:
        # torch's own message advises to run the code in the file.
        raise SavingError(f"{path} holds more than tensors and plain values") from error
    if not isinstance(contents, dict) or contents.get("format") != _FORMAT:
        found = ", ".join(map(str, contents)) if isinstance(contents, dict) else type(contents).__name__
        raise SavingError(f"{path} was not written by save_checkpoint: it holds {found:.200}")
    version = contents.get("version")
    if type(version) is not int or version != CHECKPOINT_VERSION:
        raise SavingError(f"{path} has version {version!r:.40}, this compressm reads version {CHECKPOINT_VERSION}")
    missing = [name for name in _PARTS if name not in contents]
    if missing:
        raise SavingError(f"{path} has no {' and no '.join(missing)}")
    return contents


def _add_to_groups_(optimizer: Any, model: nn.Module, saved: list[list[str | None]], added: Set[str]) -> None:
    """Add the parameters that layers got from the file to the optimizer's groups, at their saved places."""
    state = plain_state(model)
    for group, names in zip(optimizer.param_groups, saved, strict=True):
        for place, name in enumerate(names):
            if name is not None and name in added and isinstance(parameter := state[name], nn.Parameter):
                join_(group, parameter, name, place)


def _load_model(model: nn.Module, contents: Mapping[str, Any], undo: ExitStack) -> None:
    tensors: dict[str, Tensor] = contents["model"]
    changed, is_reformed = resized(model, tensors), plain_state(model).keys() != tensors.keys()
    for name, value in changed.items():
        replace_data(value, value.new_empty(tensors[name].shape))
    take_forms_(model, tensors)
    model.load_state_dict(keyed_state(model, tensors, contents["versions"]))
    if changed or is_reformed:
        take_orders_(model, undo)
    if changed or is_reformed:
        renew_wrappers_(model, list(unwrapped(model).modules()))
    for name, order in orders_of(model).items():
        if order != contents["orders"][name]:
            raise SavingError(f"{name!r} reads as order {order}, the file says {contents['orders'][name]}")
