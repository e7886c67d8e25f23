"""Modules and tensors of a model by the names they have inside DistributedDataParallel, torch.compile and the like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from compressm.adapters import adapter_for, find
from compressm.adapters.base import plain_name
from compressm.errors import SavingError
from compressm.layers import SSMLayer
from compressm.ops import SequenceError
from compressm.saving.kinds import Stored, decode, encode, is_known_by_arguments


def plain_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module, wrappers left out; one that is used in several places is there under each of its names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    # What is wrapped comes after its wrapper and has the same name.
    return {plain_name(path, modules): module for path, module in modules.items()}


def state_names(model: nn.Module) -> dict[str, str]:
    """For every plain name of a tensor the key under which the model's state dict has it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {plain_name(key, modules): key for key in model.state_dict(keep_vars=True)}


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers themselves, not copies; one that is shared is there under each of its names."""
    state = model.state_dict(keep_vars=True)
    named = {name: state[key] for name, key in state_names(model).items()}
    for name, value in named.items():
        if type(value) not in (Tensor, nn.Parameter):
            raise SavingError(
                f"{name} is a {type(value).__name__}, expected a plain tensor: gather what is sharded, and remove "
                "what is not a tensor from the state dict"
            )
    return named


def module_versions(model: nn.Module) -> dict[str, Any]:
    """What the state dict says of its modules beside their tensors: the version of each."""
    modules = dict(model.named_modules(remove_duplicate=False))
    stored = getattr(model.state_dict(keep_vars=True), "_metadata", {})
    return {plain_name(path, modules): value for path, value in stored.items()}


def keyed_state(model: nn.Module, tensors: Mapping[str, Tensor], versions: Mapping[str, Any]) -> dict[str, Tensor]:
    """Plain names turned back into the keys of this model's state dict."""
    modules = dict(model.named_modules(remove_duplicate=False))
    state = _StateDict({key: tensors[name] for name, key in state_names(model).items()})
    named = {path: versions.get(plain_name(path, modules)) for path in modules}
    state._metadata = {path: value for path, value in named.items() if value is not None}
    return state


class _StateDict(dict[str, Tensor]):
    _metadata: dict[str, Any]


def first_names(named: Mapping[str, object]) -> dict[str, str]:
    """For every other name of an object, the first one."""
    seen: dict[int, str] = {}
    first = {name: seen.setdefault(id(value), name) for name, value in named.items()}
    return {name: other for name, other in first.items() if name != other}


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether the name is that of something in one of the modules."""
    return any(name.startswith(f"{module}.") for module in modules)


def ssm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer that has an order, once."""
    layers = {name: module for name, (module, _) in find(model).items()}
    known = set(layers.values())
    for name, module in plain_modules(model).items():
        if isinstance(module, SSMLayer) and module not in known:
            known.add(module)
            layers[name] = module
    return layers


def order_of(layer: nn.Module) -> int:
    """How many states the layer has now."""
    if isinstance(layer, SSMLayer):
        return layer.order
    adapter = adapter_for(layer)
    assert adapter is not None
    return adapter.order(layer)


def orders_of(model: nn.Module) -> dict[str, int]:
    """The order of every layer by name."""
    return {name: order_of(layer) for name, layer in ssm_layers(model).items()}


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
