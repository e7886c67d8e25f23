"""Checks of saved states before they are loaded: of optimizers, schedulers, and snapshots of all of a training."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compressm.adapters import find
from compressm.compression.optimizer import mixes_parameters, role_of
from compressm.compression.several import Several, kind_of, parts_of
from compressm.errors import CompressionError

if TYPE_CHECKING:
    from compressm.compression.rollback import Subject


def require_optimizer(
    optimizer: Any, state: Any, names: Sequence[Sequence[str | None]], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Refuse a state whose entries do not have the shapes of its parameters, and options of another kind or range.

    `names` are those of the parameters in every group, None for one without a shape here. Several optimizers have a
    list of states.
    """
    parts, states, first = parts_of(optimizer), states_of(optimizer, state), 0
    saved = [len(each["param_groups"]) for each in states if _has_groups(each)]
    here = [len(part.param_groups) for part in parts]
    if len(parts) > 1 and saved != here:
        raise CompressionError(f"the optimizers were saved with {saved} groups, these have {here}")
    for part, own in zip(parts, states, strict=True):
        count = len(part.param_groups)
        _require_one(part, own, names[first : first + count], shapes)
        first += count
    if first != len(names):
        raise CompressionError(f"{len(names)} groups have names in the file, here are {first}")


def _has_groups(state: Any) -> bool:
    return isinstance(state, Mapping) and isinstance(state.get("param_groups"), list)


def states_of(part: Any, state: Any) -> list[Any]:
    """The state of each of several optimizers or schedulers; of one, its own."""
    if not isinstance(part, Several):
        return [state]
    if not isinstance(state, list) or len(state) != len(part.parts):
        raise CompressionError(f"the states of {kind_of(part)} are {state!r:.80}, expected a list of {len(part.parts)}")
    return state


def restore_precision_(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Give the tensors of a loaded state the dtypes that they were saved in; torch casts them to their parameter's."""
    members = (member for group in optimizer.param_groups for member in group["params"])
    numbers = (number for group in state["param_groups"] for number in group["params"])
    for member, number in zip(members, numbers, strict=True):
        own = optimizer.state.get(member, {})
        for key, value in state["state"].get(number, {}).items():
            now = own.get(key)
            if isinstance(now, Tensor) and isinstance(value, Tensor) and now.dtype != value.dtype:
                own[key] = value.to(now.device, copy=True)


def _require_one(
    optimizer: Any, state: Any, names: Sequence[Sequence[str | None]], shapes: Mapping[str, Sequence[int]]
) -> None:
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise CompressionError(f"the optimizer's state is {state!r:.80}, expected 'state' and 'param_groups'")
    groups, named = state["param_groups"], dict[int, str | None]()
    sizes = [len(names), len(optimizer.param_groups)]
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise CompressionError(f"the optimizer's groups are stored as {groups!r:.80}, expected a list of groups")
    if sizes != [len(groups)] * 2:
        raise CompressionError(
            f"{kind_of(optimizer)} was saved with {len(groups)} groups and {sizes[0]} names, this one has {sizes[1]}"
        )
    for k, (group, own, present) in enumerate(zip(groups, names, optimizer.param_groups, strict=True)):
        numbers, called = group.get("params"), group.get("param_names")
        if not isinstance(numbers, list) or len(numbers) != len(own) or not all(isinstance(n, int) for n in numbers):
            raise CompressionError(
                f"group {k} of the optimizer has the parameters {numbers!r:.80}, expected {len(own)}"
            )
        if "param_names" in group and (not isinstance(called, list) or len(called) != len(own)):
            raise CompressionError(f"group {k} of the optimizer has {called!r:.80}, expected {len(own)} names")
        named |= dict(zip(numbers, own, strict=True))
        _require_options(optimizer, f"group {k} of the optimizer", group, present)
    if len(named) != sum(map(len, names)):
        raise CompressionError("the optimizer's groups name a parameter twice")
    if not isinstance(state["state"], Mapping):
        raise CompressionError(f"the optimizer's states are {state['state']!r:.80}, expected those of its parameters")
    for number, entries in state["state"].items():
        if number not in named or not isinstance(entries, Mapping):
            raise CompressionError(f"the state {number!r:.40} is {entries!r:.80}, expected entries of a parameter")
        if _is_known(optimizer) and (name := named[number]) is not None and entries:
            _require_entries(type(optimizer).__name__, name, entries, tuple(shapes[name]))


def _is_known(optimizer: Any) -> bool:
    """True for an optimizer of torch whose entries have the shapes of parameters."""
    return type(optimizer).__module__.startswith("torch.optim") and not mixes_parameters(optimizer)


# The entries that an optimizer of torch cannot step without, if it has begun to train a parameter.
_ENTRIES = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam"), ("step", "exp_avg", "exp_avg_sq")),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "Adagrad": ("step", "sum"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
}


def _require_entries(kind: str, name: str, entries: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    missing = [key for key in _ENTRIES.get(kind, ()) if key not in entries]
    if missing:
        raise CompressionError(f"{kind}'s state of {name} has no {' and no '.join(missing)}")
    for key, value in entries.items():
        said = f"{kind}'s {key!r} of {name}"
        if role_of(key, entries) is not None and (value is not None or key in _ENTRIES.get(kind, ())):
            if not isinstance(value, Tensor) or tuple(value.shape) != shape or not value.is_floating_point():
                got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"{value!r:.40}"
                raise CompressionError(f"{said} is {got} in the file, expected floating-point numbers of shape {shape}")
        elif key == "step":
            number = _number(value)
            if number is None or not number >= 0:
                raise CompressionError(f"{said} is {value!r:.40} in the file, expected a number of at least 0")


def _require_options(optimizer: Any, said: str, group: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    for key, now in present.items():
        if key in ("params", "param_names"):
            continue
        if key not in group:
            # Flags, which later versions of torch add, have defaults; "initial_lr" comes from a scheduler.
            if key != "initial_lr" and not isinstance(now, bool) and now is not None:
                raise CompressionError(f"{said} has no {key!r} in the file")
        elif not _is_alike(group[key], now):
            raise CompressionError(f"{said} has {key} = {group[key]!r:.40} in the file, this one {now!r:.40}")
    if _is_known(optimizer):
        taken = inspect.signature(type(optimizer)).parameters
        options = {key: value for key, value in group.items() if key in taken and key != "params"}
        numbers = {key: _number(value) for key, value in options.items() if _number(value) is not None}
        pairs = {key: value for key, value in options.items() if isinstance(value, tuple | list)}
        try:
            # The constructor knows which numbers make sense; Muon takes matrices only.
            type(optimizer)([nn.Parameter(torch.zeros(1, 1, device="cpu"))], **numbers, **pairs)
        except (TypeError, ValueError) as error:
            raise CompressionError(f"{said} has options that {type(optimizer).__name__} refuses: {error}") from error


def require_scheduler(scheduler: Any, state: Any) -> None:
    """Refuse a state without something that this scheduler has, or with values of another kind."""
    for part, own in zip(parts_of(scheduler), states_of(scheduler, state), strict=True):
        _require_one_scheduler(part, own)


def _require_one_scheduler(scheduler: Any, state: Any) -> None:
    present, kind = scheduler.state_dict(), type(scheduler).__name__
    if not isinstance(present, Mapping):
        return  # a scheduler of the user's, which may keep anything
    if not isinstance(state, Mapping):
        raise CompressionError(f"the state of the scheduler is {state!r:.80}, expected that of a {kind}")
    for key, now in present.items():
        # Names with an underscore differ between versions of torch.
        if key not in state:
            if isinstance(key, str) and not key.startswith("_"):
                raise CompressionError(f"the state of the {kind} in the file has no {key!r}")
            continue
        # Rates, one for each group of the optimizer.
        per_group = key in ("base_lrs", "_last_lr") and isinstance(now, list)
        is_alike = _is_alike(state[key], now) if per_group else _is_of_kind(state[key], now)
        if not is_alike:
            raise CompressionError(f"the {kind} has {key} = {state[key]!r:.40} in the file, this one {now!r:.40}")


def _number(value: object) -> float | None:
    """The value of a number, or of a tensor with one entry; None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.item())
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_of_kind(then: object, now: object) -> bool:
    """True if the value is a flag, a number (not NaN), text or a container, as the present one is; None may be any."""
    if now is None:
        return True
    if isinstance(now, bool):
        return then is None or isinstance(then, bool)
    if (_number(now)) is not None:
        number = _number(then)
        return number is not None and not math.isnan(number)
    for kind in (str, Mapping, list | tuple):
        if isinstance(now, kind):
            return isinstance(then, kind)
    return True


def _is_alike(then: object, now: object) -> bool:
    """True if the values are of one kind, entry by entry in a list."""
    if now is None:
        return then is None or isinstance(then, bool)
    if isinstance(now, list | tuple) and isinstance(then, list | tuple):
        return len(then) == len(now) and all(map(_is_alike, then, now))
    return _is_of_kind(then, now)


def require_snapshot(stored: Any, subject: Subject) -> None:
    """Refuse a stored snapshot that `Snapshot.restore_` could not restore later."""
    _require_mapping("the guard's snapshot", stored, "tensors", "rest")
    tensors, rest = stored["tensors"], stored["rest"]
    _require_mapping("the tensors of the guard's snapshot", tensors)
    _require_mapping("the guard's snapshot", rest, "parameters", "buffers", "optimizer", "scheduler")
    _require_mapping("the parameters of the guard's snapshot", rest["parameters"])
    for name, flags in rest["parameters"].items():
        _require_mapping(f"{name} in the guard's snapshot", flags, "requires_grad")
        if not isinstance(flags["requires_grad"], bool) or len(flags) != 1:
            raise CompressionError(f"{name} has {flags!r:.80} in the guard's snapshot, expected requires_grad")
    if not isinstance(rest["buffers"], list) or not all(isinstance(name, str) for name in rest["buffers"]):
        raise CompressionError(f"the buffers of the guard's snapshot are {rest['buffers']!r:.80}, expected names")
    _require_mapping("the attributes of the guard's snapshot", rest.get("attributes", {}))
    if other := rest.get("attributes", {}).keys() - subject.attributes().keys():
        raise CompressionError(f"the guard's snapshot has the attributes {sorted(other)!r:.80}, which the model lacks")
    _require_tensors(tensors, rest, subject)
    _require_trained(tensors, rest, subject)


def _require_mapping(said: str, value: Any, *keys: str) -> None:
    if not isinstance(value, Mapping) or not set(keys) <= set(value):
        wanted = f"with {', '.join(keys)}" if keys else "by name"
        raise CompressionError(f"{said} is stored as {value!r:.80}, expected entries {wanted}")


def _require_tensors(tensors: Mapping[str, Any], rest: Mapping[str, Any], subject: Subject) -> None:
    """Refuse other names than the subject's, and tensors of another dtype, or of another shape outside its layers."""
    parameters = subject.parameters()
    buffers = {name: getattr(*place) for name, place in subject.buffers().items()}
    layers = [found for model in subject.models for found in find(model).values()]
    resizable = {id(value) for module, _ in layers for value in (*module.parameters(), *module.buffers())}
    optional = {leaf for _, adapter in layers for leaf in adapter.OPTIONAL}
    for kind, now, then in (("parameter", parameters, rest["parameters"]), ("buffer", buffers, rest["buffers"])):
        other = [name for name in now.keys() ^ set(then) if name.rpartition(".")[2] not in optional]
        if other:
            raise CompressionError(f"{min(other)} is in the guard's snapshot or in the model, not in both")
        for name in then:
            value, own = tensors.get(f"{kind} {name}"), now.get(name)
            if not isinstance(value, Tensor):
                raise CompressionError(f"the guard's snapshot has no tensor for {name}")
            is_resizable = own is None or id(own) in resizable
            shape = None if own is None else own.ndim if is_resizable else tuple(own.shape)
            if own is not None and (
                value.dtype != own.dtype or shape != (value.ndim if is_resizable else tuple(value.shape))
            ):
                got, here = (f"{tuple(one.shape)} {one.dtype}" for one in (value, own))
                raise CompressionError(f"{name} is {got} in the guard's snapshot, {here} in the model")


def _require_trained(tensors: Mapping[str, Any], rest: Mapping[str, Any], subject: Subject) -> None:
    """Refuse states of optimizer and scheduler that they could not continue from."""
    for what in ("optimizer", "scheduler"):
        if (getattr(subject, what) is None) != (rest[what] is None):
            raise CompressionError(
                f"the guard's snapshot was taken {'without' if rest[what] is None else 'with'} {what}"
            )
    if subject.scheduler is not None:
        require_scheduler(subject.scheduler, rest["scheduler"])
    if subject.optimizer is None:
        return
    saved = rest["optimizer"]
    _require_mapping("the optimizer in the guard's snapshot", saved, "states", "groups")
    _require_mapping("the optimizer's states in the guard's snapshot", saved["states"])
    if not isinstance(saved["groups"], list):
        raise CompressionError(f"the groups in the guard's snapshot are {saved['groups']!r:.80}, expected a list")
    numbers = {name: number for number, name in enumerate(rest["parameters"])}
    groups = []
    for group in saved["groups"]:
        _require_mapping("a group in the guard's snapshot", group, "options", "params")
        if not isinstance(group["params"], list) or not set(map(str, group["params"])) <= numbers.keys():
            raise CompressionError(f"a group in the guard's snapshot has {group['params']!r:.80}, expected parameters")
        options = _tensors_in("a group", group["options"], tensors)
        groups.append({**options, "params": [numbers[name] for name in group["params"]]})
    if other := saved["states"].keys() - numbers.keys():
        raise CompressionError(f"the guard's snapshot has a state of {min(map(str, other))}, which is no parameter")
    states = {numbers[name]: _tensors_in(name, state, tensors) for name, state in saved["states"].items()}
    shapes = {name: tensors[f"parameter {name}"].shape for name in numbers}
    names = [group["params"] for group in saved["groups"]]
    whole = list[dict[str, Any]]()
    for part in parts_of(subject.optimizer):
        taken = sum(len(each["param_groups"]) for each in whole)
        own = groups[taken : taken + len(part.param_groups)]
        members = {number for group in own for number in group["params"]}
        whole.append({"state": {n: state for n, state in states.items() if n in members}, "param_groups": own})
    one = not isinstance(subject.optimizer, Several)
    require_optimizer(subject.optimizer, whole[0] if one else whole, names, shapes)
    trained = {name for group in names for name in group}
    missing = {id(value) for group in subject.optimizer.param_groups for value in group["params"]}
    missing -= {id(value) for name, value in subject.parameters().items() if name in trained}
    if len(missing) > len([name for name in numbers if name not in subject.parameters()]):
        raise CompressionError("the groups in the guard's snapshot do not have all parameters of the optimizer")


def _tensors_in(said: str, entries: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a group or a state with their tensors."""
    _require_mapping(f"{said} in the guard's snapshot", entries)
    found = {}
    for key, entry in entries.items():
        _require_mapping(f"{key} of {said} in the guard's snapshot", entry)
        if "tensor" not in entry:
            _require_mapping(f"{key} of {said} in the guard's snapshot", entry, "value")
            found[key] = entry["value"]
            continue
        value, device = tensors.get(str(entry["tensor"])), entry.get("device")
        try:
            torch.device(device if isinstance(device, str) else "")
        except RuntimeError:
            raise CompressionError(f"{key} of {said} in the guard's snapshot is on {device!r:.40}") from None
        if not isinstance(value, Tensor):
            raise CompressionError(f"the guard's snapshot has no tensor for {key} of {said}")
        found[key] = value
    return found
