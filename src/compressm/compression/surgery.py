"""Writing of cuts to modules and the optimizer: all of them or none, and attributes that change with the order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from compressm.adapters import Adapter, adapter_for, find
from compressm.adapters.base import Growth, encode_present, parameter_of, present_attributes, require_differentiable
from compressm.adapters.writing import prepared, require_nothing_beside
from compressm.compression.optimizer import (
    Moments,
    Role,
    is_scalar,
    require_followable,
    require_held,
    require_supported,
    role_of,
    states_after,
)
from compressm.compression.several import group_without_decay, join_, leave_, name_beside
from compressm.control import ControlError
from compressm.control.validation import are_finite, is_finite
from compressm.errors import AdapterError, CompressionError
from compressm.families import Layer
from compressm.families.base import Change, Values, Writing
from compressm.layers.base import StateMap, state_holders
from compressm.layers.parameters import plain_name, replace_data


def place_of(name: str, module: nn.Module, path: str) -> tuple[Any, str]:
    """The owner of an attribute that changes with the order, and its name there."""
    adapter = adapter_for(module)
    assert adapter is not None
    try:
        owner, leaf = adapter.place(module, path)
        getattr(owner, leaf)
    except AttributeError as error:
        raise CompressionError(f"{name or 'the model'}: {path} should change with the order: {error}") from None
    return owner, leaf


def take_orders_(model: nn.Module, undo: ExitStack) -> None:
    """Set what changes with the order, attributes and buffers of no file, to the orders of the present parameters."""
    for name, (module, adapter) in find(model).items():
        beside = adapter.unsaved_buffers(module, adapter.order(module))
        for path, value in {**present_attributes(module, adapter), **beside}.items():
            if path not in adapter.SHARED:
                place = place_of(name, module, path)
                undo.callback(setattr, *place, getattr(*place))
                setattr(*place, value)
    renew_shared_([model], undo)


def renew_shared_(models: Iterable[nn.Module], undo: ExitStack) -> None:
    """Give each model its own copy of what its modules share, such as a config, with the present orders."""
    for owner, leaf, value in _renewed(models):
        undo.callback(setattr, owner, leaf, getattr(owner, leaf))
        setattr(owner, leaf, value)


def _renewed(models: Iterable[nn.Module]) -> list[tuple[Any, str, Any]]:
    writes = []
    for model in models:
        sharing: dict[Adapter[Any, Any], list[nn.Module]] = {}
        for module, adapter in find(model).values():
            if adapter.SHARED:
                sharing.setdefault(adapter, []).append(module)
        writes += [write for adapter, modules in sharing.items() for write in adapter.renewed(model, modules)]
    return writes


def attributes_of(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """The owners and names of the attributes that a cut changes in place, by module and path; all must exist."""
    places: dict[str, tuple[Any, str]] = {}
    for name, (module, adapter) in find(model).items():
        for path in present_attributes(module, adapter):
            place = place_of(name, module, path)
            places |= {} if path in adapter.SHARED else {f"{name}/{path}": place}
    return places


def optional_in(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The parameters and buffers that layers got from a cut, by module and name."""
    return [
        (module, leaf)
        for module, adapter in find(model).values()
        for leaf in sorted(adapter.OPTIONAL)
        if getattr(module, leaf, None) is not None
    ]


@final
@dataclass(frozen=True)
class PreparedCut:
    """New values and new optimizer states of one module's parameters, by name.

    `writing` holds the rest: buffers, attributes, and the names of parameters that the module does not have yet.
    """

    name: str
    module: nn.Module
    values: Values
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    writing: Writing = field(default_factory=lambda: Writing({}))
    state_map: StateMap | None = None  # for streams of the module

    @property
    def present(self) -> list[str]:
        """The names of the parameters that exist already."""
        return [name for name in self.values if name not in self.writing.added]


def padded(cut: PreparedCut, adapter: Adapter[Any, Any], order: int) -> PreparedCut:
    """The same cut with states without effect, up to this order.

    Their first moments are zero. Their second moments are the mean over the other states: zeros would make the first
    update of one that gets a gradient, as in S4D, (1 − β₁)/√(1 − β₂) = 3.2 times too long.
    """
    try:
        growth = adapter.growth(cut.module)
    except AdapterError as error:
        raise CompressionError(f"{cut.name or 'the model'}: {error}") from error
    if odd := sorted(growth.keys() - cut.values):
        raise CompressionError(f"{cut.name or 'the model'}: the cut does not write {', '.join(odd)}, which must grow")
    n = next(own.order(cut.values[name]) for name, own in growth.items() if own.blocks)
    values = {
        name: own.resized(own.scaled(value, n, order), order) if (own := growth.get(name)) else value
        for name, value in cut.values.items()
    }
    states = {
        name: {key: _padded_entry(cut, name, key, growth, (n, order)) for key in state}
        for name, state in cut.states.items()
    }
    buffers = {**cut.writing.buffers, **adapter.unsaved_buffers(cut.module, order)}
    writing = replace(cut.writing, attributes=adapter.attributes(cut.module, order), buffers=buffers)
    own, through = adapter.state_growth(cut.module), cut.state_map
    state_map = None if through is None else lambda state: own.resized(own.scaled(through(state), n, order), order)
    return replace(cut, values=values, states=states, writing=writing, state_map=state_map)


# The exponents with which moments of θ go to those of c θ.
_EXPONENTS = {
    **{Role.GRADIENT: -1, Role.GRADIENT_SIZE: -1, Role.GRADIENT_SQUARE: -2},
    **{Role.UPDATE: 1, Role.UPDATE_SIZE: 1, Role.UPDATE_SQUARE: 2},
}


def _padded_entry(cut: PreparedCut, name: str, key: str, growth: Mapping[str, Growth], orders: tuple[int, int]) -> Any:
    """An entry of the optimizer's state for the parameter that is padded from one of these orders to the other."""
    value = cut.states[name][key]
    if name not in growth or not isinstance(value, Tensor) or value.shape != cut.values[name].shape:
        return value
    own, role = growth[name], role_of(key, cut.states[name])
    if role is None:
        raise CompressionError(
            f"the optimizer keeps {key!r} of {cut.name}.{name}, whose meaning is not known: pad the model before the"
            " optimizer is made"
        )
    value, order = own.scaled(value, *orders, _EXPONENTS[role]), orders[1]
    if role in (Role.GRADIENT, Role.UPDATE):
        return own.resized(value, order, fill=lambda block: block.new_zeros(()))
    return own.resized(value, order, fill=lambda block: block.mean(own.axis, keepdim=True))


def prepare_cut(name: str, change: Change, optimizer: Any | None, moments: Moments) -> PreparedCut:
    """Compute everything that a cut will write; nothing is changed."""
    return prepare_cuts({name: change}, optimizer, moments)[0]


def prepare_cuts(changes: Mapping[str, Change], optimizer: Any | None, moments: Moments) -> list[PreparedCut]:
    """Do the same for several cuts; the states of layers of equal shapes are computed together."""
    for name, change in changes.items():
        require_plain_parameters(name, change.module)
    found: list[dict[str, dict[str, Any]]] = [{} for _ in changes]
    if optimizer is not None:
        found = states_after(list(changes.values()), optimizer, moments, list(changes))
    return [
        PreparedCut(name, change.module, change.values, states, change.writing)
        for (name, change), states in zip(changes.items(), found, strict=True)
    ]


def apply_cuts(cuts: Sequence[PreparedCut], optimizer: Any | None = None) -> None:
    """Check every cut, then write them all; after an error, model and optimizer are as they were."""
    undo = ExitStack()
    try:
        write_cuts_(cuts, optimizer, undo)
    except BaseException:
        undo.close()
        raise


def write_cuts_(
    cuts: Sequence[PreparedCut], optimizer: Any | None, undo: ExitStack, models: Sequence[nn.Module] = ()
) -> None:
    """Check every cut, then write them all; closing `undo` puts everything back.

    Parameters stay the same objects in the same groups, with hooks and attributes; their gradients are dropped. The
    optimizer's dictionaries stay the same objects, with new tensors; added parameters join its groups. Each of the
    `models` that hold the modules gets its own copy of what they share, such as a config. Streams of the modules carry
    their states over.
    """
    writes = [write for cut in cuts for write in _checked_values(cut)]
    _require_disjoint(cuts)
    states = [state for cut in cuts for state in _checked_states(cut, optimizer)]
    _require_finite_states(cuts)
    # By module, because layers of followers have the same names.
    added = {(id(cut.module), name): _made(cut, name) for cut in cuts for name in cut.writing.added}
    attributes = [attribute for cut in cuts for attribute in _attributes(cut, added)]
    joining = [joined for cut in cuts for joined in _joining(cut, added, optimizer)]
    for cut in cuts:
        for stream in state_holders(cut.module):
            undo.callback(stream.carry_(cut.module, cut.state_map))
    for parameter, data in writes:
        undo.callback(_restore_, parameter, parameter.data, parameter.grad)
        replace_data(parameter, data)
    for held, new in states:
        undo.callback(_refill_, held, dict(held))
        held.update(new)
    for owner, leaf, value in attributes:
        undo.callback(setattr, owner, leaf, getattr(owner, leaf))
        setattr(owner, leaf, value)
    # The copies take the new orders from the parameters.
    renew_shared_(models or [cut.module for cut in cuts], undo)
    for group, parameter, name in joining:
        undo.callback(leave_, optimizer, [parameter])
        join_(group, parameter, name)


def _restore_(parameter: nn.Parameter, data: Tensor, gradient: Tensor | None) -> None:
    replace_data(parameter, data)
    parameter.grad = gradient


def _refill_(held: dict[str, Any], before: Mapping[str, Any]) -> None:
    held.clear()
    held.update(before)


def require_plain_parameters(name: str, module: nn.Module) -> None:
    """Refuse parameters that are not plain tensors of numbers: those of FSDP, DTensors, quantised ones."""
    # torch's FSDP marks the modules inside it so.
    if getattr(module, "_is_fsdp_managed_module", False):
        raise CompressionError(
            f"{name or 'the model'} is sharded by FSDP and cannot be cut; expected a model sharded by fully_shard and"
            " passed to a Compressor, or a cut before wrapping"
        )
    for entry, parameter in module.named_parameters():
        kinds = {type(parameter.data), type(parameter)}
        others = kinds - {Tensor, nn.Parameter}
        if any(kind.__name__ == "DTensor" for kind in others):
            raise CompressionError(
                f"{name}.{entry} is a DTensor of FSDP or tensor parallelism and cannot be cut; only Compressor and"
                " compress_ gather what fully_shard has sharded; cut it before sharding"
            )
        if type(parameter.data) is not Tensor:
            raise CompressionError(f"{name}.{entry} holds a {type(parameter.data).__name__}, expected a plain tensor")


def _checked_values(cut: PreparedCut) -> list[tuple[nn.Parameter, Tensor]]:
    require_plain_parameters(cut.name, cut.module)
    beside = {**cut.writing.buffers, **{name: cut.values[name] for name in cut.writing.added}}
    try:
        return prepared(cut.module, {name: cut.values[name] for name in cut.present}, beside)
    except (ControlError, AdapterError) as error:
        raise CompressionError(f"{cut.name or 'the model'}: {error}") from error


def _made(cut: PreparedCut, name: str) -> nn.Parameter:
    """A new parameter with the device, dtype, `requires_grad` and marks of the parameter that it joins."""
    origin = parameter_of(cut.module, cut.writing.added[name])
    value = cut.values[name].to(origin.device, origin.dtype, copy=True)
    if not is_finite(value):
        raise CompressionError(f"{cut.name}.{name} would hold entries that are not finite")
    made = nn.Parameter(value, requires_grad=origin.requires_grad)
    vars(made).update(vars(origin))
    return made


def _attributes(cut: PreparedCut, added: Mapping[tuple[int, str], nn.Parameter]) -> list[tuple[Any, str, Any]]:
    """The owner, the name there and the value of every attribute, buffer and added parameter."""
    new = dict(cut.writing.attributes)
    new |= {name: value.clone() for name, value in cut.writing.buffers.items()}
    new |= {name: added[id(cut.module), name] for name in cut.writing.added}
    adapter = adapter_for(cut.module)
    shared = frozenset[str]() if adapter is None else adapter.SHARED
    return [(*place_of(cut.name, cut.module, path), value) for path, value in new.items() if path not in shared]


def _joining(
    cut: PreparedCut, added: Mapping[tuple[int, str], nn.Parameter], optimizer: Any | None
) -> list[tuple[dict[str, Any], nn.Parameter, str]]:
    """The optimizer's group, for every added parameter, and the parameter's name there."""
    joining = []
    groups, adapter = ([] if optimizer is None else optimizer.param_groups), adapter_for(cut.module)
    for name, beside in cut.writing.added.items():
        origin, new = parameter_of(cut.module, beside), added[id(cut.module), name]
        for group in groups:
            if any(member is origin for member in group["params"]):
                decays = adapter is None or name not in adapter.UNDECAYED
                own = group if decays else group_without_decay(optimizer, group, cut.module, new)
                joining.append((own, new, name_beside(group, origin, beside, name)))
    return joining


def _require_disjoint(cuts: Sequence[PreparedCut]) -> None:
    """Refuse a parameter that two layers share."""
    owners: dict[int, str] = {}
    for cut in cuts:
        for name in cut.present:
            parameter, mine = parameter_of(cut.module, name), f"{cut.name}.{name}"
            if id(parameter) in owners:
                raise CompressionError(
                    f"{owners[id(parameter)]} and {mine} are one parameter, which cannot be cut twice at once"
                )
            owners[id(parameter)] = mine


def _checked_states(cut: PreparedCut, optimizer: Any | None) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
    """The optimizer's own dictionaries, each with its new entries."""
    if optimizer is None:
        if cut.states:
            raise CompressionError(f"{cut.name} was prepared with an optimizer and is applied without one")
        return []
    parameters = {name: parameter_of(cut.module, name) for name in cut.present}
    if cut.states:
        require_supported(optimizer, {name: parameters[name] for name in cut.states})
    found = []
    for name, parameter in parameters.items():
        held, new = optimizer.state.get(parameter, {}), cut.states.get(name, {})
        resized = parameter.shape != cut.values[name].shape
        if held.keys() != new.keys() and (resized or new):
            raise CompressionError(
                f"the optimizer's state of {cut.name}.{name} is {sorted(held)}, that of the prepared cut {sorted(new)}:"
                " it has changed since, or is another one in the first process; every process must load the optimizer"
            )
        for key, entry in new.items():
            _require_fit(f"{key!r} of {cut.name}.{name}", held[key], entry, parameter, cut.values[name])
        found += [(held, new)] if new else []
    return found


def _require_fit(said: str, old: Any, new: Any, parameter: nn.Parameter, value: Tensor) -> None:
    if not isinstance(old, Tensor):
        if isinstance(new, Tensor):
            raise CompressionError(f"{said} would become a tensor, it is {old!r}")
        return
    shape = old.shape if is_scalar(old, parameter) else value.shape
    if not isinstance(new, Tensor) or (new.shape, new.dtype, new.device) != (shape, old.dtype, old.device):
        got = f"{tuple(new.shape)} {new.dtype} {new.device}" if isinstance(new, Tensor) else repr(new)
        raise CompressionError(f"{said} would become {got}, expected {tuple(shape)} {old.dtype} {old.device}")


def _require_finite_states(cuts: Sequence[PreparedCut]) -> None:
    new = {
        f"{key!r} of {cut.name}.{name}": entry
        for cut in cuts
        for name, state in cut.states.items()
        for key, entry in state.items()
        if isinstance(entry, Tensor)
    }
    if not are_finite(new.values()):
        said = next(said for said, entry in new.items() if not is_finite(entry))
        raise CompressionError(f"{said} would hold entries that are not finite")


def require_suitable(model: nn.Module, layers: Mapping[str, Layer], optimizer: Any | None, moments: Moments) -> None:
    """Refuse by name parameters that other modules share, that are computed, or that the optimizer does not support."""
    _require_no_average_beside(model, layers)
    if optimizer is not None:
        _require_no_copy_beside(layers)
    owners = _owners(model)
    cut: dict[str, nn.Parameter] = {}
    for name, layer in layers.items():
        written = list(_cut_parameters(layer, carried=optimizer is not None and moments.needs_roles))
        try:
            require_nothing_beside(name, layer.module, layer.adapter, written)
        except AdapterError as error:
            raise CompressionError(str(error)) from error
        for entry in written:
            cut[f"{name}.{entry}" if name else entry] = layer.module.get_parameter(entry)
            others = owners[id(layer.module.get_parameter(entry))] - {f"{name}.{entry}" if name else entry}
            if others:
                raise CompressionError(
                    f"{name}.{entry} is also {', '.join(sorted(others))}: a parameter that two modules share cannot be"
                    " cut for one of them; use the same layer twice, or give each layer its own parameter"
                )
    if optimizer is not None:
        inside = {id(p) for layer in layers.values() for p in layer.module.parameters()}
        require_held(optimizer, dict(model.named_parameters()), trained=inside)
        require_supported(optimizer, cut)
        require_followable(optimizer, cut, moments)


def _cut_parameters(layer: Layer, *, carried: bool) -> Iterator[str]:
    """The parameters that a cut of the layer changes; moments that are `carried` need gradients of its adapter."""
    parameters = dict(layer.module.named_parameters(remove_duplicate=False))
    try:
        with torch.no_grad():
            values = encode_present(layer.adapter, layer.module, layer.system)
        if carried and values.keys() <= parameters.keys():
            require_differentiable(
                layer.adapter, layer.module, [key for key in values if parameters[key].requires_grad]
            )
    except AdapterError as error:
        raise CompressionError(f"{layer.said}: {error}") from error
    for entry in values:
        if entry not in parameters:
            raise CompressionError(
                f"{layer.name}.{entry} is not a parameter but computed from {', '.join(parameters)}: a parametrised,"
                " normalised or pruned weight cannot be cut; first remove that (torch.nn.utils.parametrize, .prune)"
            )
        yield entry


def _require_no_average_beside(model: nn.Module, layers: Mapping[str, Layer]) -> None:
    """Refuse an average that the model holds beside the averaged layers: each would get coordinates of its own."""
    modules = dict(model.named_modules())
    cut = {layer.module for layer in layers.values()}
    for path, module in modules.items():
        inside = cut.intersection(module.modules()) if isinstance(module, AveragedModel) else cut
        if inside and inside != cut:
            name = plain_name(path, modules)
            raise CompressionError(
                f"{name} is an {type(module).__name__} inside the model, and was to be cut apart from the layers beside"
                " it: the average of the cut model would make no sense; pass the trained part as the model and"
                f" follow=[model.{name}]; to callbacks of trainers, part='...', follow=['{name}']"
            )


def _require_no_copy_beside(layers: Mapping[str, Layer]) -> None:
    """Refuse a frozen layer whose weights are about those of a trained one: each would get coordinates of its own."""
    trained = {name: layer for name, layer in layers.items() if _is_trained(layer)}
    for name, layer in layers.items():
        alike = [n for n, other in trained.items() if type(other.module) is type(layer.module)] * (name not in trained)
        if alike:
            other = max(alike, key=lambda one: _common_end(one, name))
            if _is_near(layer.module, trained[other].module):
                parts = name.split(".")
                path = ".".join(parts[: len(parts) - _common_end(other, name)]) or name
                raise CompressionError(
                    f"{name} is frozen, and about a copy of {other}, such as an average or a teacher: cut apart, the"
                    " states of one would not be those of the other; pass the trained part as the model and"
                    f" follow=[model.{path}] (to callbacks of trainers, part='...', follow=['{path}']), or leave it as"
                    " it is by filter_fn"
                )


def _is_trained(layer: Layer) -> bool:
    return any(parameter.requires_grad for parameter in layer.module.parameters())


def _common_end(first: str, second: str) -> int:
    """The number of parts at the end that two names share."""
    pairs = zip(reversed(first.split(".")), reversed(second.split(".")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_near(first: nn.Module, second: nn.Module) -> bool:
    """True if all parameters differ by less than half of their size; unrelated ones differ by √2 times it."""
    pairs = zip(first.parameters(), second.parameters(), strict=False)
    with torch.no_grad():
        return all(
            a.shape == b.shape and bool((a - b.to(a)).norm() <= b.to(a).norm() / 2)
            for a, b in sorted(pairs, key=lambda pair: -pair[0].numel())
        )


def _owners(model: nn.Module) -> dict[int, set[str]]:
    """The names of every parameter without those of wrappers, one for each module that has it."""
    owners: dict[int, set[str]] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                named = plain_name(f"{path}.{name}" if path else name, modules)
                owners.setdefault(id(parameter), set()).add(named)
    return owners
