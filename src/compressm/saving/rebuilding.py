"""Models described in JSON's types and built again, with plain names: those without wrappers such as torch.compile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import count
from threading import get_ident
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from compressm.adapters import adapter_for, find
from compressm.errors import SavingError
from compressm.layers import SSMLayer, check_finite
from compressm.layers.parameters import is_plain, plain_name
from compressm.ops import SequenceError
from compressm.saving.kinds import Stored, decode, encode, is_known_by_arguments


def plain_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by plain name, without wrappers; a module used in several places has several names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    # A wrapped module has the name of its wrapper and comes after it.
    return {plain_name(path, modules): module for path, module in modules.items()}


def state_names(model: nn.Module) -> dict[str, str]:
    """The key in the model's state dict for every plain name of a tensor."""
    modules, named = dict(model.named_modules(remove_duplicate=False)), dict[str, str]()
    state = model.state_dict(keep_vars=True)
    for key, value in state.items():
        other = named.setdefault(plain_name(key, modules), key)
        if state[other] is not value:
            raise SavingError(
                f"{other} and {key} have one name, {plain_name(key, modules)}, without wrappers: pass the model inside"
                " its outermost wrapper, and give no module of yours a name that torch's wrappers use"
            )
    return named


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers themselves, not copies; a shared one has several names."""
    state = model.state_dict(keep_vars=True)
    named = {name: state[key] for name, key in state_names(model).items()}
    for name, value in named.items():
        if not is_plain(value):
            raise SavingError(
                f"{name} is a {type(value).__name__}, expected a plain tensor: gather what is sharded, and remove "
                "what is not a tensor from the state dict"
            )
    return named


def require_usable_weights(model: nn.Module) -> None:
    """Refuse to save a diverged model: the file that is there may be the last good one.

    SSM layers have no NaN and no infinity, other parameters no NaN; buffers, such as masks, hold what they like.
    """
    for name, module in plain_modules(model).items():
        if isinstance(module, SSMLayer):
            try:
                check_finite(module)
            except SequenceError as error:
                raise SavingError(f"{name}.{error}" if name else str(error)) from error
    for name, value in plain_state(model).items():
        if isinstance(value, nn.Parameter) and not value.is_meta and (bad := int(value.detach().isnan().sum())):
            raise SavingError(f"{name} holds {bad} entries that are NaN, expected none")


def module_versions(model: nn.Module) -> dict[str, Any]:
    """The version of every module, as the state dict stores it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    stored = getattr(model.state_dict(keep_vars=True), "_metadata", {})
    return {plain_name(path, modules): value for path, value in stored.items()}


def keyed_state(model: nn.Module, tensors: Mapping[str, Tensor], versions: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors under the keys of this model's state dict instead of plain names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    state = _StateDict({key: tensors[name] for name, key in state_names(model).items()})
    named = {path: versions.get(plain_name(path, modules)) for path in modules}
    state._metadata = {path: value for path, value in named.items() if value is not None}
    return state


class _StateDict(dict[str, Tensor]):
    _metadata: dict[str, Any]


def first_names(named: Mapping[str, object]) -> dict[str, str]:
    """The first name of an object for each of its other names."""
    seen: dict[int, str] = {}
    first = {name: seen.setdefault(id(value), name) for name, value in named.items()}
    return {name: other for name, other in first.items() if name != other}


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """True if something in one of the modules has this name."""
    return any(name.startswith(f"{module}.") for module in modules)


def ssm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer with an order, once."""
    layers = {name: module for name, (module, _) in find(model).items()}
    known = set(layers.values())
    for name, module in plain_modules(model).items():
        if isinstance(module, SSMLayer) and module not in known:
            known.add(module)
            layers[name] = module
    return layers


def orders_of(model: nn.Module) -> dict[str, int]:
    """The present order of every layer by name."""
    orders = {}
    for name, layer in ssm_layers(model).items():
        if isinstance(layer, SSMLayer):
            orders[name] = layer.order
        elif (adapter := adapter_for(layer)) is not None:
            orders[name] = adapter.order(layer)
    return orders


Shape: TypeAlias = tuple[int | None, ...]  # None: any size


def require_orders(model: nn.Module, orders: Any) -> dict[str, int]:
    """The orders of a file; they must be integers >= 1, one for every SSM layer of the model."""
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
    """The shape of every tensor of the model with these orders and with the form (such as maps) of these `tensors`."""
    shapes: dict[str, Shape] = {name: tuple(value.shape) for name, value in plain_state(model).items()}
    for layer, prefix, module in _places(model):
        if not isinstance(module, SSMLayer):
            # Its axes of states are unknown; the module is read afterwards.
            shapes |= {prefix + name: (None,) * value.ndim for name, value in module.named_parameters()}
            added, gone = _optional(layer, module, tensors)
            shapes |= {prefix + name: (None,) * value.ndim for name, value in added.items()}
            for name in gone:
                shapes.pop(prefix + name)
            continue
        for name in module.tensors():
            shapes.pop(prefix + name, None)
        inside = module.shapes_at(orders[layer], _shapes_inside(layer, tensors))
        shapes |= {prefix + name: shape for name, shape in inside.items()}
    return shapes


def _places(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Every SSM layer by name, with each prefix of its tensors: a layer that is used twice has two."""
    names = {id(layer): name for name, layer in ssm_layers(model).items()}
    for place, module in plain_modules(model).items():
        if id(module) in names:
            yield names[id(module)], f"{place}." if place else "", module


def by_forms(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[set[str], dict[str, nn.Parameter]]:
    """The tensors that layers lack in the form of these tensors, and the parameters that this form lacks."""
    added, gone = set[str](), dict[str, nn.Parameter]()
    for layer, prefix, module in _places(model):
        if not isinstance(module, SSMLayer):
            more, fewer = _optional(layer, module, tensors)
            added, gone = added | {prefix + name for name in more}, gone | {prefix + k: p for k, p in fewer.items()}
        else:
            now = module.tensors()
            then = module.shapes_at(module.order, _shapes_inside(layer, tensors))
            added |= {prefix + name for name in then.keys() - now.keys()}
            gone |= {prefix + name: p for name, p in module.named_parameters() if name in now.keys() - then.keys()}
    return added, gone


def take_forms_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give every layer the form of these tensors, and resize those of ours to their orders."""
    for layer, module in ssm_layers(model).items():
        if isinstance(module, SSMLayer):
            module.take_form_(_shapes_inside(layer, tensors))
            continue
        adapter, (added, gone) = adapter_for(module), _optional(layer, module, tensors)
        for name in (*added, *gone):
            assert adapter is not None
            empty = None
            if name in added:
                origin = module.get_parameter(adapter.JOINS[name])
                empty = nn.Parameter(origin.new_empty(added[name].shape), requires_grad=origin.requires_grad)
            setattr(*adapter.place(module, name), empty)


def _optional(
    layer: str, module: nn.Module, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
    """The parameters that a cut may add to a module of another package: those only in `tensors`, and only there."""
    adapter, prefix = adapter_for(module), f"{layer}." if layer else ""
    names = set() if adapter is None else adapter.OPTIONAL & adapter.JOINS.keys()
    now = {name: value for name, value in module.named_parameters() if name in names}
    then = {name: tensors[prefix + name] for name in names if prefix + name in tensors}
    return (
        {name: value for name, value in sorted(then.items()) if name not in now},
        {name: value for name, value in now.items() if name not in then},
    )


def require_fit(tensors: Mapping[str, Tensor], expected: Mapping[str, Shape]) -> None:
    """Refuse tensors with other names or shapes than expected."""
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
    """Refuse values that a layer of ours would refuse to load."""
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
    """The tensors of a layer, by their names in it."""
    prefix = f"{layer}." if layer else ""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


Named: TypeAlias = dict[str, Stored]

# Attributes that say how a model is used or where it came from; they are not saved.
_PASSING = ("training", "name_or_path")


@final
@dataclass(frozen=True)
class Description:
    """A model in JSON's types.

    `model` is its class and the arguments of its constructor. `replaced` are modules that were replaced after that, and
    `changed` attributes that were set. `shared` maps further names of modules and tensors to their first names.
    `frozen` names the parameters that are not trained.
    """

    model: Stored
    orders: dict[str, int]
    replaced: Named
    changed: Named
    shared: dict[str, str]
    frozen: list[str]

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Description:
        """The description of a stored dictionary; a missing, unknown or mistyped field is refused by name."""
        wanted = [field.name for field in fields(cls)]
        if set(stored) != set(wanted):
            raise SavingError(f"the config has {', '.join(sorted(stored))}; expected {', '.join(wanted)}")
        for name, value in stored.items():
            kind = list if name == "frozen" else dict
            if not isinstance(value, kind):
                raise SavingError(f"{name} in the config is {value!r:.80}, expected a {kind.__name__}")
        return cls(**stored)


def describe(model: nn.Module) -> Description:
    """A description from which `rebuild` builds the model again."""
    stored = encode(model, type(model).__name__)
    twin = build(stored)
    replaced = _make_alike(twin, model)
    _require_built(twin, model)
    state, again = plain_state(model), first_names(plain_modules(model))
    shared_modules = {name: other for name, other in again.items() if not is_inside(name, again)}
    shared_tensors = {name: other for name, other in first_names(state).items() if not is_inside(name, shared_modules)}
    frozen = [name for name, value in state.items() if isinstance(value, nn.Parameter) and not value.requires_grad]
    shared = shared_modules | shared_tensors
    return Description(stored, orders_of(model), replaced, _changed(twin, model), shared, frozen)


def rebuild(description: Description, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Build the model of a description with these very tensors; tensors that do not fit are refused."""
    with filled_by(tensors):
        model = build(description.model)
        _put(model, description.replaced)
    _change(model, description.changed)
    _share(model, description.shared)
    orders = require_orders(model, description.orders)
    require_values(model, tensors)
    again, places = first_names(plain_state(model)), first_names(plain_modules(model))
    expected = expected_shapes(model, orders, tensors)
    # A layer that is used twice also shares what a cut added to it, which it lacks until it takes the form.
    single = {name: shape for name, shape in expected.items() if name not in again and not is_inside(name, places)}
    require_fit(tensors, single)
    take_forms_(model, tensors)
    _fill(model, tensors, first_names(plain_state(model)), set(description.frozen))
    for layer in ssm_layers(model).values():
        adapter = adapter_for(layer)
        if adapter is not None:
            for path, value in adapter.constant_buffers(layer).items():
                setattr(*adapter.place(layer, path), value)
    _require_filled(model)
    for name, order in orders_of(model).items():
        if order != orders[name]:
            raise SavingError(f"{name!r} reads as order {order}, the config says {orders[name]}")
    return model


@contextmanager
def filled_by(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse to build far more parts of models than these tensors can fill: a forged depth would take all day."""
    most, thread, built = 1000 + 50 * len(tensors), get_ident(), count(1)

    def registered(*_: object) -> None:
        if get_ident() == thread and next(built) > most:
            raise SavingError(
                f"it has more than {most} parameters and modules, too many for the {len(tensors)} tensors"
            )

    handles: list[RemovableHandle] = []
    # An ExitStack that Ctrl-C interrupts removes nothing.
    try:
        hooks = (register_module_parameter_registration_hook, register_module_module_registration_hook)
        handles.extend(hook(registered) for hook in hooks)
        yield
    finally:
        for handle in handles:
            handle.remove()


def build(stored: Stored, where: str = "the model") -> nn.Module:
    """The module that was encoded, on the meta device."""
    # Nothing is drawn or computed: HiPPO's eigenvectors alone would take seconds per layer.
    with torch.device("meta"):
        model = decode(stored, where)
    if not isinstance(model, nn.Module):
        raise SavingError(f"{where} is stored as {stored!r:.80}, which is no nn.Module")
    return model


def _make_alike(twin: nn.Module, model: nn.Module) -> Named:
    """Replace modules of the twin as they were replaced in the model, from the outside in."""
    replaced: Named = {}
    while found := _replaced(twin, model):
        again = found.keys() & replaced.keys()
        if again:
            raise SavingError(f"{', '.join(again)}: the same arguments do not build the same module again")
        _put(twin, found)
        replaced |= found
    gone = plain_modules(twin).keys() - plain_modules(model).keys()
    if gone:
        raise SavingError(
            f"{', '.join(sorted(gone))}: removed from the model after it was built; put nn.Identity there"
        )
    return replaced


def _require_built(twin: nn.Module, model: nn.Module) -> None:
    """Refuse tensors that somebody registered, or gave another shape, after the constructors and outside cuts."""
    kind, built, state = type(model).__name__, plain_state(twin), plain_state(model)
    layers = tuple(prefix for _, prefix, _ in _places(model))
    cure = (
        "the constructor of a class of yours, decorated with @compressm.compression.savable, or that of a module that"
        " you put into the model. save_checkpoint keeps it too, for a model that you build and change in the same way"
    )
    if late := state.keys() - built.keys() - by_forms(twin, state)[0]:
        raise SavingError(
            f"{_listed(sorted(late))}: registered after the {kind} was built, so load_model could not build it again."
            f" Register it in {cure}"
        )
    for name, value in state.items():
        if name in built and built[name].shape != value.shape and not name.startswith(layers):
            then, now = tuple(built[name].shape), tuple(value.shape)
            raise SavingError(
                f"{name} has shape {now}, and its constructor makes {then}, so load_model could not build it again. Put"
                f" a whole module of the new size there, or give it that shape in {cure}"
            )


def _replaced(twin: nn.Module, model: nn.Module) -> Named:
    """Modules of another class, or with other arguments, than the model's constructor gave them."""
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
        # Modules added at the end are put there by name; another order would be another function.
        return list(module._modules)[: len(other._modules)] != list(other._modules)
    return is_known_by_arguments(type(module)) and bool(encode(module, name) != encode(other, name))


def _put(model: nn.Module, replaced: Named) -> None:
    for name, stored in replaced.items():
        try:
            model.set_submodule(name, build(stored, name))
        except (AttributeError, ValueError) as error:
            raise SavingError(f"{name!r} cannot be put in its place: {error}") from error


def _attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes except tensors, modules and hooks, whose names start with underscores."""
    return {name: value for name, value in vars(module).items() if name[0] != "_" and name not in _PASSING}


def _changed(twin: nn.Module, model: nn.Module) -> Named:
    """Attributes that differ from what the constructor sets."""
    built, found = plain_modules(twin), dict[str, Stored]()
    for name, module in plain_modules(model).items():
        now = _attributes(module)
        for attribute, before in _attributes(built[name]).items():
            full = f"{name}.{attribute}" if name else attribute
            if not _same(now.get(attribute, before), before):
                found[full] = encode(now[attribute], full)
    return found


def _same(now: object, before: object) -> bool:
    if now is before or _same_numbers(now, before):
        return True
    try:
        return bool(encode(now, "") == encode(before, ""))
    except SavingError:
        # A constructor makes a new function object each time.
        return type(now) is type(before)


def _same_numbers(now: object, before: object) -> bool:
    """True for equal lists of numbers, which may be infinite; JSON makes lists of tuples."""
    if not isinstance(now, list | tuple) or not isinstance(before, list | tuple):
        return False
    return all(isinstance(item, int | float) for item in (*now, *before)) and list(now) == list(before)


def _change(model: nn.Module, changed: Named) -> None:
    modules = plain_modules(model)
    for full, stored in changed.items():
        name, _, attribute = full.rpartition(".")
        if name not in modules or attribute not in _attributes(modules[name]):
            raise SavingError(f"the config changes {full!r}, which the model does not have")
        setattr(modules[name], attribute, decode(stored, full))


def _share(model: nn.Module, shared: Mapping[str, str]) -> None:
    """Give shared modules and tensors their further names."""
    for name, other in shared.items():
        modules, state = plain_modules(model), plain_state(model)
        if name in modules and other in modules:
            model.set_submodule(name, modules[other])
        elif name in state and other in state:
            owner, _, leaf = name.rpartition(".")
            setattr(modules[owner], leaf, state[other])
        else:
            raise SavingError(f"the config shares {name!r} with {other!r}, but the model does not have both")
    found = {name for name in first_names(plain_state(model)) if name not in shared and not is_inside(name, shared)}
    if found:
        raise SavingError(f"{', '.join(sorted(found))}: shared by the constructor, but not in the config")


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], again: Mapping[str, str], frozen: set[str]) -> None:
    """Replace the empty tensors by these; shared tensors stay shared."""
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
    vars(parameter).update(vars(empty))  # marks such as _no_weight_decay, which constructors set
    return parameter


def _require_filled(model: nn.Module) -> None:
    for name, module in plain_modules(model).items():
        for leaf, value in [*module.named_buffers(recurse=False), *vars(module).items()]:
            if isinstance(value, Tensor) and value.is_meta:
                full = f"{name}.{leaf}" if name else leaf
                raise SavingError(f"{full} is not in the state dict: register it as a persistent buffer to save it")
