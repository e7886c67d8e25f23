"""Base classes of adapters, their registration, discovery in any model, and checked calls of them."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any, ClassVar, Generic, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from compressm.control import DiagonalSystem
from compressm.control.validation import require_all_finite, values_unread
from compressm.errors import AdapterError
from compressm.layers.base import wide
from compressm.layers.parameters import plain_name

Module = TypeVar("Module", bound=nn.Module)
System = TypeVar("System")
Kind = TypeVar("Kind", bound="type[Adapter[Any, Any]]")


class Basis(Enum):
    """A kind of basis change that a layer may be able to store."""

    ANY = "any two-sided projection (W, T)"
    BY_CHANNEL = "a separate projection for every channel, kept as maps"
    ORTHOGONAL = "an orthogonal projection"
    AVERAGED = "one projection for all channels, rates or gates averaged"
    MAPPED = "any two-sided projection, kept as two maps"
    SELECTED = "a selection of its states"


@final
@dataclass(frozen=True)
class Growth:
    """The growth of a tensor with the order: `blocks` with one entry a state along `axis`, after `first` other entries.

    `last` others follow. `idle` is the entry of a state without effect. If n states become r, the entries of the others
    are multiplied by (r/n)^`power`; without blocks the whole tensor is. A norm over the states needs that.
    """

    axis: int
    first: int = 0
    blocks: int = 1
    idle: Tensor | float = 0.0
    last: int = 0
    power: float = 0.0

    def order(self, value: Tensor) -> int:
        """The number of states in a tensor."""
        return (value.shape[self.axis] - self.first - self.last) // self.blocks

    def resized(self, value: Tensor, order: int, fill: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The tensor at another order: its first states, or all of them and then idle ones, or `fill(block)`."""
        if self.blocks == 0:
            return value
        n = self.order(value)
        rest, *blocks, end = torch.split(value, [self.first, *[n] * self.blocks, self.last], dim=self.axis)
        if order <= n:
            return torch.cat([rest, *(block.narrow(self.axis, 0, order) for block in blocks), end], self.axis)
        parts = [rest]
        for block in blocks:
            new = torch.as_tensor(self.idle, dtype=block.dtype, device=block.device) if fill is None else fill(block)
            shape = list(block.shape)
            shape[self.axis] = order - n
            parts += [block, new.expand(shape)]
        return torch.cat([*parts, end], self.axis)

    def scaled(self, value: Tensor, n: int, order: int, exponent: int = 1) -> Tensor:
        """The tensor of n states with the factor that its entries have at another order, to this exponent."""
        if self.power == 0:
            return value
        factor = (order / n) ** (exponent * self.power)
        if self.blocks == 0:
            return (value.double() * factor).to(value.dtype)
        parts = torch.split(value, [self.first, self.blocks * n, self.last], dim=self.axis)
        return torch.cat([parts[0], (parts[1].double() * factor).to(value.dtype), parts[2]], self.axis)


class Adapter(ABC, Generic[Module, System]):
    """A class that reads a kind of module as a recurrence and encodes it back: `SSMAdapter` or `SelectiveAdapter`."""

    # The class of the systems that `read` gives.
    SYSTEM: ClassVar[type[Any]] = object
    # The changes of basis that the module can store; a family refuses cuts that need another.
    STORES: ClassVar[frozenset[Basis]] = frozenset({Basis.SELECTED})
    # Parameters and buffers that a module may get from a cut.
    OPTIONAL: ClassVar[frozenset[str]] = frozenset()
    # Parameters that a cut may add, each with the parameter whose optimizer group it joins.
    JOINS: ClassVar[Mapping[str, str]] = {}
    # Those of them that join a group without weight decay, if the optimizer has one.
    UNDECAYED: ClassVar[frozenset[str]] = frozenset()
    # Parameters that are 0 after a cut, and stay 0 in training: their gradients are 0 there.
    RESTING: ClassVar[frozenset[str]] = frozenset()
    # Attributes in objects that modules share, such as a config: `renewed` writes them.
    SHARED: ClassVar[frozenset[str]] = frozenset()
    # The name of the recurrence in tables of runtimes, such as "Mamba-1".
    RECURRENCE: ClassVar[str] = ""
    # The name of the order in constructors or configs.
    SIZE: ClassVar[str] = "order"

    @abstractmethod
    def read(self, module: Module) -> System:
        """The system that the module computes."""

    @abstractmethod
    def encode(self, module: Module, system: System) -> dict[str, Tensor]:
        """Parameter values, by name, that make the module compute the given system, of any order."""

    @abstractmethod
    def order(self, module: Module) -> int:
        """The number of states of the module."""

    def attributes(self, module: Module, order: int) -> dict[str, Any]:
        """Attributes that must change with the order, by path: {"config.state_size": 8}."""
        return {}

    def buffers(self, module: Module, system: System) -> dict[str, Tensor]:
        """Buffers of the system, by name; `encode` gives the parameters."""
        return {}

    def unsaved_buffers(self, module: Module, order: int) -> dict[str, Tensor]:
        """Buffers at this order that state dicts lack, by path: a layer that takes the order of a file needs them."""
        return {}

    def constant_buffers(self, module: Module) -> dict[str, Tensor]:
        """Buffers that state dicts lack and that hold the same values in every module, beside its parameters, by path.

        They fill a module that was built without values, for those of a file.
        """
        return {}

    def place(self, module: Module, path: str) -> tuple[Any, str]:
        """The owner of an attribute, and its name there: "config.state_size" is state_size of module.config."""
        *owners, leaf = path.split(".")
        return reduce(getattr, owners, module), leaf

    def renewed(self, model: nn.Module, modules: Sequence[Module]) -> list[tuple[Any, str, Any]]:
        """The owner, the name there and the new value of every attribute that holds an object with `SHARED` attributes.

        Such an object may be used outside of the model, so each model gets its own copy, with the present orders of
        these modules, which are all those of the model that this adapter reads.
        """
        return []

    def growth(self, module: Module) -> dict[str, Growth]:
        """The growth of every parameter that depends on the order, with the values of a state without effect."""
        raise AdapterError(f"{self} does not say how {type(module).__name__} grows: define growth(module)")

    def state_growth(self, module: Module) -> Growth:
        """The same for a state of the module, as its `step` takes it."""
        return Growth(axis=-1)

    def state_parameters(self, module: Module) -> int:
        """The number of parameters that the module loses with every state that is cut."""
        sizes = ((parameter_of(module, name), own) for name, own in self.growth(module).items())
        return sum(own.blocks * parameter.numel() // parameter.shape[own.axis] for parameter, own in sizes)

    def inner_width(self, module: Module) -> int | None:
        """The number of channels of the recurrence, if kernels ask for it."""
        return None

    def state_bytes(self, module: Module, order: int) -> int:
        """The bytes that the state of one sequence takes at this order."""
        raise AdapterError(f"{self} does not say how large a state of {type(module).__name__} is: define state_bytes")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class SSMAdapter(Adapter[Module, DiagonalSystem]):
    """An adapter that reads a kind of module as a `DiagonalSystem` and encodes another system as parameter values.

    The system is h[k] = λ h[k−1] + B u[k], and the module's output is Re(C h[k]), to which it may add a skip D·u. A
    module with one system for all channels is one system of order n. A module with one system per channel is a bank of
    H systems with one input and one output each. The order counts stored complex modes.
    """

    SYSTEM = DiagonalSystem
    STORES = frozenset({Basis.ANY, Basis.SELECTED})
    RECURRENCE = "linear"
    # A pole that every module stores, for states without effect.
    IDLE: ClassVar[complex] = 0.5

    @abstractmethod
    def read(self, module: Module) -> DiagonalSystem:
        """The system, in complex128, whose simulation gives the module's output without the skip D·u.

        It is differentiable with respect to the parameters, which become float64 before any computation.
        """

    @abstractmethod
    def encode(self, module: Module, system: DiagonalSystem) -> dict[str, Tensor]:
        """Parameter values in float64, by name, that make the module compute the given system, of any order.

        They are differentiable with respect to poles, B and C. The module, which does not change, supplies what the
        system does not fix (a step size); parameters that are not named stay. What was read gives the present values.
        """

    def nearest(self, module: Module, system: DiagonalSystem) -> DiagonalSystem:
        """The system that the module stores in place of a reduced one: the nearest poles that it has, with C refitted.

        It is the given one where the module stores every pole. The bound of a cut includes the distance.
        """
        return system

    def setting(self, module: Module) -> Hashable | None:
        """Everything beside parameters that `read` and `encode` depend on; None if they take one module at a time.

        Modules with the same setting can be stacked: both methods then take parameters with one more axis, the first,
        and systems whose bank begins with it. No mode's parameters may depend on other modes.
        """
        return None

    @torch.no_grad()
    def growth(self, module: Module) -> dict[str, Growth]:
        """The axes that grow if a mode with B = 0 and C = 0 is added to the system, and the entries that it gets."""
        system = read_with(self, module)
        values, n = encode_with(self, module, {}, _with_an_idle_mode(system, self.IDLE)), system.order
        axes = [(name, value, _grown_axis(module, name, value)) for name, value in values.items()]
        return {name: Growth(axis, idle=value.narrow(axis, n, 1)) for name, value, axis in axes if axis is not None}

    def state_bytes(self, module: Module, order: int) -> int:
        """Those of complex numbers in the dtype of the parameters, float32 or better."""
        return 2 * order * read_with(self, module).bank.numel() * wide(next(module.parameters()).dtype).itemsize

    def order(self, module: Module) -> int:
        with values_unread():  # a layer that is unstable by now, or has NaN, has an order too
            return read_with(self, module).order


_ADAPTERS: dict[type[nn.Module], Adapter[Any, Any]] = {}
# Adapters of classes that may be absent, by name: "package.module.Class".
_NAMED: dict[str, Adapter[Any, Any]] = {}

# What to say of a model from torch.jit.trace or torch.jit.script, whose layers are no Python objects any more.
COMPILED = (
    "the model is a {} that torch.jit traced or scripted, whose layers cannot be read; expected the model that it was"
    " made from: trace or script it afterwards"
)


def adapts(kind: type[nn.Module]) -> Callable[[Kind], Kind]:
    """Register the decorated adapter for `kind` and for its subclasses without their own adapter.

    The last registration for a class holds.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise AdapterError(f"@adapts takes a subclass of nn.Module, got {kind!r}")

    def register(adapter: Kind) -> Kind:
        if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
            raise AdapterError(f"@adapts({kind.__name__}) decorates a subclass of Adapter, got {adapter!r}")
        missing = sorted(adapter.__abstractmethods__)
        if missing:
            raise AdapterError(f"{adapter.__name__} has no {' and no '.join(missing)}: define what is missing")
        _ADAPTERS[kind] = adapter()
        return adapter

    return register


def adapts_named(path: str) -> Callable[[Kind], Kind]:
    """Register an adapter for a class by its name, "package.module.Class"; the package may be absent.

    Nothing is imported: a module of that class exists only after its import. An adapter from `adapts` takes precedence.
    """

    def register(adapter: Kind) -> Kind:
        _NAMED[path] = adapter()
        return adapter

    return register


def named_kinds() -> list[str]:
    """The classes with an adapter that are known by name."""
    return list(_NAMED)


def adapters_by_kind() -> dict[str, Adapter[Any, Any]]:
    """Every adapter by the class that it is for, "package.module.Class"."""
    return {f"{kind.__module__}.{kind.__qualname__}": adapter for kind, adapter in _ADAPTERS.items()} | _NAMED


def adapter_for(module: nn.Module) -> Adapter[Any, Any] | None:
    """The adapter of the module's class or of its nearest ancestor that has one."""
    require_module("adapter_for", module)
    return adapter_of(type(module))


def adapter_of(kind: type[nn.Module]) -> Adapter[Any, Any] | None:
    """The adapter of a class of modules or of its nearest ancestor that has one."""
    return next((found for ancestor in kind.__mro__ if (found := _registered(ancestor)) is not None), None)


def registered_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The class itself or its nearest ancestor that has an adapter."""
    return next(ancestor for ancestor in kind.__mro__ if _registered(ancestor) is not None)


def _registered(kind: type[nn.Module]) -> Adapter[Any, Any] | None:
    return _ADAPTERS.get(kind) or _NAMED.get(f"{kind.__module__}.{kind.__qualname__}")


def find(
    model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> dict[str, tuple[nn.Module, Adapter[Any, Any]]]:
    """Every module of the model that has an adapter, by name, in the order of `named_modules`; "" is the model itself.

    A module used in several places is listed once. Names are those of the model inside DistributedDataParallel or
    torch.compile. Children of an adapted module are not listed. `filter_fn(module, name)` is True for modules to list.
    """
    require_module("find", model)
    if isinstance(model, torch.jit.ScriptModule):
        raise AdapterError(COMPILED.format(model.original_name))
    if filter_fn is not None:
        require_call("filter_fn", filter_fn, "module", "name")
    modules = dict(model.named_modules())
    found: dict[str, tuple[nn.Module, Adapter[Any, Any]]] = {}
    inside: str | None = None
    for path, module in modules.items():
        adapter = adapter_for(module)
        if adapter is None or (inside is not None and path.startswith(inside)):
            continue
        name = plain_name(path, modules)
        if filter_fn is None or _takes(filter_fn, module, name):
            found[name] = (module, adapter)
            inside = f"{path}." if path else ""
    return found


def require_call(what: str, function: object, *arguments: str) -> None:
    """Require a function that can be called with these arguments, as far as its signature tells."""
    expected = f"expected a function that is called as {what}({', '.join(arguments)})"
    if not callable(function):
        raise AdapterError(f"{what} is {function!r:.100}, {expected}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions of C have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise AdapterError(f"{what} takes {signature}, {expected}: {error}") from None


def counted_steps(module: nn.Module, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """A mask of the steps of a call forward(x, state, lengths) that are not padding; None if no step is padding.

    A call that continues from a state is refused.
    """
    given = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
    if isinstance(state := given.get("state"), Tensor) and bool(state.any()):
        raise AdapterError(
            "calibrate continues from a state, which a cut does not know: let it run the model on whole sequences,"
            " which begin without a state"
        )
    lengths = kwargs.get("lengths", args[2] if len(args) > 2 else None)
    return None if lengths is None else torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None]


def _takes(filter_fn: Callable[[nn.Module, str], bool], module: nn.Module, name: str) -> bool:
    try:
        taken = filter_fn(module, name)
    except (AttributeError, TypeError) as error:
        raise AdapterError(f"filter_fn fails for {name!r}: {error}; it is called as filter_fn(module, name)") from error
    if not isinstance(taken, bool | np.bool_):
        raise AdapterError(f"filter_fn returned {taken!r:.100} for {name!r}, expected True or False")
    return bool(taken)


def present_attributes(module: nn.Module, adapter: Adapter[Any, Any]) -> dict[str, Any]:
    """The attributes of the module's present order; the module is not read if its adapter has none."""
    if type(adapter).attributes is Adapter.attributes:
        return {}
    return adapter.attributes(module, adapter.order(module))


def state_axes(module: nn.Module, adapter: SSMAdapter[Any] | None = None) -> dict[str, int]:
    """The axis of the states in every parameter that grows with the order.

    To find it, a system with one more mode is encoded: the axis that became longer holds the states.
    """
    adapter = linear_adapter(module, adapter)
    with torch.no_grad():
        values = encode_with(adapter, module, {}, _with_a_mode_twice(read_with(adapter, module)))
    axes = {name: _grown_axis(module, name, value) for name, value in values.items()}
    return {name: axis for name, axis in axes.items() if axis is not None}


def read_with(adapter: Adapter[Any, System], module: nn.Module, values: Mapping[str, Tensor] = {}) -> System:
    """The system that the module would compute with these parameter values, by default its own; differentiable.

    An adapter that reads anything else is refused by name.
    """
    system: System = with_values(module, values, adapter.read)
    if not isinstance(system, adapter.SYSTEM):
        raise AdapterError(f"{adapter}.read gives {system!r:.80}, expected a {adapter.SYSTEM.__name__}")
    return system


def encode_with(
    adapter: Adapter[Any, System], module: nn.Module, values: Mapping[str, Tensor], system: System
) -> dict[str, Tensor]:
    """The values that encode a system, if the module's present parameters had these values; differentiable.

    An adapter that encodes no values of parameters is refused by name.
    """
    encoded: dict[str, Tensor] = with_values(module, values, lambda swapped: adapter.encode(swapped, system))
    if not isinstance(encoded, Mapping) or not all(isinstance(name, str) for name in encoded):
        raise AdapterError(f"{adapter}.encode gives {encoded!r:.80}, expected {{parameter name: tensor}}")
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, value in encoded.items():
        _require_value(f"{adapter}.encode gives {name}", value, parameters.get(name), stacked=bool(values))
    return encoded


def _require_value(said: str, value: object, parameter: Tensor | None, *, stacked: bool) -> None:
    """Require a tensor that a parameter, or one that a cut adds, can take."""
    if not isinstance(value, Tensor):
        raise AdapterError(f"{said} as {value!r:.80}, expected a tensor")
    may_be_complex = parameter is not None and parameter.is_complex()
    if not (value.is_floating_point() or (value.is_complex() and may_be_complex)):
        raise AdapterError(f"{said} as {value.dtype}, expected {'complex128' if may_be_complex else 'float64'}")
    if value.is_meta or value.layout is not torch.strided:
        raise AdapterError(
            f"{said} on {value.device} with the layout {value.layout}, expected a dense tensor of values"
        )
    if parameter is not None and not stacked and value.ndim != parameter.ndim:
        raise AdapterError(f"{said} the shape {tuple(value.shape)}, expected the axes of {tuple(parameter.shape)}")


def encode_present(adapter: Adapter[Any, System], module: nn.Module, system: System) -> dict[str, Tensor]:
    """The values that encode the system that was read; `read` and `encode` must agree on all shapes."""
    values = encode_with(adapter, module, {}, system)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, value in values.items():
        if name in parameters and value.shape != parameters[name].shape:
            raise AdapterError(
                f"{adapter}.encode gives {name} the shape {tuple(value.shape)} for the system that {adapter}.read"
                f" gives, expected the present {tuple(parameters[name].shape)}: both must have the same order and bank"
            )
    return values


def require_differentiable(adapter: Adapter[Any, Any], module: nn.Module, names: Iterable[str]) -> None:
    """Require that `read` carries gradients to these parameters, and `encode` back: moments go along both."""
    if not isinstance(adapter, SSMAdapter):
        return
    cure = "compute it without detach, no_grad or NumPy, or pass moments=Restart()"
    with torch.enable_grad(), values_unread():
        leaves = {name: parameter_of(module, name).detach().double().requires_grad_() for name in names}
        system = read_with(adapter, module, leaves)
        parts = {"poles": system.poles, "B": system.B, "C": system.C}
        reached = {part: _reached([value], leaves) for part, value in parts.items()}
        if lost := leaves.keys() - set().union(*reached.values()):
            raise AdapterError(
                f"{adapter}.read gives a system that carries no gradient to {', '.join(sorted(lost))}: the optimizer's"
                f" moments would be lost; {cure}"
            )
        copies = {part: value.detach().clone().requires_grad_() for part, value in parts.items()}
        back = _reached(encode_with(adapter, module, {}, DiagonalSystem(*copies.values())).values(), copies)
        if lost := {part for part, found in reached.items() if found} - back:
            raise AdapterError(
                f"{adapter}.encode gives values that carry no gradient to {', '.join(sorted(lost))} of the system: the"
                f" optimizer's moments would be lost; {cure}"
            )


def _reached(outputs: Iterable[Tensor], inputs: Mapping[str, Tensor]) -> set[str]:
    """The names of the inputs that gradients of the outputs reach."""
    moving = [output for output in outputs if output.requires_grad]
    if not moving:
        return set()
    ones = [torch.ones_like(output) for output in moving]
    gradients = torch.autograd.grad(moving, list(inputs.values()), ones, retain_graph=True, allow_unused=True)
    return {name for name, gradient in zip(inputs, gradients, strict=True) if gradient is not None}


def stacking_key(module: nn.Module, adapter: SSMAdapter[Any]) -> Hashable | None:
    """Modules with the same key can be stacked, see `SSMAdapter.setting`; None if this one cannot."""
    setting = adapter.setting(module)
    if setting is None:
        return None
    shapes = ((name, tuple(p.shape), p.dtype, p.device) for name, p in module.named_parameters(remove_duplicate=False))
    return type(module), adapter, setting, tuple(shapes)


def stacked_parameters(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """All parameters of several modules with the same key, with one more axis, the first."""
    held = [dict(module.named_parameters()) for module in modules]
    return {name: torch.stack([parameters[name].detach() for parameters in held]) for name in held[0]}


def with_values(module: nn.Module, values: Mapping[str, Tensor], function: Callable[[nn.Module], Any]) -> Any:
    """The function of the module with these values in the place of its parameters; differentiable."""
    if not values:
        return function(module)
    held = [(part, dict(vars(part)), dict(part._parameters), dict(part._buffers)) for part in module.modules()]
    try:
        swapped = {f"module.{name}": value for name, value in values.items()}
        return functional_call(_Holder(module, function), swapped, ())
    except BaseException:
        # If Ctrl-C stops torch while it swaps, it forgets the parameters that the optimizer trains.
        for part, attributes, parameters, buffers in held:
            for name in vars(part).keys() - attributes.keys():
                del vars(part)[name]
            vars(part).update(attributes)
            part._parameters.update(parameters)
            part._buffers.update(buffers)
        raise


class _Holder(nn.Module):
    """A module whose forward applies a function to another one, so that `functional_call` can swap parameters."""

    def __init__(self, module: nn.Module, function: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self) -> Any:
        return self.function(self.module)


def linear_adapter(module: nn.Module, adapter: Adapter[Any, Any] | None = None) -> SSMAdapter[Any]:
    """The given adapter, or the module's own; an adapter that does not read linear systems is refused."""
    found, kind = adapter or adapter_for(module), type(module).__name__
    if found is None:
        raise AdapterError(f"{kind} has no adapter; write one with @adapts({kind})")
    if not isinstance(found, SSMAdapter):
        raise AdapterError(f"{kind} is not a linear system: {found} reads it, expected an SSMAdapter")
    return found


def parameter_of(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter of that name; if it does not exist, the error lists all names."""
    require_module("an adapter", module)
    parameters: Mapping[str, nn.Parameter] = dict(module.named_parameters(remove_duplicate=False))
    if name not in parameters:
        raise AdapterError(f"{type(module).__name__} has no parameter {name!r}; it has {', '.join(parameters)}")
    return parameters[name]


def _grown_axis(module: nn.Module, name: str, value: Tensor) -> int | None:
    shape = parameter_of(module, name).shape
    if len(shape) != value.ndim:
        raise AdapterError(f"encode gives {name} the shape {tuple(value.shape)}, expected the axes of {tuple(shape)}")
    grown = [axis for axis, (old, new) in enumerate(zip(shape, value.shape, strict=True)) if old != new]
    if len(grown) > 1:
        raise AdapterError(f"{name}: axes {grown} grow with the order, expected one axis")
    return grown[0] if grown else None


def _with_an_idle_mode(system: DiagonalSystem, pole: complex) -> DiagonalSystem:
    """The system with one more mode that has neither input nor output."""
    pad = torch.nn.functional.pad
    idle = torch.full_like(system.poles[..., :1], pole)
    return DiagonalSystem(torch.cat([system.poles, idle], -1), pad(system.B, (0, 0, 0, 1)), pad(system.C, (0, 1)))


def _with_a_mode_twice(system: DiagonalSystem) -> DiagonalSystem:
    poles, B, C = system.poles, system.B, system.C
    poles, C = (torch.cat([part, part[..., :1]], dim=-1) for part in (poles, C))
    return DiagonalSystem(poles, torch.cat([B, B[..., :1, :]], dim=-2), C)


def require_module(function: str, module: object) -> None:
    """Refuse what is not a module, in the name of a function."""
    if not isinstance(module, nn.Module):
        raise AdapterError(f"{function} takes an nn.Module, got {type(module).__name__}")


def finite_doubles(module: nn.Module, names: Iterable[str]) -> list[Tensor]:
    """The named parameters, or plain tensors in their place, in float64; NaN and infinity are refused by name."""
    found: dict[str, Tensor] = {}
    require_module("read", module)
    for name in names:
        try:
            value: Tensor = reduce(getattr, name.split("."), module)  # type: ignore[assignment]
        except AttributeError:
            raise AdapterError(f"{type(module).__name__} has no {name}: its adapter is another one") from None
        if not isinstance(value, Tensor):
            raise AdapterError(f"{type(module).__name__}.{name} is {value!r:.80}, expected a parameter")
        found[f"{type(module).__name__}.{name}"] = value
    require_all_finite(found)
    return [value.double() for value in found.values()]
