"""The public test of an adapter, for everyone who writes one: it says which promise is broken, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from compressm.adapters.base import Adapter, adapter_for, linear_adapter, require_call
from compressm.adapters.dense import DENSE_PROMISES, DenseAdapter, DenseTrial
from compressm.adapters.mamba import SelectiveAdapter
from compressm.adapters.promises import (
    PROMISES,
    SELECTIVE_PROMISES,
    Finding,
    SelectiveTrial,
    Simulation,
    Trial,
    make_seeded,
)
from compressm.control.validation import as_integer, is_number
from compressm.errors import AdapterError, ConformanceError
from compressm.layers import SSMLayer

AnyTrial = TypeVar("AnyTrial", Trial, DenseTrial, SelectiveTrial)

# The tests halve the order, and they remove two states.
_SMALLEST_ORDER = 4


def check_adapter(
    make_module: Callable[[], nn.Module],
    *,
    adapter: Adapter[Any, Any] | None = None,
    run: Simulation | None = None,
    stream: Simulation | None = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-8,
    length: int = 100,
    seed: int = 0,
) -> list[Finding]:
    """Test every promise of an adapter on the module from `make_module()`; a `ConformanceError` names the broken ones.

    - The system that is read simulates to the module's own output, except for a skip D·u.
    - encode(read) gives the values back and keeps the output, and encode alone changes nothing.
    - Removing a state without input and one without output keeps the output.
    - A truncated module computes the truncated system, and the gain of its error is within the bound.
    - Parameters keep dtype, device, `requires_grad` and attributes; only axes of states change their sizes.
    - A training step moves every weight, also after a cut while an earlier loss is still referenced.
    - After a cut the state dict round-trips, and single steps equal the whole sequence.
    - The derivatives of read and encode equal finite differences.
    - With a `setting`, stacked modules are read and encoded as each alone.

    The module is made with torch's seed set to `seed`, must have an order of at least 4, and is compared in `dtype`
    relative to its largest output. `run(module, u)` is the output for u of shape (batch, length, channels), by default
    `module(u)` or its first item. `stream(module, u)` is the same step by step; it is optional, and our layers have it.

    A `DenseAdapter` promises the same, but states without effect and stacks; parameters that rest need not move.

    A `SelectiveAdapter` makes fewer promises: x_proj gets u; encode(read) gives the values back; another order or scale
    of states, or removing states without input or output, changes nothing; after a cut all weights are trained.
    """
    _require_settings(make_module, run, stream, dtype, tolerance, length, seed)
    module = make_seeded(make_module, seed)
    found = adapter or adapter_for(module)
    tested = found if isinstance(found, SelectiveAdapter | DenseAdapter) else linear_adapter(module, found)
    order = tested.order(module)
    if order < _SMALLEST_ORDER:
        raise AdapterError(f"make_module returns a module of order {order}, expected at least {_SMALLEST_ORDER}")
    settings = (module, tested, run or _run, dtype, tolerance, length, seed)
    if isinstance(tested, SelectiveAdapter):
        return _findings(SELECTIVE_PROMISES, SelectiveTrial(*settings))
    if stream is None and isinstance(module, SSMLayer):
        stream = _streamed
    if isinstance(tested, DenseAdapter):
        return _findings(DENSE_PROMISES, DenseTrial(*settings, make_module, stream))
    return _findings(PROMISES, Trial(*settings, make_module, stream))


def _require_settings(
    make_module: object, run: object, stream: object, dtype: object, tolerance: object, length: object, seed: object
) -> None:
    """Refuse settings that no adapter could meet."""
    require_call("make_module", make_module)
    if isinstance(make_module, nn.Module):
        raise AdapterError(
            f"make_module is a {type(make_module).__name__}, expected a function that makes one: lambda: ..."
        )
    for name, function in (("run", run), ("stream", stream)):
        if function is not None:
            require_call(name, function, "module", "u")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise AdapterError(f"dtype is {dtype!r}, expected a floating-point dtype of torch")
    if not is_number(tolerance) or not 0 < tolerance < 1:  # type: ignore[operator]
        raise AdapterError(f"tolerance is {tolerance!r}, expected a number above 0 and below 1")
    for name, value, low in (("length", length, 2), ("seed", seed, 0)):
        number = as_integer(value)
        if number is None or number < low:
            raise AdapterError(f"{name} is {value!r}, expected an integer of at least {low}")


def _findings(promises: Iterable[Callable[[AnyTrial], Iterator[Finding]]], trial: AnyTrial) -> list[Finding]:
    """All findings; raises an error if one does not hold."""
    findings = [finding for promise in promises for finding in _measure(promise, trial)]
    broken = [finding for finding in findings if not finding.holds]
    if broken:
        lines = "".join(f"\n- {finding}" for finding in broken)
        raise ConformanceError(f"{trial.adapter} breaks {len(broken)} promises:{lines}")
    return findings


def _measure(promise: Callable[[AnyTrial], Iterator[Finding]], trial: AnyTrial) -> list[Finding]:
    try:
        return list(promise(trial))
    # Whatever goes wrong inside an adapter or its module, the error must name the promise.
    except Exception as error:
        raise ConformanceError(f"{trial.adapter} fails in the promise: {promise.__doc__} {error}") from error


def _run(module: nn.Module, u: Tensor) -> Tensor:
    y = module(u)
    return y[0] if isinstance(y, tuple) else y


def _streamed(module: nn.Module, u: Tensor) -> Tensor:
    assert isinstance(module, SSMLayer)
    state, outputs = module.initial_state(len(u)), []
    for x in u.unbind(1):
        y, state = module.step(x, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1)
