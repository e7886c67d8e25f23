"""Base classes of adapters, their registration, discovery in any model, and checked writing of parameters."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from functools import reduce
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

from compressm.control import DeviceError, DiagonalSystem, PrecisionError, ShapeError, UnstableSystemError
from compressm.control.linear_algebra import modulus
from compressm.control.validation import are_finite, require_all_finite, require_kind, values_are_read, values_unread
from compressm.errors import AdapterError
from compressm.layers import LTILayer, SSMLayer
from compressm.layers.parameters import replace_data

Module = TypeVar("Module", bound=nn.Module)
System = TypeVar("System")
Kind = TypeVar("Kind", bound="type[Adapter[Any, Any]]")


class Basis(Enum):
    """A kind of basis change that a layer may be able to store."""

    ANY = "any two-sided projection (W, T)"
    BY_CHANNEL = "a separate projection for every channel, kept as maps"
    ORTHOGONAL = "an orthogonal projection"
    AVERAGED = "one projection for all channels, rates or gates averaged"
    SELECTED = "a selection of its states"


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
    # Attributes in objects that modules share, such as a config: `renewed` writes them.
    SHARED: ClassVar[frozenset[str]] = frozenset()

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

    @abstractmethod
    def read(self, module: Module) -> DiagonalSystem:
        """The system, in complex128, whose simulation gives the module's output without the skip D·u.

        It is differentiable with respect to the module's parameters, which are converted to float64 before any
        computation.
        """

    @abstractmethod
    def encode(self, module: Module, system: DiagonalSystem) -> dict[str, Tensor]:
        """Parameter values in float64, by name, that make the module compute the given system, of any order.

        They are differentiable with respect to the system's poles, B and C. The module supplies what the system does
        not fix (a step size, a rule of discretisation) and is not changed: `write` does that. Encoding the system that
        was read gives the present values. Parameters that are not named keep their values.
        """

    def setting(self, module: Module) -> Hashable | None:
        """Everything beside parameters that `read` and `encode` depend on; None if they take one module at a time.

        Modules with the same setting can be stacked: both methods then take a module whose parameters have one more
        axis, the first, with one entry for each module, and systems whose bank begins with that axis. No mode's
        parameters may depend on other modes.
        """
        return None

    def order(self, module: Module) -> int:
        return read_with(self, module).order


_ADAPTERS: dict[type[nn.Module], Adapter[Any, Any]] = {}
# Adapters of classes that may be absent, by name: "package.module.Class".
_NAMED: dict[str, Adapter[Any, Any]] = {}

# Wrappers that hold the wrapped model as `module`; a model's own child of that name keeps its name.
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
# Names that only wrappers use: torch.compile, activation checkpoints, FSDP.
_WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


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


def adapter_for(module: nn.Module) -> Adapter[Any, Any] | None:
    """The adapter of the module's class or of its nearest ancestor that has one."""
    _require_module("adapter_for", module)
    return adapter_of(type(module))


def adapter_of(kind: type[nn.Module]) -> Adapter[Any, Any] | None:
    """The adapter of a class of modules or of its nearest ancestor that has one."""
    for ancestor in kind.__mro__:
        found = _ADAPTERS.get(ancestor) or _NAMED.get(f"{ancestor.__module__}.{ancestor.__qualname__}")
        if found is not None:
            return found
    return None


def find(
    model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> dict[str, tuple[nn.Module, Adapter[Any, Any]]]:
    """Every module of the model that has an adapter, by name, in the order of `named_modules`; "" is the model itself.

    A module used in several places is listed once. Names are those of the model inside DistributedDataParallel or
    torch.compile. Children of an adapted module are not listed. `filter_fn(module, name)` is True for modules to list.
    """
    _require_module("find", model)
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


def _takes(filter_fn: Callable[[nn.Module, str], bool], module: nn.Module, name: str) -> bool:
    try:
        taken = filter_fn(module, name)
    except (AttributeError, TypeError) as error:
        # What happens if module and name are swapped.
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
    axes = {name: _grown_axes(module, name, value) for name, value in values.items()}
    several = [name for name, grown in axes.items() if len(grown) > 1]
    if several:
        raise AdapterError(f"{', '.join(several)}: axes {axes[several[0]]} grow with the order, expected one axis")
    return {name: grown[0] for name, grown in axes.items() if grown}


def read_with(adapter: Adapter[Any, System], module: nn.Module, values: Mapping[str, Tensor] = {}) -> System:
    """The system that the module would compute with these parameter values, by default its own; differentiable.

    An adapter that reads anything else is refused by name.
    """
    system: System = _with(module, values, adapter.read)
    if not isinstance(system, adapter.SYSTEM):
        raise AdapterError(f"{adapter}.read gives {system!r:.80}, expected a {adapter.SYSTEM.__name__}")
    return system


def encode_with(
    adapter: Adapter[Any, System], module: nn.Module, values: Mapping[str, Tensor], system: System
) -> dict[str, Tensor]:
    """The values that encode a system, if the module's present parameters had these values; differentiable.

    An adapter that encodes no values of parameters is refused by name.
    """
    encoded: dict[str, Tensor] = _with(module, values, lambda swapped: adapter.encode(swapped, system))
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


def _with(module: nn.Module, values: Mapping[str, Tensor], function: Callable[[nn.Module], Any]) -> Any:
    if not values:
        return function(module)
    return functional_call(_Holder(module, function), {f"module.{name}": value for name, value in values.items()}, ())


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
    _require_module("an adapter", module)
    parameters: Mapping[str, nn.Parameter] = dict(module.named_parameters(remove_duplicate=False))
    if name not in parameters:
        raise AdapterError(f"{type(module).__name__} has no parameter {name!r}; it has {', '.join(parameters)}")
    return parameters[name]


def _grown_axes(module: nn.Module, name: str, value: Tensor) -> list[int]:
    shape = parameter_of(module, name).shape
    if len(shape) != value.ndim:
        raise AdapterError(f"encode gives {name} the shape {tuple(value.shape)}, expected the axes of {tuple(shape)}")
    return [axis for axis, (old, new) in enumerate(zip(shape, value.shape, strict=True)) if old != new]


def _with_a_mode_twice(system: DiagonalSystem) -> DiagonalSystem:
    poles, B, C = system.poles, system.B, system.C
    return DiagonalSystem(
        torch.cat([poles, poles[..., :1]], dim=-1),
        torch.cat([B, B[..., :1, :]], dim=-2),
        torch.cat([C, C[..., :1]], dim=-1),
    )


def plain_name(path: str, modules: Mapping[str, nn.Module]) -> str:
    """The name of a module or parameter without the parts that wrappers add."""
    kept, walked = [], ""
    for part in path.split("."):
        wrapped = part in _WRAPPED or (part == "module" and isinstance(modules.get(walked), _WRAPPERS))
        kept += [] if wrapped else [part]
        walked = f"{walked}.{part}" if walked else part
    return ".".join(kept)


def _require_module(function: str, module: object) -> None:
    if not isinstance(module, nn.Module):
        raise AdapterError(f"{function} takes an nn.Module, got {type(module).__name__}")


def write(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give the named parameters new values; everything is checked before anything is changed.

    Each parameter stays the same object with its dtype, device, `requires_grad`, hooks and attributes. Its gradient
    belongs to the old values and is dropped.
    """
    _require_module("write", module)
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


def finite_doubles(module: nn.Module, names: Iterable[str]) -> list[Tensor]:
    """The named parameters, or plain tensors in their place, in float64; NaN and infinity are refused by name."""
    found: dict[str, Tensor] = {}
    _require_module("read", module)
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


def encodable(layer: LTILayer, system: DiagonalSystem, *, bank: bool = False) -> tuple[Tensor, Tensor]:
    """Require a finite, stable system of the layer's width, on its device; return B and C in complex128.

    The layer stores one system for all channels, or a `bank` with one for each.
    """
    kind = type(layer).__name__
    if not isinstance(layer, LTILayer):
        raise AdapterError(f"encode takes a linear layer, got a {kind}")
    require_kind(f"encoding a {kind}", system, DiagonalSystem, hint="call diagonalise first")
    require_all_finite({"poles": system.poles, "B": system.B, "C": system.C})
    unstable = ~(system.decay.detach() > 0)
    if values_are_read() and bool(unstable.any()):
        worst = modulus(system.poles.detach()).max().item()
        raise UnstableSystemError(
            f"largest pole modulus is {worst:.9g}, a {kind} stores only poles < 1 ({int(unstable.sum())} poles are not)"
        )
    given = (tuple(system.bank), system.inputs, system.outputs)
    stacked = tuple(layer.D.shape[:-1])
    expected = ((*stacked, layer.width), 1, 1) if bank else (stacked, layer.width, layer.width)
    if given != expected:
        raise ShapeError(f"the system has (bank, inputs, outputs) {given}, this {kind} expected {expected}")
    if system.device != layer.D.device:
        raise DeviceError(f"the system is on {system.device}, expected {layer.D.device}, the device of the {kind}")
    return system.B.to(torch.complex128), system.C.to(torch.complex128)
