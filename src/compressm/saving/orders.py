"""State dicts of other orders: a model takes the orders of the tensors that it is about to load."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from compressm.adapters import find
from compressm.compression.cutting import ordinary_tensors
from compressm.compression.several import join_, leave_, name_beside
from compressm.compression.sharding import is_sharded
from compressm.compression.surgery import take_orders_
from compressm.errors import AdapterError, CompressionError, NoSuchFileError, SavingError
from compressm.layers.parameters import Kept, plain_name, replace_data, require_free
from compressm.saving.fitting import require_same_groups
from compressm.saving.kinds import as_path
from compressm.saving.rebuilding import by_forms, expected_shapes, orders_of, plain_state, ssm_layers, take_forms_

Optimizers: TypeAlias = Callable[[], Sequence[Any]]
State: TypeAlias = Mapping[str, Tensor]
Names: TypeAlias = list[list[str | None]]


def accept_orders_(model: nn.Module, optimizers: Optimizers = tuple) -> Any:
    """Let `model.load_state_dict` take state dicts of other orders; return the handle of the hook.

    Layers of this package do so by themselves; those of other packages, such as Mamba in transformers, do with it.
    `optimizers` returns those that train the model then: they forget the moments of resized parameters, which the state
    dict does not have.
    """

    def before_loading(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *rest: object) -> None:
        inside = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        take_orders_of_(module, inside, optimizers())

    register: Callable[..., Any] = model.register_load_state_dict_pre_hook
    return register(before_loading)


def take_orders_of_(model: nn.Module, state_dict: Mapping[str, Any], optimizers: Sequence[Any] = ()) -> list[str]:
    """Give every SSM layer the order and the form of its tensors in a state dict; return the names of those changed.

    Load the state dict next: only changed layers have its values. A layer of which it has nothing stays as it is. An
    optimizer keeps its groups, and forgets the moments of changed layers. After an error nothing has changed.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    given = {plain_name(key, modules): value for key, value in state_dict.items() if isinstance(value, Tensor)}
    own, layers = plain_state(model), ssm_layers(model)
    here = [name for name in layers if any(_is_in(name, key) for key in given)]
    absent = {key: value for key, value in own.items() if not any(_is_in(name, key) for name in here)}
    tensors = absent | given
    changed = _changed(model, here, own, tensors)
    for name in changed:
        _require_whole(name, layers[name], own, given)
        require_free(layers[name], f"{name or 'the model'} has order {orders_of(model)[name]}, the state dict another",
                     optimizers)  # fmt: skip
    if changed:
        _take_(model, changed, own, tensors, optimizers)
    return changed


def take_stored_orders_(model: nn.Module, folder: str | os.PathLike[str], prefix: str = "model.") -> list[str]:
    """Give every SSM layer its order in a checkpoint of `torch.distributed.checkpoint`; return their names.

    `prefix` is what stands before the model's names there. Call it in every process before `fully_shard`, which takes
    the sizes as they are; nothing is sent. Then shard, make the optimizer, and load the checkpoint as always.
    """
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if is_sharded(model):
        raise SavingError(f"{type(model).__name__} is sharded already: call take_stored_orders_ before fully_shard")
    if not Path(as_path(folder), ".metadata").is_file():
        raise NoSuchFileError(f"{folder} has no .metadata: expected a folder that torch.distributed.checkpoint wrote")
    reader, layers = FileSystemReader(folder), list(ssm_layers(model))
    stored = reader.read_metadata().state_dict_metadata
    sizes = {key.removeprefix(prefix): entry for key, entry in stored.items() if key.startswith(prefix)}
    inside = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in sizes.items()
        if isinstance(entry, TensorStorageMetadata) and any(_is_in(name, key) for name in layers)
    }
    if not inside:
        raise SavingError(
            f"{folder} has no tensors of {', '.join(layers[:4]) or 'SSM layers'} after {prefix!r}; it has"
            f" {', '.join(sorted(stored)[:4])}: pass the right prefix="
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each process reads for itself
        load({prefix + key: value for key, value in inside.items()}, storage_reader=reader, no_dist=True)
    return take_orders_of_(model, inside)


def _is_in(layer: str, key: str) -> bool:
    return not layer or key.startswith(f"{layer}.")


def _changed(model: nn.Module, here: Iterable[str], own: State, given: Mapping[str, Tensor]) -> list[str]:
    """The layers of another order or form in the state dict."""
    added, gone = by_forms(model, given)
    found = []
    for name in here:
        resized = (key for key, value in own.items() if key in given and value.shape != given[key].shape)
        if any(_is_in(name, key) for key in (*resized, *added, *gone)):
            found.append(name)
    return found


def _require_whole(name: str, layer: nn.Module, own: State, given: State) -> None:
    """Refuse a part of a layer at another order, as in a checkpoint of several files."""
    _, gone = by_forms(layer, {key.removeprefix(f"{name}."): value for key, value in given.items()})
    missing = [key for key in own if _is_in(name, key) and key not in given]
    missing = [key for key in missing if key.removeprefix(f"{name}.") not in gone]
    if missing:
        raise SavingError(
            f"the state dict has {name or 'the model'} at another order without {', '.join(missing[:4])}: expected all"
            " of a layer in one state dict; save weights in one file, or load by compressm.load_model"
        )


def _take_(model: nn.Module, changed: Sequence[str], own: State, tensors: State, optimizers: Sequence[Any]) -> None:
    before, undo = Kept(model, values=False), ExitStack()
    added, gone = by_forms(model, tensors)
    try:
        with ordinary_tensors():
            for key, value in own.items():
                is_inside = key in tensors and any(_is_in(name, key) for name in changed)
                if is_inside and isinstance(value, nn.Parameter) and value.shape != tensors[key].shape:
                    replace_data(value, tensors[key].to(value.device, value.dtype, copy=True))
            take_forms_(model, tensors)
            for key, value in plain_state(model).items():
                if key in added:
                    value.data.copy_(tensors[key])
            take_orders_(model, undo)
        _require_shapes(model, tensors)
    except BaseException as error:
        before.restore_()
        undo.close()
        if isinstance(error, AdapterError | CompressionError):
            raise SavingError(f"the state dict does not fit the layers of {type(model).__name__}: {error}") from error
        raise
    for optimizer in optimizers:
        _follow_(optimizer, model, changed, added, gone)


def _require_shapes(model: nn.Module, tensors: State) -> None:
    """Refuse a layer whose tensors are of several orders."""
    expected, layers = expected_shapes(model, orders_of(model), tensors), list(ssm_layers(model))
    for key in plain_state(model).keys() & tensors.keys():
        shape, found = expected.get(key), tuple(tensors[key].shape)
        is_known = shape is not None and None not in shape and any(_is_in(name, key) for name in layers)
        if is_known and found != shape:
            raise SavingError(f"{key} has shape {found} in the state dict, expected {shape}, as the rest of its layer")


def _follow_(
    optimizer: Any, model: nn.Module, changed: Sequence[str], added: Iterable[str], gone: Mapping[str, nn.Parameter]
) -> None:
    """Forget moments of the changed layers, and give the optimizer the parameters that they have now."""
    leave_(optimizer, gone.values())
    state, layers = plain_state(model), ssm_layers(model)
    for key, value in state.items():
        if any(_is_in(name, key) for name in changed) and isinstance(value, nn.Parameter):
            optimizer.state.pop(value, None)
    for key in sorted(added):
        name = next(name for name in changed if _is_in(name, key))
        new, leaf = state[key], key.removeprefix(f"{name}.")
        beside = find(model)[name][1].JOINS.get(leaf)
        if isinstance(new, nn.Parameter) and beside is not None:
            origin = layers[name].get_parameter(beside)
            for group in optimizer.param_groups:
                if any(member is origin for member in group["params"]):
                    join_(group, new, name_beside(group, origin, beside, leaf))


def group_names(model: nn.Module, optimizer: Any) -> Names:
    """The names of the parameters in every group; None for one that is not the model's."""
    names: dict[int, str] = {}
    for name, value in plain_state(model).items():
        names.setdefault(id(value), name)
    return [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]


def sort_groups_(optimizer: Any, model: nn.Module, saved: Names) -> None:
    """Put the parameters of groups in their saved order, after a state was loaded, which goes by position.

    Parameters that a cut added are at the end of their group; an optimizer that was made later has them elsewhere.
    """
    present = group_names(model, optimizer)
    if present == saved:
        return
    if [sorted(map(str, names)) for names in present] != [sorted(map(str, names)) for names in saved]:
        require_same_groups(saved, present, set(), set())
    by_name = plain_state(model)
    loaded = [[optimizer.state.pop(member, None) for member in group["params"]] for group in optimizer.param_groups]
    for group, names, states in zip(optimizer.param_groups, saved, loaded, strict=True):
        others = iter([member for member, name in zip(group["params"], present.pop(0), strict=True) if name is None])
        group["params"] = [next(others) if name is None else by_name[name] for name in names]
        for member, state in zip(group["params"], states, strict=True):
            if state is not None:
                optimizer.state[member] = state
