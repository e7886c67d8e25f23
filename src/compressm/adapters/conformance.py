"""The public test of an adapter: whoever writes one runs it, and it says which promise is broken and by how much."""

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

# Halving it must leave something, and two states are killed to see them go.
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
    """Measure all that an adapter promises on what `make_module()` returns; `ConformanceError` names what is broken.

    - Reading simulates to the module's own output, but for a skip D·u.
    - encode(read) gives the values back and keeps the output, and encode alone changes nothing.
    - Removing a state without input and one without output keeps the output.
    - A truncated module is the truncated system, and the gain of its error is within the bound.
    - dtype, device, `requires_grad` and attributes of parameters survive; only axes of states change their sizes.
    - A training step moves every weight, also after a cut with the loss of before still referenced.
    - The state dict round-trips, and steps equal the sequence, after a cut.
    - read and encode have the derivatives of finite differences.

    The module is made with torch's seed at `seed`, of order 4 at least, and compared in `dtype` relative to its largest
    output. `run(module, u)` is the output for u of shape (batch, length, channels), by default `module(u)` or the first
    of it; `stream(module, u)` the same step by step, which layers of ours have and others may leave out.

    Of a `SelectiveAdapter` the promises are fewer: x_proj is given u; encode(read) gives the values back; states in
    another order and scale, or without input or output, make no difference; and after a cut all weights are trained.
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
    """All findings, if all of them hold."""
    findings = [finding for found in measured for finding in found]
    broken = [finding for finding in findings if not finding.holds]
    if broken:
        lines = "".join(f"\n- {finding}" for finding in broken)
        raise ConformanceError(f"{adapter} breaks {len(broken)} promises:{lines}")
    return findings


def _require_order(order: int) -> None:
    if order < _SMALLEST_ORDER:
        raise AdapterError(f"make_module gives a module of order {order}, expected at least {_SMALLEST_ORDER}")


def _trial(
    make: Callable[[], nn.Module],
    module: nn.Module,
    adapter: SSMAdapter[Any],
    run: Simulation | None,
    stream: Simulation | None,
    *rest: Any,
) -> Trial:
    """With what was not given filled in."""
    _require_order(adapter.read(module).order)
    if stream is None and isinstance(module, SSMLayer):
        stream = _streamed
    return Trial(make, module, adapter, run or _run, stream, *rest)


def _measure(promise: Callable[[AnyTrial], Iterator[Finding]], trial: AnyTrial) -> list[Finding]:
    try:
        return list(promise(trial))
    # Whatever goes wrong inside an adapter or its module, the promise it happened in has to be named.
    except Exception as error:
        raise ConformanceError(f"{trial.adapter} fails where it promises: {promise.__doc__} {error}") from error


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
