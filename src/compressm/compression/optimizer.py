"""Optimizers through a cut: rules for their moments, and which of them are supported."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from compressm.compression.several import holds, kind_of, parts_of, require_no_moments_beside, require_no_other_inside
from compressm.compression.trial import are_weights, state_after_a_step
from compressm.control.validation import are_finite, is_finite
from compressm.errors import CompressionError
from compressm.families.base import Change, Values
from compressm.layers.parameters import is_plain


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
    """One entry of the state for the parameters of a module, in float64 and by name, and its initial values.

    `units` says how many mean gradients an entry of gradients is: 10 for SGD with momentum 0.9, else 1.
    """

    role: Role | None
    values: Values
    initial: Mapping[str, float]
    units: Mapping[str, float] = field(default_factory=dict)


Entries: TypeAlias = Mapping[str, Entry]


class Moments(ABC):
    """A rule for the optimizer state of parameters that a cut resizes; all other parameters keep theirs."""

    # True if the rule must know the role of every entry.
    needs_roles = False
    # True if `carry` also takes changes of several modules `together`, with entries that have one more axis.
    stacks = False

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

    needs_roles = stacks = True

    def carry(self, change: Change, entries: Entries) -> dict[str, dict[str, Tensor]]:
        carried = {key: _carried(change, entry, entries) for key, entry in _uncentred(entries).items()}
        return _within_reach(_centred(carried, entries), entries)


@final
@dataclass(frozen=True)
class Restart(Moments):
    """Reset moments and step counts to their values before the first step.

    Zeros at a late step count would make Adam's first update (1 − β₁)/√(1 − β₂) = 3.2 times too long.
    """

    stacks = True

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

    stacks = True

    def carry(self, change: Change, entries: Entries) -> dict[str, dict[str, Tensor]]:
        return {
            key: {name: change.first(name, value) for name, value in entry.values.items()}
            for key, entry in entries.items()
        }


_FIRST_SCALARS = {"step": 0, "mu_product": 1}


def _carried(change: Change, entry: Entry, beside: Entries) -> dict[str, Tensor]:
    if entry.role is Role.GRADIENT:
        return _pulled_back(change, entry, beside)
    if entry.role in (Role.GRADIENT_SIZE, Role.UPDATE_SIZE):
        squares = {name: value * value for name, value in entry.values.items()}
        carry = change.gradient_squares if entry.role is Role.GRADIENT_SIZE else change.update_squares
        found = {name: torch.sqrt(value) for name, value in carry(squares).items()}
    else:
        maps = {
            Role.GRADIENT_SQUARE: change.gradient_squares,
            Role.UPDATE: change.update,
            Role.UPDATE_SQUARE: change.update_squares,
        }
        assert entry.role is not None  # `carried_states` refuses unknown entries
        found = maps[entry.role](entry.values)
    return {name: found[name] for name in entry.values}


def _pulled_back(change: Change, entry: Entry, beside: Entries) -> dict[str, Tensor]:
    """Means of gradients, carried together with those that other optimizers keep of the module's other parameters.

    The gradient of the LRU's γ is that of B along B: if AdamW trains γ and Muon B, γ's new mean comes from Muon's.
    """
    unit = entry.units.get(next(iter(entry.values)), 1.0)
    gradients = {name: _times(value, unit / entry.units.get(name, 1.0)) for name, value in entry.values.items()}
    for other in beside.values():
        if other.role is Role.GRADIENT:
            for name, value in other.values.items():
                if name not in gradients:
                    gradients[name] = _times(value, unit / other.units.get(name, 1.0))
    found = change.gradient(gradients)
    return {name: _times(found[name], entry.units.get(name, 1.0) / unit) for name in entry.values}


def _times(value: Tensor, factor: float) -> Tensor:
    return value if factor == 1 else value * factor


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

# Entries that are copies or averages of weights (schedule-free, Prodigy, ASGD, Lookahead, mixed precision). They are
# points, which are in the coordinates of the weights: neither zeros nor a slice of them would be usable.
_POINTS = ("z", "p0", "ax", "slow_buffer", "slow_param", "slow_weights", "cached_params", "master_param")

# Optimizers whose state mixes entries of parameters, so that no entry can be carried by itself.
_REFUSED = ("LBFGS", "Adafactor", "Shampoo", "SOAP", "CAME", "SM3", "GaLore", "KFAC")


def require_supported(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse optimizers that do not hold these parameters, or whose state cannot follow their cut.

    Of several, those that hold none of these parameters may be of any kind.
    """
    parts = parts_of(optimizer)
    for part in parts:
        try:
            groups = list(part.param_groups)
            _ = part.state
        except AttributeError:
            raise CompressionError(
                f"optimizer is a {type(part).__name__}, expected one with param_groups and state"
            ) from None
        held = {id(parameter) for group in groups for parameter in group["params"]}
        if len(parts) == 1 or any(id(parameter) in held for parameter in parameters.values()):
            _require_kind(part)
            require_no_moments_beside(part, parameters)
    require_held(optimizer, parameters)
    for name, parameter in parameters.items():
        for part in parts:
            for key, value in part.state.get(parameter, {}).items():
                _require_plain(type(part).__name__, name, parameter, key, value)


def _require_kind(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    if kind == "ZeroRedundancyOptimizer":
        raise CompressionError(
            f"{kind} keeps each state in one process only and cannot follow a cut; expected Adam or another"
        )
    require_no_other_inside(optimizer)
    if mixes_parameters(optimizer):
        raise CompressionError(
            f"{kind} mixes the entries of parameters in its state; expected Adam, SGD or another that keeps them apart"
        )
    if any("prev_flat_grad" in state or "old_dirs" in state for state in optimizer.state.values()):
        raise CompressionError(f"{kind} holds the state of LBFGS, which mixes all parameters; expected Adam or another")


def require_held(
    optimizer: Any, parameters: Mapping[str, nn.Parameter], trained: Collection[int] | None = None
) -> None:
    """Refuse parameters that are in two groups, and those to be `trained`, by default all, that are in none."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    places: dict[int, str] = {}
    parts = parts_of(optimizer)
    for k, part in enumerate(parts):
        for j, group in enumerate(part.param_groups):
            place = f"group {j} of {'the optimizer' if len(parts) == 1 else f'optimizer[{k}], {type(part).__name__}'}"
            for parameter in group["params"]:
                if places.setdefault(id(parameter), place) != place:
                    said = names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
                    raise CompressionError(
                        f"{said} is in {places[id(parameter)]}, and in {place}: two steps would train it in every"
                        " batch; expected each parameter in one group of one optimizer"
                    )
    needed = {name: p for name, p in parameters.items() if p.requires_grad and (trained is None or id(p) in trained)}
    missing = [name for name, p in needed.items() if id(p) not in places]
    if missing:
        who = "the optimizer does not hold" if len(parts) == 1 else f"none of {kind_of(optimizer)} holds"
        raise CompressionError(
            f"{who} {', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}: pass every optimizer that trains this"
            " model, optimizer=[first, second]; freeze parameters that none of them trains (requires_grad_(False))"
        )


def require_followable(optimizer: Any, parameters: Mapping[str, nn.Parameter], moments: Moments) -> None:
    """Refuse a state that `moments` could not carry through a cut of these parameters.

    Before its first step an optimizer has no state. If it is none of torch's, a copy of it makes a step to show it.
    """
    for part in parts_of(optimizer):
        own = {name: p for name, p in parameters.items() if p.requires_grad and holds(part, p)}
        states = {name: state for name, p in own.items() if (state := part.state.get(p))}
        if own and not states:
            own, states, twin = state_after_a_step(part, own)
            if twin is not None:
                require_no_moments_beside(twin, own)
            for name, key, value in _pairs(states):
                _require_plain(type(part).__name__, name, own[name], key, value)
                if role_of(key, states[name]) is None and are_weights(value, own[name]):
                    raise _holds_weights(type(part).__name__, key)
        _require_roles(type(part).__name__, own, states, moments)


def _require_roles(
    kind: str, parameters: Mapping[str, nn.Parameter], states: Mapping[str, Mapping[str, Any]], moments: Moments
) -> None:
    """Refuse entries that hold weights, and entries whose meaning the rule must know and does not."""
    entries = {
        key: role_of(key, states[name]) for name, key, value in _pairs(states) if not is_scalar(value, parameters[name])
    }
    for key in entries:
        if key in _POINTS:
            raise _holds_weights(kind, key)
    unknown = [key for key, role in entries.items() if role is None]
    if unknown and moments.needs_roles:
        raise CompressionError(
            f"{kind} keeps {', '.join(map(repr, unknown))}, whose meaning {moments} does not know;"
            " expected moments=Restart() or Slice(), which need not know it, or another optimizer, such as AdamW"
        )


def _holds_weights(kind: str, key: str) -> CompressionError:
    return CompressionError(
        f"{kind} keeps weights in {key!r}, which cannot follow a cut; expected another optimizer, such as AdamW, or a"
        " cut before it is made: compress_(model, ...), then a new optimizer"
    )


def mixes_parameters(optimizer: Any) -> bool:
    """True if the state of one parameter may not have its shape, as in LBFGS and factored optimizers."""
    return any(name in ancestor.__name__ for ancestor in type(optimizer).__mro__ for name in _REFUSED)


def _require_plain(kind: str, name: str, parameter: nn.Parameter, key: str, value: object) -> None:
    """Refuse an entry that is neither a number nor a floating-point tensor of the parameter's shape."""
    said = f"{kind}'s {key!r} of {name}"
    if value is None or isinstance(value, int | float | str):
        return
    if not is_plain(value):
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
    return states_after([change], optimizer, moments)[0]


def states_after(
    changes: Sequence[Change], optimizer: Any, moments: Moments, layers: Sequence[str] | None = None
) -> list[dict[str, dict[str, Any]]]:
    """The same for several changes, those that can be stacked together; errors name the `layers`."""
    prefixes = [f"{layer}." if layer else "" for layer in layers or [""] * len(changes)]
    held = [_held(change, optimizer, moments, prefix) for change, prefix in zip(changes, prefixes, strict=True)]
    _require_usable(held, prefixes)
    groups: dict[Hashable, list[int]] = {}
    for k, (change, one) in enumerate(zip(changes, held, strict=True)):
        key = change.stacking_key if moments.stacks and one.entries else None
        groups.setdefault(k if key is None else (type(change), key, one.form), []).append(k)
    carried: dict[int, dict[str, dict[str, Tensor]]] = {}
    for members in groups.values():
        found = _carried_together([changes[k] for k in members], [held[k].entries for k in members], moments)
        carried |= dict(zip(members, found, strict=True))
    new = [one.renewed(carried[k], moments) for k, one in enumerate(held)]
    _require_storable(new, prefixes)
    return new


def _carried_together(
    changes: Sequence[Change], entries: Sequence[Entries], moments: Moments
) -> list[dict[str, dict[str, Tensor]]]:
    if not entries[0]:
        return [{} for _ in changes]
    if len(changes) == 1:
        return [moments.carry(changes[0], entries[0])]
    stacked = {
        key: replace(
            entry, values={name: torch.stack([one[key].values[name] for one in entries]) for name in entry.values}
        )
        for key, entry in entries[0].items()
    }
    carried = moments.carry(type(changes[0]).together(changes), stacked)
    found = []
    for k, change in enumerate(changes):
        own = {key: {name: value[k] for name, value in values.items()} for key, values in carried.items()}
        found.append({key: _within(values, change.values) for key, values in own.items()})
    return found


def _within(values: Values, like: Values) -> dict[str, Tensor]:
    """The first entries along every axis, as many as in `like`: other layers of the stack may have more states."""
    return {name: value[tuple(map(slice, like[name].shape))] for name, value in values.items()}


def rehearse_moments(changes: Sequence[Change], moments: Moments) -> None:
    """Carry made-up moments of Adam through these changes and discard them."""
    groups: dict[Hashable, list[Change]] = {}
    for change in changes:
        key = change.stacking_key if moments.stacks else None
        groups.setdefault(id(change) if key is None else (type(change), key), []).append(change)
    for group in groups.values():
        _carried_together(group, [_made_up(change) for change in group], moments)


def _made_up(change: Change) -> Entries:
    old = {name: change.module.get_parameter(name).detach() for name in change.resized}
    ones = {name: torch.ones_like(value, dtype=torch.float64) for name, value in old.items()}
    first, units = dict.fromkeys(ones, 0.0), dict.fromkeys(ones, 1.0)
    roles = {"exp_avg": Role.GRADIENT, "exp_avg_sq": Role.GRADIENT_SQUARE}
    return {key: Entry(role, ones, first, units) for key, role in roles.items()}


@dataclass(frozen=True)
class _Held:
    """The state that an optimizer holds of a module's resized parameters, and its entries in float64.

    `labels` tells for every parameter and key which entry holds its value.
    """

    parameters: Mapping[str, nn.Parameter]
    states: Mapping[str, Mapping[str, Any]]
    labels: Mapping[tuple[str, str], str]
    entries: Entries

    @property
    def form(self) -> Hashable:
        """Everything about the entries except their values."""
        return tuple(
            (key, entry.role, *((name, entry.initial[name], entry.units[name]) for name in entry.values))
            for key, entry in self.entries.items()
        )

    def renewed(self, carried: Mapping[str, Mapping[str, Tensor]], moments: Moments) -> dict[str, dict[str, Any]]:
        """The new states, by name of the parameter."""
        new: dict[str, dict[str, Any]] = {name: {} for name, state in self.states.items() if state}
        for name, key, value in _pairs(self.states):
            if is_scalar(value, self.parameters[name]):
                new[name][key] = moments.carry_scalar(key, value)
            else:
                found = carried[self.labels[name, key]][name]
                new[name][key] = found.to(value.device, value.dtype, copy=True, memory_format=torch.contiguous_format)
        return new


def _held(change: Change, optimizer: Any, moments: Moments, prefix: str) -> _Held:
    parameters = {name: change.module.get_parameter(name) for name in change.resized}
    require_supported(optimizer, {f"{prefix}{name}": parameter for name, parameter in parameters.items()})
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    for part in parts_of(optimizer):
        own = {name: states[name] for name, parameter in parameters.items() if parameter in part.state}
        _require_roles(type(part).__name__, parameters, own, moments)
    return _Held(parameters, states, *_entries(change, optimizer, parameters, states))


def _pairs(states: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    for name, state in states.items():
        for key, value in state.items():
            yield name, key, value


def _entries(
    change: Change, optimizer: Any, parameters: Mapping[str, nn.Parameter], states: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[tuple[str, str], str], dict[str, Entry]]:
    """The entries, and for every parameter and key which of them holds its value.

    Optimizers may use one key for two roles: `momentum_buffer` of Muon and of RMSprop are two entries.
    """
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    labels: dict[tuple[str, str], str] = {}
    entries: dict[str, Entry] = {}
    for name, key, value in _pairs(states):
        if is_scalar(value, parameters[name]):
            continue
        role, group = role_of(key, states[name]), groups.get(id(parameters[name]), {})
        label = key if key not in entries or entries[key].role is role else f"{key}, {role}"
        entry = entries.setdefault(label, Entry(role, {}, {}, {}))
        double = value.detach().to(change.values[name].device, torch.float64)
        first = float(group.get(_INITIAL.get(key, ""), 0.0))
        entries[label] = Entry(
            role,
            {**entry.values, name: double},
            {**entry.initial, name: first},
            {**entry.units, name: _unit(key, group)},
        )
        labels[name, key] = label
    return labels, entries


def _unit(key: str, group: Mapping[str, Any]) -> float:
    """The number of mean gradients that an entry is; SGD sums them up, and only its groups have `dampening`."""
    if key != "momentum_buffer" or "dampening" not in group or not 0 <= group["momentum"] < 1:
        return 1.0
    return float((1 - group["dampening"]) / (1 - group["momentum"])) or 1.0


def role_of(key: str, state: Mapping[str, Any]) -> Role | None:
    """The meaning of an entry beside the others of its parameter; None if it is not known."""
    # RMSprop averages gradients that are already divided by their sizes.
    if key == "momentum_buffer" and "square_avg" in state:
        return Role.UPDATE
    return _ROLES.get(key)


def _require_usable(held: Sequence[_Held], prefixes: Sequence[str]) -> None:
    """Refuse entries that are not finite, and squares below 0; the extremes of all are read at once."""
    found = [
        (f"{key!r} of {prefix}{name}", entry.role, value)
        for one, prefix in zip(held, prefixes, strict=True)
        for key, entry in one.entries.items()
        for name, value in entry.values.items()
    ]
    for (said, role, value), (smallest, largest) in zip(found, _extremes([v for *_, v in found]), strict=True):
        if not (math.isfinite(smallest) and math.isfinite(largest)):
            unusable = int((~torch.isfinite(value)).sum())
            raise CompressionError(f"the optimizer's {said} holds {unusable} entries that are not finite")
        if role not in (Role.GRADIENT, Role.UPDATE, None) and smallest < 0:
            raise CompressionError(f"the optimizer's {said} holds {smallest:.3g}, expected none below 0")


def _extremes(tensors: Sequence[Tensor]) -> list[tuple[float, float]]:
    """The smallest and the largest entry of each, NaN if any is; the host waits once for every device."""
    found: dict[int, tuple[float, float]] = {}
    for device in {tensor.device for tensor in tensors}:
        there = [k for k, tensor in enumerate(tensors) if tensor.device == device]
        pairs = torch.stack([part for k in there for part in torch.aminmax(tensors[k])]).tolist()
        found |= dict(zip(there, zip(pairs[::2], pairs[1::2], strict=True), strict=True))
    return [found[k] for k in range(len(tensors))]


def _require_storable(states: Sequence[Mapping[str, Mapping[str, Any]]], prefixes: Sequence[str]) -> None:
    new = [
        (f"{prefix}{name}", key, value)
        for one, prefix in zip(states, prefixes, strict=True)
        for name, key, value in _pairs(one)
        if isinstance(value, Tensor)
    ]
    if not are_finite(value for *_, value in new):
        name, key, value = next(item for item in new if not is_finite(item[2]))
        raise CompressionError(f"after the cut {key!r} of {name} would not be finite in {value.dtype}")
