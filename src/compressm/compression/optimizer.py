"""What becomes of an optimizer's moments at a cut: small frozen choices."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from compressm.control.validation import is_finite
from compressm.errors import CompressionError
from compressm.families.base import Change, Values


class Role(Enum):
    """What a tensor of an optimizer's state is made of."""

    GRADIENT = "means of gradients"
    GRADIENT_SQUARE = "means of squares of gradients"
    GRADIENT_SIZE = "sizes of gradients"
    UPDATE = "means of updates"
    UPDATE_SQUARE = "means of squares of updates"
    UPDATE_SIZE = "sizes of updates"


@final
@dataclass(frozen=True)
class Entry:
    """One entry of the state, of all parameters of a module that have it: float64, by name, and as it once began."""

    role: Role | None
    values: Values
    initial: Mapping[str, float]


Entries: TypeAlias = Mapping[str, Entry]


class Moments(ABC):
    """A rule for the state of parameters whose number of states changes; all other parameters keep theirs."""

    # Whether an entry of unknown role can be carried.
    needs_roles = False

    @abstractmethod
    def carry(self, change: Change, entries: Entries) -> dict[str, dict[str, Tensor]]:
        """The entries, by key and parameter name, that belong to the new values."""

    def carry_scalar(self, key: str, value: Any) -> Any:
        """A step count, or another number a parameter."""
        return value


@final
@dataclass(frozen=True)
class Transport(Moments):
    """Moments go through the change of basis: gradients as covectors, updates as vectors, squares by squared entries.

    Cosines with the gradients of the reduced model are 0.6 to 1 for B and C where those of `Slice` are about 0.
    """

    needs_roles = True

    def carry(self, change: Change, entries: Entries) -> dict[str, dict[str, Tensor]]:
        carried = {key: _carried(change, entry) for key, entry in _uncentred(entries).items()}
        return _within_reach(_centred(carried, entries), entries)


@final
@dataclass(frozen=True)
class Restart(Moments):
    """Moments begin anew: as they were before the first step, and step counts with them.

    Zeros at a late step count would make Adam's first update (1 − β₁)/√(1 − β₂) = 3.2 times too long.
    """

    def carry(self, change: Change, entries: Entries) -> dict[str, dict[str, Tensor]]:
        return {
            key: {name: torch.full_like(change.values[name], entry.initial[name]) for name in entry.values}
            for key, entry in entries.items()
        }

    def carry_scalar(self, key: str, value: Any) -> Any:
        if key not in _FIRST_SCALARS:
            return value
        first = _FIRST_SCALARS[key]
        return torch.full_like(value, first) if isinstance(value, Tensor) else type(value)(first)


@final
@dataclass(frozen=True)
class Slice(Moments):
    """The first r entries of every moment, as in the paper's code: whatever modes they had belonged to."""

    def carry(self, change: Change, entries: Entries) -> dict[str, dict[str, Tensor]]:
        return {
            key: {name: change.first(name, value) for name, value in entry.values.items()}
            for key, entry in entries.items()
        }


_FIRST_SCALARS = {"step": 0, "mu_product": 1}


def _carried(change: Change, entry: Entry) -> dict[str, Tensor]:
    match entry.role:
        case Role.GRADIENT:
            found = change.gradient(entry.values)
        case Role.GRADIENT_SQUARE:
            found = change.gradient_squares(entry.values)
        case Role.GRADIENT_SIZE:
            found = {name: torch.sqrt(value) for name, value in change.gradient_squares(_squares(entry)).items()}
        case Role.UPDATE:
            found = change.update(entry.values)
        case Role.UPDATE_SQUARE:
            found = change.update_squares(entry.values)
        case _:
            found = {name: torch.sqrt(value) for name, value in change.update_squares(_squares(entry)).items()}
    return {name: found[name] for name in entry.values}


def _squares(entry: Entry) -> dict[str, Tensor]:
    return {name: value * value for name, value in entry.values.items()}


def _uncentred(entries: Entries) -> dict[str, Entry]:
    """RMSprop divides by the root of square_avg − grad_avg²: it is that difference which must not become negative."""
    changed = dict(entries)
    if {"square_avg", "grad_avg"} <= entries.keys():
        mean, square = entries["grad_avg"].values, entries["square_avg"].values
        variance = {
            name: (value - mean[name] * mean[name]).clamp_min(0) for name, value in square.items() if name in mean
        }
        changed["square_avg"] = replace(entries["square_avg"], values={**square, **variance})
    return changed


def _centred(carried: dict[str, dict[str, Tensor]], entries: Entries) -> dict[str, dict[str, Tensor]]:
    """The inverse, after both were carried."""
    if {"square_avg", "grad_avg"} <= entries.keys():
        mean, square = carried["grad_avg"], carried["square_avg"]
        whole = {name: value + mean[name] * mean[name] for name, value in square.items() if name in mean}
        return {**carried, "square_avg": {**square, **whole}}
    return carried


# Of Adam with β = (0.9, 0.999): m² ≤ (1 − β₁)² / ((1 − β₁²/β₂)(1 − β₂)) v = 53 v whatever the gradients were.
_LARGEST_RATIO = 53.0


def _within_reach(carried: dict[str, dict[str, Tensor]], entries: Entries) -> dict[str, dict[str, Tensor]]:
    """Second moments no smaller than first moments allow: v = 0 beside m ≠ 0 would be a step of 1e8 learning rates.

    The carried squares leave out what varies together, so that the inequality may be lost by the way.
    """
    if "exp_avg" not in carried:
        return carried
    bounded = dict(carried)
    for key, values in carried.items():
        role = entries[key].role
        if role not in (Role.GRADIENT_SQUARE, Role.GRADIENT_SIZE):
            continue
        least = {name: value * value / _LARGEST_RATIO for name, value in carried["exp_avg"].items()}
        if role is Role.GRADIENT_SIZE:
            least = {name: torch.sqrt(value) for name, value in least.items()}
        bounded[key] = {
            name: torch.maximum(value, least[name]) if name in least else value for name, value in values.items()
        }
    return bounded


_NAMES = "param_names"  # of optimizers that were made of named_parameters()


def join_(group: dict[str, Any], parameter: nn.Parameter, name: str, place: int | None = None) -> None:
    """At the end, or at a place."""
    for members, new in joining(group, parameter, name):
        members.insert(len(members) if place is None else place, new)


def joining(group: dict[str, Any], parameter: nn.Parameter, name: str) -> list[tuple[list[Any], Any]]:
    """The lists that get an entry more, each with the entry."""
    return [(group[key], new) for key, new in (("params", parameter), (_NAMES, name)) if key in group]


def leave_(optimizer: Any, gone: Collection[nn.Parameter]) -> None:
    """With their states."""
    numbers = {id(parameter) for parameter in gone}
    for group in optimizer.param_groups:
        stays = [id(parameter) not in numbers for parameter in group["params"]]
        for key in ("params", _NAMES):
            if key in group:
                group[key][:] = [item for item, kept in zip(group[key], stays, strict=True) if kept]
    for parameter in gone:
        optimizer.state.pop(parameter, None)


def name_beside(group: dict[str, Any], origin: nn.Parameter, old: str, new: str) -> str:
    """What a parameter is called in the group that joins another, which its module calls `old`, as `new`."""
    names = group.get(_NAMES)
    if names is None:
        return new
    place = next(k for k, parameter in enumerate(group["params"]) if parameter is origin)
    return f"{str(names[place]).removesuffix(old)}{new}"


# SGD, Adam(W), NAdam, RAdam, Adamax, Adagrad, RMSprop, Adadelta, Rprop, and Lion, AdEMAMix and the like.
_ROLES = {
    "exp_avg": Role.GRADIENT,
    "exp_avg_slow": Role.GRADIENT,
    "momentum": Role.GRADIENT,
    "momentum_buffer": Role.GRADIENT,
    "grad_avg": Role.GRADIENT,
    "prev": Role.GRADIENT,
    "exp_avg_sq": Role.GRADIENT_SQUARE,
    "max_exp_avg_sq": Role.GRADIENT_SQUARE,
    "square_avg": Role.GRADIENT_SQUARE,
    "sum": Role.GRADIENT_SQUARE,
    "exp_inf": Role.GRADIENT_SIZE,
    "acc_delta": Role.UPDATE_SQUARE,
    "step_size": Role.UPDATE_SIZE,
}
# Where an entry does not begin at 0: the option of the group that says it.
_INITIAL = {"sum": "initial_accumulator_value", "step_size": "lr"}

# Optimizers whose state mixes the entries of a parameter, or of several: there is nothing to carry entry by entry.
_REFUSED = ("LBFGS", "Adafactor", "Shampoo", "SOAP", "CAME", "SM3", "GaLore", "KFAC")

ParameterState = Mapping[str, Any]


def parameter_state(optimizer: Any, parameter: nn.Parameter) -> dict[str, Any] | None:
    """The optimizer's own dictionary for the parameter; None before its first step."""
    return optimizer.state.get(parameter)


def require_supported(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse by name an optimizer that cannot follow a cut of these parameters, or that does not hold them."""
    kind = type(optimizer).__name__
    try:
        groups, states = list(optimizer.param_groups), optimizer.state
    except AttributeError:
        raise CompressionError(f"optimizer is a {kind}, expected one with param_groups and state") from None
    if kind == "ZeroRedundancyOptimizer":
        raise CompressionError(f"{kind} keeps each state in one process only, and cannot follow a cut; choose Adam")
    for ancestor in type(optimizer).__mro__:
        if any(name in ancestor.__name__ for name in _REFUSED):
            raise CompressionError(f"{kind} mixes the entries of parameters in its state; choose Adam or another")
    if any("prev_flat_grad" in state or "old_dirs" in state for state in states.values()):
        raise CompressionError(f"{kind} holds the state of LBFGS, which mixes all parameters; choose Adam or another")
    held = {id(parameter) for group in groups for parameter in group["params"]}
    missing = [name for name, p in parameters.items() if p.requires_grad and id(p) not in held]
    if missing:
        raise CompressionError(
            f"the optimizer does not hold {', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}:"
            " give it the parameters of this model, or pass optimizer=None"
        )
    for name, parameter in parameters.items():
        for key, value in (parameter_state(optimizer, parameter) or {}).items():
            _require_plain(kind, name, parameter, key, value)


def _require_plain(kind: str, name: str, parameter: nn.Parameter, key: str, value: object) -> None:
    """A number, or a tensor of numbers of the parameter's shape."""
    said = f"{kind}'s {key!r} of {name}"
    if value is None or isinstance(value, int | float | str):
        return
    if type(value) is not Tensor and type(value) is not nn.Parameter:
        raise CompressionError(f"{said} is a {type(value).__name__}, expected a number or a plain tensor")
    assert isinstance(value, Tensor)
    if is_scalar(value, parameter):
        return
    if value.shape != parameter.shape:
        raise CompressionError(
            f"{said} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}, expected the same: load a"
            " state that was saved at the orders of now; factored states cannot follow a cut"
        )
    if not value.is_floating_point():
        raise CompressionError(f"{said} is {value.dtype}, expected real floating-point numbers")


def is_scalar(value: object, parameter: nn.Parameter) -> bool:
    """A number for the whole parameter, also one kept in a tensor."""
    return not isinstance(value, Tensor) or (value.numel() == 1 and value.shape != parameter.shape)


def carried_states(change: Change, optimizer: Any, moments: Moments) -> dict[str, dict[str, Any]]:
    """By parameter name the entries that change with the cut, as the optimizer keeps them: same dtypes, same devices.

    Only parameters with an axis of states, and with a state.
    """
    parameters = {name: change.module.get_parameter(name) for name in change.resized}
    require_supported(optimizer, parameters)
    states = {name: parameter_state(optimizer, parameter) or {} for name, parameter in parameters.items()}
    entries = _entries(change, optimizer, parameters, states)
    unknown = [key for key, entry in entries.items() if entry.role is None]
    if unknown and moments.needs_roles:
        raise CompressionError(
            f"{type(optimizer).__name__} keeps {', '.join(map(repr, unknown))}, of which {moments} does not know what"
            " it is; moments=Restart() or Slice() need not know"
        )
    carried = moments.carry(change, entries) if entries else {}
    new: dict[str, dict[str, Any]] = {name: {} for name, state in states.items() if state}
    for name, key, value in _pairs(states):
        if is_scalar(value, parameters[name]):
            new[name][key] = moments.carry_scalar(key, value)
        else:
            new[name][key] = _stored(f"{key!r} of {name}", carried[key][name], value)
    return new


def _pairs(states: Mapping[str, ParameterState]) -> Iterator[tuple[str, str, Any]]:
    for name, state in states.items():
        for key, value in state.items():
            yield name, key, value


def _entries(
    change: Change, optimizer: Any, parameters: Mapping[str, nn.Parameter], states: Mapping[str, ParameterState]
) -> dict[str, Entry]:
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    values: dict[str, dict[str, Tensor]] = {}
    initial: dict[str, dict[str, float]] = {}
    for name, key, value in _pairs(states):
        if is_scalar(value, parameters[name]):
            continue
        role = _role(key, states[name])
        values.setdefault(key, {})[name] = _double(f"{key!r} of {name}", value, role).to(change.values[name].device)
        option = groups.get(id(parameters[name]), {}).get(_INITIAL.get(key, ""), 0.0)
        initial.setdefault(key, {})[name] = float(option)
    return {key: Entry(_role(key, states[next(iter(values[key]))]), values[key], initial[key]) for key in values}


def _role(key: str, state: ParameterState) -> Role | None:
    # RMSprop's is made of gradients that were divided by their sizes already.
    if key == "momentum_buffer" and "square_avg" in state:
        return Role.UPDATE
    return _ROLES.get(key)


def _double(said: str, value: Tensor, role: Role | None) -> Tensor:
    double = value.detach().to(torch.float64)
    smallest, largest = torch.stack(torch.aminmax(double)).tolist()  # NaN if any entry is
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        unusable = int((~torch.isfinite(double)).sum())
        raise CompressionError(f"the optimizer's {said} holds {unusable} entries that are not finite")
    if role not in (Role.GRADIENT, Role.UPDATE, None) and smallest < 0:
        raise CompressionError(f"the optimizer's {said} holds {smallest:.3g}, expected none below 0")
    return double


def _stored(said: str, carried: Tensor, like: Tensor) -> Tensor:
    stored = carried.to(like.device, like.dtype, copy=True, memory_format=torch.contiguous_format)
    if not is_finite(stored):
        raise CompressionError(f"after the cut {said} would not be finite in {like.dtype}")
    return stored
