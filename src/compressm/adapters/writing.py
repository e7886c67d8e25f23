"""Checked writing of parameters: everything is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from compressm.adapters.base import parameter_of, require_module
from compressm.control import DeviceError, PrecisionError, ShapeError
from compressm.control.validation import are_finite, require_all_finite
from compressm.errors import AdapterError
from compressm.layers import SSMLayer
from compressm.layers.parameters import replace_data


def write(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give the named parameters new values; everything is checked before anything is changed.

    Each parameter stays the same object with its dtype, device, `requires_grad`, hooks and attributes. Its gradient
    belongs to the old values and is dropped.
    """
    require_module("write", module)
    if not isinstance(values, Mapping):
        raise AdapterError(f"values are {values!r:.100}, expected {{parameter name: tensor}}")
    for parameter, data in prepared(module, values):
        replace_data(parameter, data)


def prepared(
    module: nn.Module, values: Mapping[str, Tensor], beside: Mapping[str, Tensor] | None = None
) -> list[tuple[nn.Parameter, Tensor]]:
    """The parameters that `write` would change, each with its new data; checks everything and changes nothing.

    `beside` holds other tensors that the module gets in the same cut, such as the maps of single channels.
    """
    parameters = {name: parameter_of(module, name) for name in values}
    _require_distinct(parameters)
    copies = {name: _prepare(name, parameter, values[name]) for name, parameter in parameters.items()}
    if not are_finite(copies.values()):
        require_all_finite({name: values[name] for name in copies})
        require_all_finite({f"in {copy.dtype} {name}": copy for name, copy in copies.items()})
    if beside:
        _require_one_form(module, {**copies, **beside})
    else:
        _require_one_order(module, copies)
    return [(parameter, copies[name]) for name, parameter in parameters.items()]


def _prepare(name: str, parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Check a value and copy it to the parameter's device and dtype."""
    if not isinstance(value, Tensor):
        raise AdapterError(f"the value of {name} is a {type(value).__name__}, expected a tensor")
    if value.ndim != parameter.ndim or value.numel() == 0:
        raise ShapeError(
            f"the value of {name} has shape {tuple(value.shape)}, expected as many axes as the parameter's "
            f"{tuple(parameter.shape)}, each of size at least 1"
        )
    if value.is_meta:
        raise DeviceError(f"the value of {name} is on the meta device, expected a tensor that holds values")
    if value.is_complex() and not parameter.is_complex():
        raise PrecisionError(f"the value of {name} is {value.dtype}, expected a real dtype like {parameter.dtype}")
    return value.detach().to(parameter.device, parameter.dtype, copy=True, memory_format=torch.contiguous_format)


def _require_distinct(parameters: Mapping[str, nn.Parameter]) -> None:
    names: dict[int, str] = {}
    for name, parameter in parameters.items():
        other = names.setdefault(id(parameter), name)
        if other != name:
            raise AdapterError(f"{other} and {name} are the same parameter: give it only one value")


def _require_one_order(module: nn.Module, prepared: Mapping[str, Tensor]) -> None:
    """Require that all tensors of one of our layers agree on the new order and change no other axis."""
    if not isinstance(module, SSMLayer):
        return
    shapes = {name: prepared.get(name, value).shape for name, value in module.tensors().items()}
    orders = {name: module.order_at(name, shape) for name, shape in shapes.items() if module.grows(name)}
    order = next((order for order in orders.values() if order is not None), module.order)
    for name, shape in shapes.items():
        expected = module.shape_at(name, orders.get(name) or order)
        if shape != expected:
            raise ShapeError(f"the value of {name} has shape {tuple(shape)}, expected {expected}")
    if len(set(orders.values())) > 1:
        raise ShapeError("the orders would disagree: " + ", ".join(f"{name} {order}" for name, order in orders.items()))


def _require_one_form(module: nn.Module, prepared: Mapping[str, Tensor]) -> None:
    """Require that all tensors of one of our layers agree on the new order and form."""
    if not isinstance(module, SSMLayer):
        return
    held = module.tensors()
    shapes = {name: tuple(value.shape) for name, value in {**held, **prepared}.items()}
    orders = (module.order_at(name, shapes[name]) for name in prepared if name in held and module.grows(name))
    expected = module.shapes_at(next((order for order in orders if order is not None), module.order), shapes)
    odd = next((name for name in shapes | expected if shapes.get(name) != expected.get(name)), None)
    if odd is not None:
        raise ShapeError(f"the value of {odd} has shape {shapes.get(odd)}, expected {expected.get(odd)}")
