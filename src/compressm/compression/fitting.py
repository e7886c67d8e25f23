"""Whether tensors from a file fit a model whose layers take the orders that the file says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from compressm.compression.errors import SavingError
from compressm.compression.naming import plain_state, ssm_layers
from compressm.layers import SSMLayer

Shape: TypeAlias = tuple[int | None, ...]  # None: of any size


def require_orders(model: nn.Module, orders: Any) -> dict[str, int]:
    """A whole number of at least 1 for every SSM layer of the model, and for nothing else."""
    layers = ssm_layers(model)
    if not isinstance(orders, Mapping) or set(orders) != set(layers):
        came = ", ".join(map(repr, orders)) if isinstance(orders, Mapping) else repr(orders)
        expected = ", ".join(map(repr, layers))
        raise SavingError(f"the file has the orders of {came or 'nothing'}, expected those of {expected or 'nothing'}")
    for name, order in orders.items():
        if isinstance(order, bool) or not isinstance(order, int) or order < 1:
            raise SavingError(f"the file has the order {order!r} for {name!r}, expected an integer of at least 1")
    return {name: orders[name] for name in layers}


def expected_shapes(model: nn.Module, orders: Mapping[str, int]) -> dict[str, Shape]:
    """The shape of every tensor once the layers have these orders."""
    shapes: dict[str, Shape] = {name: tuple(value.shape) for name, value in plain_state(model).items()}
    for layer, module in ssm_layers(model).items():
        for name, _ in module.named_parameters():
            full = f"{layer}.{name}" if layer else name
            shapes[full] = _with_order(module, name, shapes[full], orders[layer])
    return shapes


def _with_order(module: nn.Module, name: str, shape: Shape, order: int) -> Shape:
    if not isinstance(module, SSMLayer):
        return (None,) * len(shape)  # where the states stand is seen by reading the module afterwards
    return module.shape_at(name, order)


def require_fit(tensors: Mapping[str, Tensor], expected: Mapping[str, Shape]) -> None:
    """Exactly the names and shapes expected."""
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        raise SavingError(
            f"the tensors do not fit the model: {_listed(missing)} missing, {_listed(unknown)} not expected"
        )
    for name, shape in expected.items():
        got = tuple(tensors[name].shape)
        if len(got) != len(shape) or any(size not in (None, found) for size, found in zip(shape, got, strict=True)):
            wanted = f"({', '.join('any' if size is None else str(size) for size in shape)})"
            raise SavingError(f"{name} has shape {got} in the file, expected {wanted}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown or "nothing"
