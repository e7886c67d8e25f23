"""A model without its numbers: taken from one that lives, and built again on torch's meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from compressm.compression.fitting import expected_shapes, require_fit, require_orders, require_values, take_forms_
from compressm.compression.kinds import Stored, decode, encode, is_known_by_arguments
from compressm.compression.naming import (
    first_names,
    is_inside,
    order_of,
    orders_of,
    plain_modules,
    plain_state,
    ssm_layers,
)
from compressm.errors import SavingError

Named: TypeAlias = dict[str, Stored]

# Attributes that say how a model is used or where it came from, not what it is.
_PASSING = ("training", "name_or_path")


@final
@dataclass(frozen=True)
class Description:
    """What a model is made of, in JSON's types.

    `model` is its class with the arguments it was built with, `replaced` what was put in the place of its modules
    afterwards, and `changed` what was written to their attributes. `shared` gives modules and tensors that have another
    name already, `frozen` the parameters that are not trained.
    """

    model: Stored
    orders: dict[str, int]
    replaced: Named
    changed: Named
    shared: dict[str, str]
    frozen: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Description:
        """The inverse; a missing or unknown field, or one of another type, is refused by name."""
        wanted = [field.name for field in fields(cls)]
        if set(stored) != set(wanted):
            raise SavingError(f"the config has {', '.join(sorted(stored))}; expected {', '.join(wanted)}")
        for name, value in stored.items():
            kind = list if name == "frozen" else dict
            if not isinstance(value, kind):
                raise SavingError(f"{name} in the config is {value!r:.80}, expected a {kind.__name__}")
        return cls(**stored)


def describe(model: nn.Module) -> Description:
    """What it takes to build the model again."""
    stored = encode(model, type(model).__name__)
    twin = _build(stored)
    replaced = _make_alike(twin, model)
    state, shared_modules = plain_state(model), _outermost(first_names(plain_modules(model)))
    shared_tensors = {name: other for name, other in first_names(state).items() if not is_inside(name, shared_modules)}
    frozen = [name for name, value in state.items() if isinstance(value, nn.Parameter) and not value.requires_grad]
    shared = shared_modules | shared_tensors
    return Description(stored, orders_of(model), replaced, _changed(twin, model), shared, frozen)


def described(stored: Stored) -> Description:
    """The same of a model that is as its class builds it."""
    return describe(_build(stored))


def rebuild(description: Description, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The model with these very tensors; nothing is returned that does not fit."""
    model = _build(description.model)
    _put(model, description.replaced)
    _change(model, description.changed)
    _share(model, description.shared)
    orders = require_orders(model, description.orders)
    require_values(model, tensors)
    again = first_names(plain_state(model))
    expected = expected_shapes(model, orders, tensors)
    require_fit(tensors, {name: shape for name, shape in expected.items() if name not in again})
    take_forms_(model, tensors)
    _fill(model, tensors, again, set(description.frozen))
    _require_filled(model)
    for name, layer in ssm_layers(model).items():
        if order_of(layer) != orders[name]:
            raise SavingError(f"{name!r} reads as order {order_of(layer)}, the config says {orders[name]}")
    return model


def _build(stored: Stored, where: str = "the model") -> nn.Module:
    # No numbers are drawn or computed: HiPPO's eigenvectors alone would take seconds a layer.
    with torch.device("meta"):
        model = decode(stored, where)
    if not isinstance(model, nn.Module):
        raise SavingError(f"{where} is stored as {stored!r:.80}, which is no nn.Module")
    return model


def _make_alike(twin: nn.Module, model: nn.Module) -> Named:
    """Put into the twin what was put into the model after it was built, from the outside in."""
    replaced: Named = {}
    while found := _replaced(twin, model):
        again = found.keys() & replaced.keys()
        if again:
            raise SavingError(f"{', '.join(again)}: built again with the same arguments, it is not the same")
        _put(twin, found)
        replaced |= found
    gone = plain_modules(twin).keys() - plain_modules(model).keys()
    if gone:
        raise SavingError(f"{', '.join(sorted(gone))}: taken from the model after it was built; put nn.Identity there")
    return replaced


def _replaced(twin: nn.Module, model: nn.Module) -> Named:
    """Modules that are of another class, or built with other arguments, than those the model was built with."""
    built, found = plain_modules(twin), dict[str, Stored]()
    for name, module in plain_modules(model).items():
        if is_inside(name, found):
            continue
        other = built.get(name)
        if type(other) is not type(module) or _built_otherwise(module, other, name):
            found[name] = encode(module, name)
    return found


def _built_otherwise(module: nn.Module, other: nn.Module, name: str) -> bool:
    if type(module) is nn.Sequential:
        # What was added at its end is put there by name; in another order it would be another function.
        return list(module._modules)[: len(other._modules)] != list(other._modules)
    return is_known_by_arguments(type(module)) and bool(encode(module, name) != encode(other, name))


def _put(model: nn.Module, replaced: Named) -> None:
    for name, stored in replaced.items():
        try:
            model.set_submodule(name, _build(stored, name))
        except (AttributeError, ValueError) as error:
            raise SavingError(f"{name!r} cannot be put in its place: {error}") from error


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module keeps beside tensors, modules and hooks, which torch has behind underscores."""
    return {name: value for name, value in vars(module).items() if name[0] != "_" and name not in _PASSING}


def _changed(twin: nn.Module, model: nn.Module) -> Named:
    """Attributes that no longer are what the constructor made them."""
    built, found = plain_modules(twin), dict[str, Stored]()
    for name, module in plain_modules(model).items():
        now = _attributes(module)
        for attribute, before in _attributes(built[name]).items():
            full = f"{name}.{attribute}" if name else attribute
            if not _same(now.get(attribute, before), before):
                found[full] = encode(now[attribute], full)
    return found


def _same(now: object, before: object) -> bool:
    if now is before:
        return True
    try:
        return bool(encode(now, "") == encode(before, ""))
    except SavingError:
        # A function made in a constructor is another one each time.
        return type(now) is type(before)


def _change(model: nn.Module, changed: Named) -> None:
    modules = plain_modules(model)
    for full, stored in changed.items():
        name, _, attribute = full.rpartition(".")
        if name not in modules or attribute not in _attributes(modules[name]):
            raise SavingError(f"the config changes {full!r}, which the model does not have")
        setattr(modules[name], attribute, decode(stored, full))


def _outermost(shared: dict[str, str]) -> dict[str, str]:
    return {name: other for name, other in shared.items() if not is_inside(name, shared)}


def _share(model: nn.Module, shared: Mapping[str, str]) -> None:
    """Modules and tensors under their other names as well."""
    for name, other in shared.items():
        modules, state = plain_modules(model), plain_state(model)
        if name in modules and other in modules:
            model.set_submodule(name, modules[other])
        elif name in state and other in state:
            owner, _, leaf = name.rpartition(".")
            setattr(modules[owner], leaf, state[other])
        else:
            raise SavingError(f"the config shares {name!r} with {other!r}, which the model does not have both")
    found = {name for name in first_names(plain_state(model)) if name not in shared and not is_inside(name, shared)}
    if found:
        raise SavingError(f"{', '.join(sorted(found))}: shared by the constructor, but not in the config")


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], again: Mapping[str, str], frozen: set[str]) -> None:
    """Put the tensors in the place of those without numbers; what is shared stays shared."""
    modules, filled = plain_modules(model), dict[str, Tensor]()
    for name, empty in plain_state(model).items():
        if name not in again:
            filled[name] = _like(empty, tensors[name], trained=name not in frozen)
        owner, _, leaf = name.rpartition(".")
        setattr(modules[owner], leaf, filled[again.get(name, name)])


def _like(empty: Tensor, tensor: Tensor, *, trained: bool) -> Tensor:
    if not isinstance(empty, nn.Parameter):
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=trained and (tensor.is_floating_point() or tensor.is_complex()))
    vars(parameter).update(vars(empty))  # marks such as _no_weight_decay, which constructors leave
    return parameter


def _require_filled(model: nn.Module) -> None:
    for name, module in plain_modules(model).items():
        for leaf, value in [*module.named_buffers(recurse=False), *vars(module).items()]:
            if isinstance(value, Tensor) and value.is_meta:
                full = f"{name}.{leaf}" if name else leaf
                raise SavingError(f"{full} is not in the state dict: register it as a persistent buffer to save it")
