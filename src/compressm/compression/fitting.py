"""Whether tensors from a file fit a model whose layers take the orders that the file says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from compressm.compression.naming import plain_state, ssm_layers
from compressm.errors import SavingError
from compressm.layers import SSMLayer
from compressm.ops import SequenceError

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


def expected_shapes(model: nn.Module, orders: Mapping[str, int], tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """The shape of every tensor once the layers have these orders, and the forms that such `tensors` are of."""
    shapes: dict[str, Shape] = {name: tuple(value.shape) for name, value in plain_state(model).items()}
    for layer, module in ssm_layers(model).items():
        prefix = f"{layer}." if layer else ""
        if not isinstance(module, SSMLayer):
            # Where the states stand is seen by reading the module afterwards.
            shapes |= {prefix + name: (None,) * value.ndim for name, value in module.named_parameters()}
            continue
        for name in module.tensors():
            shapes.pop(prefix + name, None)
        inside = module.shapes_at(orders[layer], _shapes_inside(layer, tensors))
        shapes |= {prefix + name: shape for name, shape in inside.items()}
    return shapes


def by_forms(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[set[str], dict[str, nn.Parameter]]:
    """What layers of ours would have, in the forms that such tensors are of, and have not now; and the other way."""
    added, gone = set[str](), dict[str, nn.Parameter]()
    for layer, module in ssm_layers(model).items():
        if isinstance(module, SSMLayer):
            now, prefix = module.tensors(), f"{layer}." if layer else ""
            then = module.shapes_at(module.order, _shapes_inside(layer, tensors))
            added |= {prefix + name for name in then.keys() - now.keys()}
            gone |= {prefix + name: p for name, p in module.named_parameters() if name in now.keys() - then.keys()}
    return added, gone


def take_forms_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let every layer of ours make room for tensors of such orders and forms."""
    for layer, module in ssm_layers(model).items():
        if isinstance(module, SSMLayer):
            module.take_form_(_shapes_inside(layer, tensors))


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


def require_values(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Nothing that a layer of ours would refuse to load."""
    for layer, module in ssm_layers(model).items():
        if isinstance(module, SSMLayer):
            try:
                module.require_values(_inside(layer, tensors))
            except SequenceError as error:
                raise SavingError(f"{layer or 'the model'}: {error}") from error


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown or "nothing"


def _shapes_inside(layer: str, tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in _inside(layer, tensors).items()}


def _inside(layer: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer, by the names they have there."""
    prefix = f"{layer}." if layer else ""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
