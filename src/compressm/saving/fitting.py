"""Checks of a checkpoint against model and optimizer; all are made before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from compressm.compression.distributed import Processes, require_rewrappable, wrappers_in
from compressm.compression.several import kind_of, parts_of
from compressm.compression.surgery import attributes_of
from compressm.errors import CompressionError, SavingError, warn_caller
from compressm.families.observing import require_random_state
from compressm.layers.parameters import require_free
from compressm.saving.rebuilding import (
    by_forms,
    expected_shapes,
    first_names,
    orders_of,
    plain_modules,
    plain_state,
    require_fit,
    require_orders,
    require_values,
    ssm_layers,
)

Groups = Sequence[Sequence[str | None]]

_CURE = "averages are saved with the compressor that has them in follow=[...], other models in files of their own"
_TRAINED = ("optimizer", "scheduler", "compressor")


def require_same_model(model: nn.Module, optimizer: Any | None, cut: nn.Module | None) -> None:
    """Refuse an optimizer, each of several, and a compressor (by the model that it cuts) of another model than this."""
    kind, own = type(model).__name__, {id(parameter) for parameter in model.parameters()}
    parts = () if optimizer is None else parts_of(optimizer)
    for k, part in enumerate(parts):
        held = {id(parameter) for group in part.param_groups for parameter in group["params"]}
        if held and held.isdisjoint(own):
            which = f"optimizer[{k}]" if len(parts) > 1 else "optimizer"
            raise SavingError(
                f"{which}, a {type(part).__name__}, holds no parameter of model, a {kind}: expected the optimizer of"
                f" this model, not of another or of a copy; {_CURE}"
            )
    layers = () if cut is None else ssm_layers(cut).values()
    if layers and set(layers).isdisjoint(model.modules()):
        raise SavingError(
            f"compressor cuts no layer of model, a {kind}: expected the compressor of this model, not of another or of"
            f" a copy; {_CURE}"
        )


def require_contents(contents: Mapping[str, Any]) -> None:
    """Refuse parts of a checkpoint that are not of the kind that `save_checkpoint` writes."""
    require_weights(contents)
    followers_in(contents)
    step = contents["step"]
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise SavingError(f"step is {step!r:.80}, expected an integer of at least 0")
    for name in _TRAINED:
        stored = contents[name]
        if stored is not None and (not isinstance(stored, Mapping) or not {"kind", "state"} <= set(stored)):
            raise SavingError(f"the {name} is stored as {stored!r:.80}, expected its kind and state")
    try:
        require_random_state(contents["random"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, OverflowError) as error:
        raise SavingError(
            f"the random state in the file cannot be restored: {error or type(error).__name__}"
        ) from error


def require_weights(stored: Mapping[str, Any]) -> None:
    """Refuse weights that are not tensors by name, and versions of modules that are not numbers."""
    tensors, versions = stored["model"], stored["versions"]
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in tensors.items()
    ):
        raise SavingError(f"the model is stored as {tensors!r:.80}, expected tensors by name")
    named = versions.items() if isinstance(versions, Mapping) else [(None, versions)]
    for name, entry in named:
        version = entry.get("version") if isinstance(entry, Mapping) else ""
        # torch takes None for the first version.
        if not isinstance(name, str) or isinstance(version, bool) or not isinstance(version, int | None):
            raise SavingError(
                f"the versions of modules hold {entry!r:.80} for {name!r:.40}, expected the name of a module and"
                " {'version': number}"
            )


def followers_in(contents: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The weights of followers in a file; files of earlier versions have none."""
    stored: Any = contents.get("followers", [])
    kinds = {"model", "orders", "versions"}
    if not isinstance(stored, list) or not all(isinstance(own, Mapping) and kinds <= set(own) for own in stored):
        raise SavingError(f"the followers are stored as {stored!r:.80}, expected a list of their weights")
    return stored


def require_followers(contents: Mapping[str, Any], followers: Sequence[nn.Module]) -> None:
    """Refuse weights that do not fit the followers; a warning says if only the file, or only the compressor, has any.

    Of several processes some may have no followers, and load the file of one that has.
    """
    stored = followers_in(contents)
    for k, (own, follower) in enumerate(zip(stored, followers, strict=False)):
        try:
            require_weights(own)
            require_same_sharing(follower, own)
            require_fitting(follower, own)
        except (SavingError, CompressionError) as error:
            raise SavingError(f"follow[{k}]: {error}") from error
    if stored and followers and len(stored) != len(followers):
        raise SavingError(f"it has the weights of {len(stored)} followers, the compressor has {len(followers)}")
    named = ", ".join(f"follow[{k}]" for k in range(max(len(stored), len(followers))))
    if followers and not stored:
        warn_caller(
            f"the file has no weights of {named}, and nothing is loaded there: before the next step, load the saved"
            " state of each by its own load_state_dict, or the weights of the model"
        )
    if stored and not followers and Processes().is_first:
        warn_caller(
            f"the file has weights of {named}, which are not loaded, because this compressor was made without follow;"
            " make it with the same follow=[...] to load them"
        )


def require_unheld(model: nn.Module, contents: Mapping[str, Any], optimizers: Sequence[Any]) -> None:
    """Refuse to resize layers under the optimizer of a compressor, unless that optimizer is loaded too."""
    added, gone = by_forms(model, contents["model"])
    changed, orders = {*added, *gone, *resized(model, contents["model"])}, orders_of(model)
    for name, layer in ssm_layers(model).items():
        if any(not name or entry.startswith(f"{name}.") for entry in changed):
            said = f"{name or 'the model'} has order {orders[name]}, the file has order {contents['orders'][name]}"
            require_free(layer, f"{said} or another form", optimizers)


def require_same_sharing(model: nn.Module, contents: Mapping[str, Any]) -> None:
    """Refuse layers and parameters that only one of model and file shares; the file has a copy for each name.

    Copies of a parameter with the same values may become parameters of their own.
    """
    tensors, state, layers, modules = contents["model"], plain_state(model), ssm_layers(model), plain_modules(model)
    stored = contents["orders"] if isinstance(contents["orders"], Mapping) else layers  # refused elsewhere
    names = {id(layer): name for name, layer in layers.items()}
    for name in stored.keys() - layers.keys():
        if id(modules.get(name)) in names:
            raise SavingError(
                f"the model uses one layer as {names[id(modules[name])]} and as {name}, and the file has one for each:"
                " it was saved by a model that does not share them; load it into such a model"
            )
    for name in sorted(layers.keys() - stored.keys()):
        inside = {key.removeprefix(name): key for key in tensors if key.startswith(f"{name}.")}
        for other in stored if inside else ():
            if all(_are_same(tensors.get(f"{other}{end}"), tensors[key]) for end, key in inside.items()):
                raise SavingError(
                    f"the file has one layer for {other} and {name}, and the model one for each: share them here too,"
                    " or load the file into a model that shares them, and part them there"
                )
    for name, other in first_names(state).items():
        is_trained = isinstance(state[name], nn.Parameter) and {name, other} <= tensors.keys()
        if is_trained and not _are_same(tensors[name], tensors[other]):
            raise SavingError(
                f"the model shares one tensor as {other} and as {name}, and the file has other values in each: it was"
                " saved by a model that does not share them; load it into such a model"
            )


def _are_same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.dtype == other.dtype and torch.equal(one, other)


def require_parts(contents: Mapping[str, Any], **given: object) -> None:
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


def warn_of_left(contents: Mapping[str, Any], **given: object) -> None:
    """Name states that stay in the file although the training goes on with other parts of it."""
    left = [name for name, part in given.items() if part is None and contents[name] is not None]
    if left and any(part is not None for part in given.values()):
        options = ", ".join(f"{name}=..." for name in left)
        warn_caller(
            f"the file has the state of the {' and of the '.join(left)}, which is not loaded: pass {options} to go on"
            " as the saved training would have"
        )


def require_fitting(model: nn.Module, contents: Mapping[str, Any]) -> None:
    """Refuse tensors and orders that the model cannot take."""
    tensors: Mapping[str, Tensor] = contents["model"]
    orders = require_orders(model, contents["orders"])
    require_values(model, tensors)
    require_fit(tensors, expected_shapes(model, orders, tensors))
    for name, value in plain_state(model).items():
        if name in tensors and value.dtype != tensors[name].dtype:
            raise SavingError(f"{name} was saved as {tensors[name].dtype}, the model's is {value.dtype}")
    is_resized = bool(resized(model, tensors))
    if is_resized:
        attributes_of(model)  # refuses a model without an attribute that changes with the order
    if is_resized or plain_state(model).keys() != tensors.keys():
        for wrapper in wrappers_in(model):
            require_rewrappable(wrapper)


def resized(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """The parameters that have another shape in the file."""
    return {
        name: value
        for name, value in plain_state(model).items()
        if isinstance(value, nn.Parameter) and name in tensors and value.shape != tensors[name].shape
    }


def require_names(groups: Any) -> None:
    """Refuse groups that are not lists of names."""
    is_named = isinstance(groups, list) and all(isinstance(group, list) for group in groups)
    if not is_named or not all(name is None or isinstance(name, str) for group in groups for name in group):
        raise SavingError(f"the names of the optimizer's parameters are {groups!r:.80}, expected a list for each group")


def require_same_groups(saved: Groups, here: Groups, added: Set[str], gone: Set[str]) -> None:
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
