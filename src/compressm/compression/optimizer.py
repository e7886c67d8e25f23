"""An optimizer's state through a cut: rules for its moments, its groups, and which optimizers are supported."""

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
    """The meaning of a tensor in an optimizer's state."""

    GRADIENT = "means of gradients"
    GRADIENT_SQUARE = "means of squares of gradients"
    GRADIENT_SIZE = "sizes of gradients"
    UPDATE = "means of updates"
    UPDATE_SQUARE = "means of squares of updates"
    UPDATE_SIZE = "sizes of updates"


@final
@dataclass(frozen=True)
class Entry:
    """One entry of the state for the parameters of a module, in float64 and by name, and its initial values."""

    role: Role | None
    values: Values
    initial: Mapping[str, float]


Entries: TypeAlias = Mapping[str, Entry]


class Moments(ABC):
    """A rule for the optimizer state of parameters that a cut resizes; all other parameters keep theirs."""

    # True if the rule must know the role of every entry.
    needs_roles = False

    @abstractmethod
    def carry(self, change: Change, entries: Entries) -> dict[str, dict[str, Tensor]]:
        """The entries for the new values, by key and parameter name."""

    def carry_scalar(self, key: str, value: Any) -> Any:
        """The new value of a step count, or of another number of a parameter."""
        return value


@final
@dataclass(frozen=True)
class Transport(Moments):
    """Map moments through the change of basis: gradients as covectors, updates as vectors, squares by squared entries.

    Their cosines with the gradients of the reduced model are 0.6 to 1 for B and C; those of `Slice` are about 0.
    """

    needs_roles = True

    def carry(self, change: Change, entries: Entries) -> dict[str, dict[str, Tensor]]:
        carried = {key: _carried(change, entry) for key, entry in _uncentred(entries).items()}
        return _within_reach(_centred(carried, entries), entries)


@final
@dataclass(frozen=True)
class Restart(Moments):
    """Reset moments and step counts to their values before the first step.

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
    """Keep the first r entries of every moment, as the paper's code does, although they belong to other modes."""

    def carry(self, change: Change, entries: Entries) -> dict[str, dict[str, Tensor]]:
        return {
            key: {name: change.first(name, value) for name, value in entry.values.items()}
            for key, entry in entries.items()
        }


_FIRST_SCALARS = {"step": 0, "mu_product": 1}


def _carried(change: Change, entry: Entry) -> dict[str, Tensor]:
    if entry.role in (Role.GRADIENT_SIZE, Role.UPDATE_SIZE):
        squares = {name: value * value for name, value in entry.values.items()}
        carry = change.gradient_squares if entry.role is Role.GRADIENT_SIZE else change.update_squares
        found = {name: torch.sqrt(value) for name, value in carry(squares).items()}
    else:
        maps = {
            Role.GRADIENT: change.gradient,
            Role.GRADIENT_SQUARE: change.gradient_squares,
            Role.UPDATE: change.update,
            Role.UPDATE_SQUARE: change.update_squares,
        }
        assert entry.role is not None  # `carried_states` refuses unknown entries
        found = maps[entry.role](entry.values)
    return {name: found[name] for name in entry.values}


def _uncentred(entries: Entries) -> dict[str, Entry]:
    """Replace RMSprop's square_avg by square_avg − grad_avg², the variance, which must not become negative."""
    changed = dict(entries)
    if {"square_avg", "grad_avg"} <= entries.keys():
        mean, square = entries["grad_avg"].values, entries["square_avg"].values
        variance = {
            name: (value - mean[name] * mean[name]).clamp_min(0) for name, value in square.items() if name in mean
        }
        changed["square_avg"] = replace(entries["square_avg"], values={**square, **variance})
    return changed


def _centred(carried: dict[str, dict[str, Tensor]], entries: Entries) -> dict[str, dict[str, Tensor]]:
    """Undo `_uncentred` after both entries were carried."""
    if {"square_avg", "grad_avg"} <= entries.keys():
        mean, square = carried["grad_avg"], carried["square_avg"]
        whole = {name: value + mean[name] * mean[name] for name, value in square.items() if name in mean}
        return {**carried, "square_avg": {**square, **whole}}
    return carried


# For Adam with β = (0.9, 0.999), m² ≤ (1 − β₁)² / ((1 − β₁²/β₂)(1 − β₂)) v = 53 v for any gradients.
_LARGEST_RATIO = 53.0


def _within_reach(carried: dict[str, dict[str, Tensor]], entries: Entries) -> dict[str, dict[str, Tensor]]:
    """Raise second moments to the least that first moments allow: v = 0 and m ≠ 0 would step by 1e8 learning rates.

    The carried squares ignore correlations, so the inequality may be violated.
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


_NAMES = "param_names"  # in optimizers built from named_parameters()


def join_(group: dict[str, Any], parameter: nn.Parameter, name: str, place: int | None = None) -> None:
    """Add a parameter to a group, at its end or at a place."""
    for key, new in (("params", parameter), (_NAMES, name)):
        if key in group:
            group[key].insert(len(group[key]) if place is None else place, new)


def leave_(optimizer: Any, gone: Collection[nn.Parameter]) -> None:
    """Remove parameters and their states from the optimizer."""
    numbers = {id(parameter) for parameter in gone}
    for group in optimizer.param_groups:
        stays = [id(parameter) not in numbers for parameter in group["params"]]
        for key in ("params", _NAMES):
            if key in group:
                group[key][:] = [item for item, kept in zip(group[key], stays, strict=True) if kept]
    for parameter in gone:
        optimizer.state.pop(parameter, None)


def name_beside(group: dict[str, Any], origin: nn.Parameter, old: str, new: str) -> str:
    """The name in the group for a parameter `new` that joins `origin`, whose name in the module is `old`."""
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
# Entries that do not begin at 0, with the group's option that gives their initial value.
_INITIAL = {"sum": "initial_accumulator_value", "step_size": "lr"}

# Optimizers whose state mixes entries of parameters, so that no entry can be carried by itself.
_REFUSED = ("LBFGS", "Adafactor", "Shampoo", "SOAP", "CAME", "SM3", "GaLore", "KFAC")


def require_supported(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse an optimizer that does not hold these parameters, or whose state cannot follow their cut."""
    kind = type(optimizer).__name__
    try:
        groups, states = list(optimizer.param_groups), optimizer.state
    except AttributeError:
        raise CompressionError(f"optimizer is a {kind}, expected one with param_groups and state") from None
    if kind == "ZeroRedundancyOptimizer":
        raise CompressionError(
            f"{kind} keeps each state in one process only and cannot follow a cut; expected Adam or another"
        )
    for ancestor in type(optimizer).__mro__:
        if any(name in ancestor.__name__ for name in _REFUSED):
            raise CompressionError(f"{kind} mixes the entries of parameters in its state; expected Adam or another")
    if any("prev_flat_grad" in state or "old_dirs" in state for state in states.values()):
        raise CompressionError(f"{kind} holds the state of LBFGS, which mixes all parameters; expected Adam or another")
    held = {id(parameter) for group in groups for parameter in group["params"]}
    missing = [name for name, p in parameters.items() if p.requires_grad and id(p) not in held]
    if missing:
        raise CompressionError(
            f"the optimizer does not hold {', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}:"
            " give it the parameters of this model, or pass optimizer=None"
        )
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            _require_plain(kind, name, parameter, key, value)


def _require_plain(kind: str, name: str, parameter: nn.Parameter, key: str, value: object) -> None:
    """Refuse an entry that is neither a number nor a floating-point tensor of the parameter's shape."""
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
            " state that was saved at the present orders; factored states cannot follow a cut"
        )
    if not value.is_floating_point():
        raise CompressionError(f"{said} is {value.dtype}, expected real floating-point numbers")


def is_scalar(value: object, parameter: nn.Parameter) -> bool:
    """True for a number that belongs to the whole parameter, even if a tensor holds it."""
    return not isinstance(value, Tensor) or (value.numel() == 1 and value.shape != parameter.shape)


def carried_states(change: Change, optimizer: Any, moments: Moments) -> dict[str, dict[str, Any]]:
    """The new states of resized parameters, by name, in the dtypes and on the devices of the old ones.

    Parameters without a state are left out.
    """
    parameters = {name: change.module.get_parameter(name) for name in change.resized}
    require_supported(optimizer, parameters)
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    entries = _entries(change, optimizer, parameters, states)
    unknown = [key for key, entry in entries.items() if entry.role is None]
    if unknown and moments.needs_roles:
        raise CompressionError(
            f"{type(optimizer).__name__} keeps {', '.join(map(repr, unknown))}, whose meaning {moments} does not know;"
            " expected moments=Restart() or Slice(), which need not know it"
        )
    carried = moments.carry(change, entries) if entries else {}
    new: dict[str, dict[str, Any]] = {name: {} for name, state in states.items() if state}
    for name, key, value in _pairs(states):
        if is_scalar(value, parameters[name]):
            new[name][key] = moments.carry_scalar(key, value)
        else:
            new[name][key] = _stored(f"{key!r} of {name}", carried[key][name], value)
    return new


def _pairs(states: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    for name, state in states.items():
        for key, value in state.items():
            yield name, key, value


def _entries(
    change: Change, optimizer: Any, parameters: Mapping[str, nn.Parameter], states: Mapping[str, Mapping[str, Any]]
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


def _role(key: str, state: Mapping[str, Any]) -> Role | None:
    # RMSprop averages gradients that are already divided by their sizes.
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
