"""A trial of an optimizer: a copy of it makes one step on stand-ins, to show the state that it keeps."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

# Values of stand-ins for weights and gradients, so far apart that an entry close to the weights is a copy of them.
_WEIGHTS, _GRADIENT = (2.0, 3.0), 1e-3


def are_weights(value: object, stand_in: Tensor) -> bool:
    """True for a state that holds about the values that the stand-in had before the step."""
    if not isinstance(value, Tensor) or value.shape != stand_in.shape:
        return False
    near = (_WEIGHTS[1] - _WEIGHTS[0]) / 4
    return bool((value - _weights_like(stand_in)).abs().max() < near)


def _weights_like(parameter: Tensor) -> Tensor:
    values = torch.linspace(*_WEIGHTS, parameter.numel(), device=parameter.device)
    return values.to(parameter.dtype).reshape(parameter.shape)


def state_after_a_step(
    optimizer: Any, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, nn.Parameter], dict[str, dict[str, Any]], Any]:
    """Stand-ins for some of the parameters, the states that a copy of the optimizer gives them in its first step, and
    the copy, or None.

    Nothing is found for optimizers of torch, whose states are known, and for those that cannot step alone, because they
    need a closure, other processes or a prepared state: the first cut judges the states that they have then.
    """
    inner = _inside(optimizer)
    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    if inner is None or type(inner) in _known() or not alone or _has_global_hooks():
        return {}, {}, None
    try:
        with _undisturbed(parameters):
            chosen = _one_of_each_shape(inner, parameters)
            stand_ins = {name: _stand_in(parameters[name]) for name in chosen}
            twin = _twin(inner, {id(parameters[name]): stand_in for name, stand_in in stand_ins.items()})
            if callable(getattr(type(inner), "train", None)):
                twin.train()  # schedule-free optimizers step only in this mode
            # Not an instance's own `step`, which a scheduler may have bound to the user's optimizer.
            step = type(inner).step
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(twin)  # type: ignore[attr-defined]
            return stand_ins, {name: dict(twin.state[p]) for name, p in stand_ins.items() if p in twin.state}, twin
    except Exception:  # any error of somebody's code: the first cut will judge
        return {}, {}, None


def _known() -> set[Any]:
    """The optimizers of torch whose states are known to follow, or that are refused by name."""
    return {kind for kind in vars(torch.optim).values() if isinstance(kind, type)} - {torch.optim.ASGD}


def _one_of_each_shape(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Names of parameters, one for each shape in a group: layers are alike, and copies of all would need memory."""
    groups = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
    chosen: dict[tuple[Any, ...], str] = {}
    for name, p in parameters.items():
        chosen.setdefault((groups[id(p)], p.shape, p.dtype, p.device), name)
    return list(chosen.values())


def _inside(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer of torch's kind that keeps the groups, inside all wrappers (accelerate); None if there is none."""
    for _ in range(8):
        if isinstance(optimizer, torch.optim.Optimizer) and "param_groups" in vars(optimizer):
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None


def _has_global_hooks() -> bool:
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    return any(getattr(sys.modules[torch.optim.Optimizer.__module__], name, None) for name in names)


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of the same shape with marks, other values and a small gradient."""
    made = nn.Parameter(_weights_like(parameter.detach()))
    made.grad = torch.full_like(made, _GRADIENT)
    marks = {key: value for key, value in vars(parameter).items() if isinstance(value, bool | int | float | str)}
    vars(made).update(marks)
    return made


def _twin(optimizer: torch.optim.Optimizer, stand_ins: Mapping[int, nn.Parameter]) -> Any:
    """A copy of the optimizer without state and hooks, which holds only stand-ins."""
    twin = object.__new__(type(optimizer))
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    memo: dict[int, Any] = {id(p): stand_ins.get(id(p), nn.Parameter(torch.empty(0, device="cpu"))) for p in members}
    memo[id(optimizer)] = twin
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and isinstance(value, OrderedDict):  # hooks
            setattr(twin, name, OrderedDict())
        elif name not in ("param_groups", "state") and not (callable(value) and hasattr(type(optimizer), name)):
            setattr(twin, name, copy.deepcopy(value, memo))
    twin.state, twin.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        stays = [id(parameter) in stand_ins for parameter in group["params"]]
        new = {key: copy.deepcopy(value, memo) for key, value in group.items() if key not in ("params", "param_names")}
        for key in {"params", "param_names"} & group.keys():
            kept = [item for item, kept in zip(group[key], stays, strict=True) if kept]
            new[key] = [stand_ins[id(item)] for item in kept] if key == "params" else kept
        twin.param_groups.append(new)
    return twin


@contextmanager
def _undisturbed(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Restore the random state afterwards, and show no warning."""
    devices = {p.device for p in parameters.values() if p.device.type == "cuda"}
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=sorted(devices, key=str)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)  # noqa: NPY002
