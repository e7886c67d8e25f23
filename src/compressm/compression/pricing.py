"""Prices of a model's layers for budgets: what each order costs, and what the rest of the model does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import nn

from compressm.adapters import find
from compressm.compression.budget import Budget, Prices, share_of_time
from compressm.errors import AdapterError, CompressionError
from compressm.families import Layer


def _bytes(budget: Budget, model: nn.Module, layers: Mapping[str, Layer], names: Sequence[str]) -> Prices:
    """The bytes of a stream's states, for one sequence; other layers of the model count as they are."""
    uses, others = _uses(model), 0
    try:
        ends = {
            name: [uses[layers[name].module] * layers[name].state_bytes(order) for order in (0, 1)] for name in names
        }
        for name, (module, adapter) in find(model).items():
            others += 0 if name in names else uses[module] * adapter.state_bytes(module, adapter.order(module))
    except AdapterError as error:
        raise CompressionError(f"Budget: state_bytes: {error}") from error
    return Prices({name: partial(_line, *pair) for name, pair in ends.items()}, float(others))


def _parameters(budget: Budget, model: nn.Module, layers: Mapping[str, Layer], names: Sequence[str]) -> Prices:
    """The number of parameters of the whole model."""
    price, rest = {}, sum(parameter.numel() for parameter in model.parameters())
    for layer in (layers[name] for name in names):
        try:
            each = layer.state_parameters()
        except AdapterError as error:
            raise CompressionError(f"{layer.said}: {error}") from error
        price[layer.name] = partial(_line, 0, each)
        rest -= each * layer.order
    return Prices(price, float(rest))


def _milliseconds(budget: Budget, model: nn.Module, layers: Mapping[str, Layer], names: Sequence[str]) -> Prices:
    """The time of a step, of which every use of a layer has an equal share; other layers count as they are."""
    uses, found, measure = _uses(model), find(model), budget.measure
    assert measure is not None
    total = sum(uses[module] for module, _ in found.values())

    def time(module: nn.Module, order: int) -> float:
        return uses[module] * share_of_time(measure, total, order)

    rest = sum(time(module, adapter.order(module)) for name, (module, adapter) in found.items() if name not in names)
    return Prices({name: partial(time, layers[name].module) for name in names}, float(rest))


# By the unit of the budget; states have no other price than their number.
PRICES: dict[str, Callable[[Budget, nn.Module, Mapping[str, Layer], Sequence[str]], Prices]] = {
    "state_bytes": _bytes,
    "parameters": _parameters,
    "milliseconds": _milliseconds,
}


def _uses(model: nn.Module) -> Counter[nn.Module]:
    """The number of places that hold each module of the model: every one has a state of its own in a stream."""
    return Counter(module for _, module in model.named_modules(remove_duplicate=False))


def _line(at_zero: int, at_one: int, order: int) -> float:
    return float(at_zero + (at_one - at_zero) * order)
