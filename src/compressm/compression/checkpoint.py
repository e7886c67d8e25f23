"""Training on disk: all that it takes to go on, bit for bit on the CPU, before, between or after cuts."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from compressm.compression.attributes import attributes_of, take_orders_
from compressm.compression.fitting import (
    by_forms,
    expected_shapes,
    require_fit,
    require_orders,
    require_values,
    take_forms_,
)
from compressm.compression.groups import join_, leave_
from compressm.compression.naming import keyed_state, module_versions, orders_of, plain_state
from compressm.compression.plain import plain
from compressm.compression.random_state import random_state, set_random_state
from compressm.compression.sealing import require_sealed, seal
from compressm.compression.wrapping import renew_wrappers_, require_rewrappable, unwrapped, wrappers_in
from compressm.errors import CompressionError, NoSuchFileError, SavingError
from compressm.files import replacing
from compressm.layers.parameters import replace_data

CHECKPOINT_VERSION = 1

_FORMAT = "compressm checkpoint"
_PARTS = ("model", "orders", "versions", "optimizer", "groups", "scheduler", "compressor", "random", "step", "extra")


@runtime_checkable
class Stateful(Protocol):
    """What can be stopped and go on: a scheduler, a compressor."""

    def state_dict(self) -> Any:
        """Tensors, numbers, text, and containers of them."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """The inverse."""


@runtime_checkable
class _Choosy(Protocol):
    def require_loadable(self, state: Mapping[str, Any]) -> None:
        """Refuse what cannot be gone on from, as a compressor does a schedule with another past."""


@final
@dataclass(frozen=True)
class Checkpoint:
    """Where training was, and what else was saved with it."""

    step: int
    extra: Any


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Stateful | None = None,
    compressor: Stateful | None = None,
    step: int = 0,
    extra: Any = None,
) -> None:
    """Write the state of all that is given, with that of the random number generators, into one file.

    `extra` is anything made of tensors, numbers and text. Either the new checkpoint is there afterwards, or what was
    there before. To be called between steps: gradients are not saved. Of several processes each has random numbers of
    its own, and a file of its own if they are to go on exactly.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise SavingError(f"step is {step!r}, expected an integer of at least 0")
    if Path(path).is_dir():
        raise SavingError(f"{path} is a directory, expected the name of a file")
    contents = {
        "format": _FORMAT,
        "version": CHECKPOINT_VERSION,
        "model": plain_state(model),
        "orders": orders_of(model),
        "versions": module_versions(model),
        "optimizer": _state_of(optimizer),
        "groups": None if optimizer is None else _groups(model, optimizer),
        "scheduler": _state_of(scheduler),
        "compressor": _state_of(compressor),
        "random": random_state(),
        "step": step,
        "extra": extra,
    }
    stored = {name: plain(value, name) for name, value in contents.items()}
    with replacing(Path(path)) as scratch:
        torch.save(stored, scratch)
        # torch writes the checksums of its records and does not look at them: it would load weights with flipped bits.
        seal(scratch)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Stateful | None = None,
    compressor: Stateful | None = None,
) -> Checkpoint:
    """Give everything the state it was saved with, and the random number generators theirs.

    The model may be as it was built, with larger orders: its layers take those of the file, and its parameters stay
    the same objects. What does not fit model, optimizer or compressor is refused before anything is changed; steps of
    the compressor's schedule that are still to come may be others.
    """
    contents = _read(Path(path))
    try:
        _require_parts(contents, optimizer=optimizer, scheduler=scheduler, compressor=compressor)
        added, gone = by_forms(model, contents["model"])
        if optimizer is not None:
            _require_same_groups(contents["groups"], _groups(model, optimizer), added, gone.keys())
        _require_fitting(model, contents)
        if isinstance(compressor, _Choosy):
            compressor.require_loadable(contents["compressor"]["state"])
        # A scheduler cannot be asked whether it would load a state: it loads first, alone.
        if scheduler is not None:
            _load_scheduler(scheduler, contents["scheduler"]["state"])
    except (SavingError, CompressionError) as error:
        raise SavingError(f"{path}: {error}") from error
    _load_model(model, contents)
    if optimizer is not None:
        leave_(optimizer, gone.values())
        _add_to_groups_(optimizer, model, contents["groups"], added)
    # The compressor after what it changes, random numbers last: nobody may draw from them before training goes on.
    for part, name in ((optimizer, "optimizer"), (compressor, "compressor")):
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
        kind = type(scheduler).__name__
        raise SavingError(f"the scheduler is a {kind} that does not load the state in the file: {error}") from error


def _state_of(part: Stateful | Optimizer | None) -> dict[str, Any] | None:
    return None if part is None else {"kind": type(part).__name__, "state": part.state_dict()}


def _groups(model: nn.Module, optimizer: Optimizer) -> list[list[str | None]]:
    """The parameters of every group by name; None for one that is not the model's."""
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
        # Without torch's own words, which advise to run what is in the file.
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
    """For everything given, the state of one of its kind."""
    for name, part in given.items():
        if part is None:
            continue
        stored = contents[name]
        if stored is None:
            raise SavingError(f"it was saved without a {name}")
        if stored["kind"] != type(part).__name__:
            raise SavingError(f"it was saved with the {name} {stored['kind']}, this one is a {type(part).__name__}")


def _require_same_groups(
    saved: list[list[str | None]], here: list[list[str | None]], added: Set[str], gone: Set[str]
) -> None:
    """The optimizer's state goes by position: another order of parameters would give them each other's.

    Parameters that the model does not have yet are `added` later, others are `gone` by then.
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


def _add_to_groups_(optimizer: Optimizer, model: nn.Module, saved: list[list[str | None]], added: Set[str]) -> None:
    """Parameters that layers have since they took the forms of the file, where the optimizer had them."""
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
        attributes_of(model)  # what goes with orders has a place
    if resized or plain_state(model).keys() != tensors.keys():
        for wrapper in wrappers_in(model):
            require_rewrappable(wrapper)


def _resized(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Parameters that have another shape in the file."""
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
