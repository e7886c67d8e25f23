"""Checked writing of parameters, before anything is changed, and tensors of a layer that no adapter would write."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from compressm.adapters.base import Adapter, parameter_of, registered_kind, require_module
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


def require_nothing_beside(name: str, module: nn.Module, adapter: Adapter[Any, Any], written: Collection[str]) -> None:
    """Refuse a tensor of the layer that its adapter does not know, if an axis has as many entries as the layer states.

    n or 2n entries count, unless another size of the layer is the same, such as its width: then nothing says what the
    entries are. A tensor is known if the code of the adapter's class makes it. A cut writes those in `written`.
    """
    kind: Any = registered_kind(type(module))
    known = _made_by(kind) | adapter.OPTIONAL | {path.split(".")[0] for path in written}
    beside = {path: value for path, value in _tensors(module) if not _is_known(path.split(".")[0], known)}
    if not beside:
        return
    order = adapter.order(module)
    sizes = {size for size in (order, 2 * order) if size > 2}
    for path, value in _tensors(module):
        if path not in beside:
            sizes -= _fixed_sizes(value, order if path in written else None)
    for path, value in beside.items():
        if found := sizes.intersection(value.shape):
            raise AdapterError(
                f"{f'{name}.' if name else ''}{path} has the shape {tuple(value.shape)}, and so an axis of"
                f" {max(found)} entries where the layer has {order} states; {adapter}, which reads a {kind.__name__},"
                " does not know it: a cut would leave it as it is. Write an adapter of your own,"
                f" @adapts({type(module).__name__}), that encodes it too; or leave the layer out by filter_fn; if it"
                " has nothing to do with the states, keep it in another module"
            )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a layer and of the modules inside, by path.

    Those of parametrizations and pruning are no tensors of their own.
    """
    for path, part in module.named_modules():
        for leaf, value in {**part._parameters, **part._buffers}.items():
            own = f"{path}.{leaf}" if path else leaf
            computed = own.startswith("parametrizations.") or leaf.endswith(("_orig", "_mask"))
            if isinstance(value, Tensor) and value.ndim and not computed:
                yield own, value


def _is_known(leaf: str, names: Collection[str]) -> bool:
    """True for one of the names, or one that begins or ends with a part of a formatted name, such as "_proj"."""
    return leaf in names or any(
        (part[0] == "_" and leaf.endswith(part)) or (part[-1] == "_" and leaf.startswith(part)) for part in names
    )


@lru_cache(maxsize=64)
def _made_by(kind: type) -> frozenset[str]:
    """The attributes that the code of a class and of its ancestors sets, by their names or by texts in the code."""
    found: set[str] = set()
    for ancestor in kind.__mro__:
        if ancestor not in (nn.Module, object):
            found.update(inspect.get_annotations(ancestor))
            for member in vars(ancestor).values():
                _collect(member, found)
    return frozenset(name for name in found if len(name) > 1 or name.isalpha())


# The functions that set attributes whose names are texts.
_SETTING = ("setattr", "register", "add_module")


def _collect(member: Any, found: set[str]) -> None:
    if isinstance(member, str):  # as in self.add_module(self.NAME, ...)
        found.add(member)
    function = inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", None)) or member)
    codes = [getattr(function, "__code__", None)]
    for code in codes:
        if not isinstance(code, CodeType):
            continue
        codes += code.co_consts
        found.update(str(one.argval) for one in dis.get_instructions(code) if one.opname == "STORE_ATTR")
        if any(text in name for name in code.co_names for text in _SETTING):
            texts = (text for one in code.co_consts for text in (one if isinstance(one, tuple) else (one,)))
            found.update(text for text in texts if isinstance(text, str))


def _fixed_sizes(value: Tensor, order: int | None) -> set[int]:
    """The sizes of all axes of a tensor, but for that of its states if it has an order."""
    sizes = list(value.shape)
    states = [size for size in (order, 2 * order) if size in sizes] if order is not None else []
    for size in states[:1]:
        sizes.remove(size)
    return set(sizes)
