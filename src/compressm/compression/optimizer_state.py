"""What an optimizer holds about a parameter, known by the names of its entries, and the same after a cut.

Any optimizer with `param_groups` and `state` will do, also one that wraps another; it is never rebuilt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compressm.compression.change import Change
from compressm.compression.moments import Entry, Moments, Role
from compressm.control.validation import is_finite
from compressm.errors import CompressionError

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

State = Mapping[str, Any]


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


def _pairs(states: Mapping[str, State]) -> Iterator[tuple[str, str, Any]]:
    for name, state in states.items():
        for key, value in state.items():
            yield name, key, value


def _entries(
    change: Change, optimizer: Any, parameters: Mapping[str, nn.Parameter], states: Mapping[str, State]
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


def _role(key: str, state: State) -> Role | None:
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
