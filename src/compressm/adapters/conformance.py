"""The public test of an adapter, for everyone who writes one: it says which promise is broken, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from compressm.adapters.base import Adapter, SSMAdapter, adapter_for, linear_adapter
from compressm.adapters.mamba import SelectiveAdapter
from compressm.adapters.promises import PROMISES, Finding, Simulation, Trial, make_seeded
from compressm.adapters.selective_promises import SELECTIVE_PROMISES, SelectiveTrial
from compressm.errors import AdapterError, ConformanceError
from compressm.layers import SSMLayer

AnyTrial = TypeVar("AnyTrial", Trial, SelectiveTrial)

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

    The module is made with torch's seed set to `seed`, must have an order of at least 4, and is compared in `dtype`
    relative to its largest output. `run(module, u)` is the output for u of shape (batch, length, channels), by default
    `module(u)` or its first item. `stream(module, u)` is the same step by step; it is optional, and our layers have it.

    A `SelectiveAdapter` makes fewer promises: x_proj gets u; encode(read) gives the values back; another order or scale
    of states, or removing states without input or output, changes nothing; after a cut all weights are trained.
    """
    module = make_seeded(make_module, seed)
    found = adapter or adapter_for(module)
    if isinstance(found, SelectiveAdapter):
        _require_order(found.order(module))
        selective = SelectiveTrial(module, found, run or _run, dtype, tolerance, length, seed)
        return _kept(found, [_measure(promise, selective) for promise in SELECTIVE_PROMISES])
    linear = linear_adapter(module, found)
    trial = _trial(make_module, module, linear, run, stream, dtype, tolerance, length, seed)
    return _kept(linear, [_measure(promise, trial) for promise in PROMISES])


def _kept(adapter: Adapter[Any, Any], measured: list[list[Finding]]) -> list[Finding]:
    """All findings; raises an error if one does not hold."""
    findings = [finding for found in measured for finding in found]
    broken = [finding for finding in findings if not finding.holds]
    if broken:
        lines = "".join(f"\n- {finding}" for finding in broken)
        raise ConformanceError(f"{adapter} breaks {len(broken)} promises:{lines}")
    return findings


def _require_order(order: int) -> None:
    if order < _SMALLEST_ORDER:
        raise AdapterError(f"make_module returns a module of order {order}, expected at least {_SMALLEST_ORDER}")


def _trial(
    make: Callable[[], nn.Module],
    module: nn.Module,
    adapter: SSMAdapter[Any],
    run: Simulation | None,
    stream: Simulation | None,
    *rest: Any,
) -> Trial:
    """A trial with defaults for `run` and `stream`."""
    _require_order(adapter.read(module).order)
    if stream is None and isinstance(module, SSMLayer):
        stream = _streamed
    return Trial(make, module, adapter, run or _run, stream, *rest)


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
