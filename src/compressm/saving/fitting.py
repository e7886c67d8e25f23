"""Checks of a checkpoint against model and optimizer; all are made before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import Tensor, nn

from compressm.compression.distributed import require_rewrappable, wrappers_in
from compressm.compression.several import kind_of, parts_of
from compressm.compression.surgery import attributes_of
from compressm.errors import SavingError
from compressm.families.observing import require_random_state
from compressm.saving.rebuilding import expected_shapes, plain_state, require_fit, require_orders, require_values

Groups = Sequence[Sequence[str | None]]

_TRAINED = ("optimizer", "scheduler", "compressor")


def require_contents(contents: Mapping[str, Any]) -> None:
    """Refuse parts of a checkpoint that are not of the kind that `save_checkpoint` writes."""
    tensors, step = contents["model"], contents["step"]
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in tensors.items()
    ):
        raise SavingError(f"the model is stored as {tensors!r:.80}, expected tensors by name")
    versions = contents["versions"]
    if not isinstance(versions, Mapping) or not all(isinstance(value, Mapping) for value in versions.values()):
        raise SavingError(f"the versions of modules are {versions!r:.80}, expected {{module: {{'version': number}}}}")
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
