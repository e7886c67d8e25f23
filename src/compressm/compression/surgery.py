"""What modules keep beside their tensors and goes with their order, found by its path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor, nn

from compressm.adapters import adapter_for, find
from compressm.adapters.base import parameter_of, prepared, present_attributes
from compressm.compression.distributed import Processes
from compressm.compression.optimizer import (
    Moments,
    carried_states,
    is_scalar,
    joining,
    name_beside,
    parameter_state,
    require_supported,
)
from compressm.control.validation import is_finite
from compressm.errors import CompressionError
from compressm.families.base import Change, Values, Writing
from compressm.layers.parameters import replace_data


def place_of(name: str, module: nn.Module, path: str) -> tuple[Any, str]:
    """The object that has the attribute, and its name there, as the module's adapter says."""
    adapter = adapter_for(module)
    assert adapter is not None
    try:
        owner, leaf = adapter.place(module, path)
        getattr(owner, leaf)
    except AttributeError as error:
        raise CompressionError(f"{name or 'the model'}: {path} should go with the order: {error}") from None
    return owner, leaf


def take_orders_(model: nn.Module) -> None:
    """Set the attributes that go with orders to the orders that the parameters have by now."""
    for name, (module, adapter) in find(model).items():
        for path, value in present_attributes(module, adapter).items():
            setattr(*place_of(name, module, path), value)


def attributes_of(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """All attributes of a model that a cut may change, by module and path."""
    return {
        f"{name}/{path}": place_of(name, module, path)
        for name, (module, adapter) in find(model).items()
        for path in present_attributes(module, adapter)
    }


def optional_in(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Parameters and buffers that layers have since a cut, and had not before, by module and name."""
    return [
        (module, leaf)
        for module, adapter in find(model).values()
        for leaf in sorted(adapter.OPTIONAL)
        if getattr(module, leaf, None) is not None
    ]


@final
@dataclass(frozen=True)
class PreparedCut:
    """New values for parameters of one module, and new optimizer state for those that have one, by parameter name.

    `writing` has what else the module gets: buffers, attributes, and which of the parameters it does not have yet.
    """

    name: str
    module: nn.Module
    values: Values
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    writing: Writing = field(default_factory=lambda: Writing({}))

    @property
    def present(self) -> list[str]:
        """Parameters that are written to and that the module has already."""
        return [name for name in self.values if name not in self.writing.added]


@final
class Undo:
    """What was, to be brought back."""

    def __init__(self) -> None:
        self._values: list[tuple[nn.Parameter, Tensor, Tensor | None]] = []
        self._states: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        self._groups: list[tuple[list[Any], list[Any]]] = []

    def remember(
        self,
        writes: Iterable[tuple[nn.Parameter, Tensor]],
        states: Iterable[tuple[dict[str, Any], Mapping[str, Any]]],
        attributes: Iterable[tuple[Any, str, Any]],
        groups: Iterable[tuple[list[Any], Any]],
    ) -> None:
        """All that is about to be written to."""
        self._values += [(parameter, parameter.data, parameter.grad) for parameter, _ in writes]
        self._states += [(held, dict(held)) for held, _ in states]
        self._attributes += [(owner, leaf, getattr(owner, leaf)) for owner, leaf, _ in attributes]
        self._groups += [(members, list(members)) for members, _ in groups]

    def __call__(self) -> None:
        for parameter, data, gradient in self._values:
            replace_data(parameter, data)
            parameter.grad = gradient
        for held, before in self._states:
            held.clear()
            held.update(before)
        for attribute in self._attributes:
            setattr(*attribute)
        for members, then in self._groups:
            members[:] = then


def prepare_cut(name: str, change: Change, optimizer: Any | None, moments: Moments) -> PreparedCut:
    """All that a cut will write, computed; nothing is changed."""
    require_plain_parameters(name, change.module)
    states = {} if optimizer is None else carried_states(change, optimizer, moments)
    return PreparedCut(name, change.module, change.values, states, change.writing)


def apply_cuts(
    cuts: Sequence[PreparedCut], optimizer: Any | None = None, *, processes: Processes = Processes()
) -> None:
    """Check every cut, then make them all; whatever goes wrong, model and optimizer are afterwards as they were.

    Parameters stay the same objects in the same groups, with hooks and attributes; their gradients are dropped. The
    optimizer's dictionaries stay the same too, with new tensors in them; parameters that are added join its groups. Of
    several processes all do it or none.
    """
    undo = Undo()
    try:
        with processes.together("writing the cut"):
            writes = [write for cut in cuts for write in _checked_values(cut)]
            _require_disjoint(cuts)
            states = [state for cut in cuts for state in _checked_states(cut, optimizer)]
            # Layers of models that follow have the names of those that they follow.
            added = {(id(cut.module), name): _made(cut, name) for cut in cuts for name in cut.writing.added}
            attributes = [attribute for cut in cuts for attribute in _attributes(cut, added)]
            groups = [joined for cut in cuts for joined in _joined(cut, added, optimizer)]
            undo.remember(writes, states, attributes, groups)
            for parameter, data in writes:
                replace_data(parameter, data)
            for held, new in states:
                held.update(new)
            for attribute in attributes:
                setattr(*attribute)
            for members, entry in groups:
                members.append(entry)
    except BaseException:
        undo()
        raise


def require_plain_parameters(name: str, module: nn.Module) -> None:
    """Refuse parameters whose data is not all here, or not numbers: those of FSDP, DTensors, quantised ones."""
    # What torch's FSDP writes on the modules inside it.
    if getattr(module, "_is_fsdp_managed_module", False):
        raise CompressionError(f"{name or 'the model'} is sharded by FSDP, which cannot be cut; cut before wrapping")
    for entry, parameter in module.named_parameters():
        kinds = {type(parameter.data), type(parameter)}
        others = kinds - {Tensor, nn.Parameter}
        if any(kind.__name__ == "DTensor" for kind in others):
            raise CompressionError(
                f"{name}.{entry} is a DTensor, as of FSDP or tensor parallelism, which cannot be cut; cut before that"
            )
        if type(parameter.data) is not Tensor:
            raise CompressionError(f"{name}.{entry} holds a {type(parameter.data).__name__}, expected a plain tensor")


def _checked_values(cut: PreparedCut) -> list[tuple[nn.Parameter, Tensor]]:
    require_plain_parameters(cut.name, cut.module)
    beside = {**cut.writing.buffers, **{name: cut.values[name] for name in cut.writing.added}}
    return prepared(cut.module, {name: cut.values[name] for name in cut.present}, beside)


def _made(cut: PreparedCut, name: str) -> nn.Parameter:
    """A parameter that is added: where and as precise as the one that it joins, and with all that was said of that."""
    origin = parameter_of(cut.module, cut.writing.added[name])
    value = cut.values[name].to(origin.device, origin.dtype, copy=True)
    if not is_finite(value):
        raise CompressionError(f"{cut.name}.{name} would hold entries that are not finite")
    made = nn.Parameter(value, requires_grad=origin.requires_grad)
    vars(made).update(vars(origin))
    return made


def _attributes(cut: PreparedCut, added: Mapping[tuple[int, str], nn.Parameter]) -> list[tuple[Any, str, Any]]:
    """Attributes, buffers and parameters that are added: the object that gets each, its name there, and its value."""
    new = dict(cut.writing.attributes)
    new |= {name: value.clone() for name, value in cut.writing.buffers.items()}
    new |= {name: added[id(cut.module), name] for name in cut.writing.added}
    return [(*place_of(cut.name, cut.module, path), value) for path, value in new.items()]


def _joined(
    cut: PreparedCut, added: Mapping[tuple[int, str], nn.Parameter], optimizer: Any | None
) -> list[tuple[list[Any], Any]]:
    """What the optimizer's groups get more: those that have the parameter that one joins."""
    joined = []
    for name, beside in cut.writing.added.items():
        origin = parameter_of(cut.module, beside)
        for group in [] if optimizer is None else optimizer.param_groups:
            if any(member is origin for member in group["params"]):
                joined += joining(group, added[id(cut.module), name], name_beside(group, origin, beside, name))
    return joined


def _require_disjoint(cuts: Sequence[PreparedCut]) -> None:
    """A parameter that two layers share cannot be cut for both."""
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
    """The optimizer's own dictionaries, each with what is to be written into it."""
    if optimizer is None:
        if cut.states:
            raise CompressionError(f"{cut.name} was prepared with an optimizer, and is applied without one")
        return []
    parameters = {name: parameter_of(cut.module, name) for name in cut.present}
    if cut.states:
        require_supported(optimizer, {name: parameters[name] for name in cut.states})
    found = []
    for name, parameter in parameters.items():
        held, new = parameter_state(optimizer, parameter) or {}, cut.states.get(name, {})
        resized = parameter.shape != cut.values[name].shape
        if held.keys() != new.keys() and (resized or new):
            raise CompressionError(f"the optimizer's state of {cut.name}.{name} has changed since the cut was prepared")
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
    if not is_finite(new):
        raise CompressionError(f"{said} would hold entries that are not finite")
