"""Base classes of SSM layers: stored constructor arguments, checks, checkpoints of another order, and the skip D·x.

Also those who hold states of a layer, and are told when a cut changes them.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from compressm.errors import ExportError
from compressm.layers.discretisation import exponential, times
from compressm.layers.parameters import Kept, Remembered, refuse_to_train_, replace_data, require_free
from compressm.layers.streaming import EagerStepper, Stepper, SystemStepper
from compressm.ops import Path, SequenceError, lti_layer
from compressm.ops.block.norm import Link

Kind = TypeVar("Kind", bound=type[nn.Module])

_KEPT = "_built_with"
_WITHOUT_NAMES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


def keeps_arguments(kind: Kind) -> Kind:
    """Store the constructor's arguments, with defaults, in every instance; `arguments_of` returns them."""
    build = kind.__init__
    signature = inspect.signature(build)
    nameless = [p.name for p in list(signature.parameters.values())[1:] if p.kind in _WITHOUT_NAMES]
    if nameless:
        raise SequenceError(f"{kind.__name__} takes {nameless[0]!r} by position only: make it a named parameter")

    @functools.wraps(build)
    def build_and_keep(self: nn.Module, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        # After `build`, so that a subclass overwrites the arguments of its base class; a tuple, so nobody changes them.
        vars(self)[_KEPT] = tuple(_by_name(signature, self, *args, **options).items())

    kind.__init__ = build_and_keep  # type: ignore[method-assign]
    return kind


def arguments_of(module: nn.Module) -> dict[str, Any] | None:
    """The arguments that the module was built with, by name; None if its class does not store them."""
    kept = vars(module).get(_KEPT)
    return None if kept is None else dict(kept)


def _by_name(signature: inspect.Signature, *args: Any, **options: Any) -> dict[str, Any]:
    bound = signature.bind(*args, **options)
    bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = dict(value) if isinstance(value, Mapping) else value
    return named


class SSMLayer(Remembered, ABC):
    """A recurrence over time with `width` input and output channels, whose order may change."""

    # True if a block must add an activation and a gate; layers like Mamba have their own.
    needs_gate: ClassVar[bool] = False

    def __init__(self, width: int, order: int) -> None:
        super().__init__()
        require_sizes(width=width, order=order)
        self.width = width

    @property
    @abstractmethod
    def order(self) -> int:
        """The number of states."""

    @abstractmethod
    def shape_at(self, name: str, order: int) -> tuple[int, ...]:
        """The shape of the named tensor at the given order; at most one axis grows with the order, linearly."""

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        state: Tensor | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        *,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "batch length width"], Tensor | None]:
        """The outputs and the last state (None without `keep_state`); steps at and after `lengths` change nothing."""

    @abstractmethod
    def step(self, x: Float[Tensor, "batch width"], state: Tensor) -> tuple[Float[Tensor, "batch width"], Tensor]:
        """One step of the same recurrence, in real arithmetic."""

    @abstractmethod
    def initial_state(self, batch: int) -> Tensor:
        """The state at the start of a stream of `batch` sequences: zeros."""

    def _slow_forward(self, *args: Any, **options: Any) -> Any:
        """Do what torch does in place of `forward` while torch.jit.trace records a module."""
        try:
            return super()._slow_forward(*args, **options)
        except TypeError as error:  # lengths are tensors then
            raise ExportError(
                f"torch.jit.trace cannot record a {type(self).__name__}: {error}; expected torch.export.export, or"
                " compressm.export for the formats of runtimes"
            ) from error

    def stepper(self, dtype: torch.dtype, *, gain: float = 1.0, scaled: bool = False) -> Stepper:
        """The step with its constants computed now, in `dtype`; it gives gain · y.

        If `scaled`, it may ask for an input that is multiplied by factors of its channels, `Stepper.scale`.
        """
        return EagerStepper(self, gain=gain)

    @abstractmethod
    def dynamics(self) -> Iterator[nn.Parameter]:
        """Parameters of the dynamics, such as poles and steps: train them without weight decay, often more slowly."""

    def grows(self, name: str) -> bool:
        """True if the shape of the tensor depends on the order."""
        return self.shape_at(name, 1) != self.shape_at(name, 2)

    def order_at(self, name: str, shape: Sequence[int]) -> int | None:
        """The inverse of `shape_at`: the order at which the tensor has this shape, or None."""
        first, second = self.shape_at(name, 1), self.shape_at(name, 2)
        axis = next((k for k in range(len(first)) if first[k] != second[k]), None)
        if axis is None or len(shape) != len(first):
            return None
        order = 1 + (shape[axis] - first[axis]) // (second[axis] - first[axis])
        return order if order >= 1 and self.shape_at(name, order) == tuple(shape) else None

    def extra_repr(self) -> str:
        return f"width={self.width}, order={self.order}"

    def _check(self, x: Tensor, state: Tensor | None, *, axes: str) -> None:
        """Check `x` against its axes, and the state against this layer's order."""
        if torch.compiler.is_compiling():
            self.mark_states_()
        shape = (*axes.split(), "width")
        if not isinstance(x, Tensor) or x.ndim != len(shape) or x.shape[-1] != self.width:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise SequenceError(f"x is {got}, expected ({', '.join(shape)}) with width = {self.width}")
        if x.layout is not torch.strided:
            raise SequenceError(f"x has the layout {x.layout}, expected a dense tensor: call to_dense()")
        if 0 in x.shape:
            raise SequenceError(f"x has shape {tuple(x.shape)}, expected batch and length of at least 1")
        if state is not None:
            self._check_state(state, x.shape[0])

    def _check_state(self, state: object, batch: int) -> None:
        expected = tuple(self.initial_state(batch).shape)
        if not isinstance(state, Tensor) or tuple(state.shape) != expected:
            got = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise SequenceError(f"state is {got}, expected {expected} for order {self.order} and batch {batch}")
        if not state.is_floating_point():
            raise SequenceError(f"state has dtype {state.dtype}, expected real numbers such as {torch.float32}")

    def _check_step(self, x: Tensor, state: object) -> None:
        """Require a state, and an input on the device and in the dtype of the parameters."""
        self._check(x, None, axes="batch")
        self._check_state(state, x.shape[0])
        self._check_kind(x, (torch.bfloat16, torch.float16))

    def _check_kind(self, x: Tensor, cast: tuple[torch.dtype, ...]) -> None:
        """Require the device and dtype of the parameters, or, under autocast, a dtype from `cast`."""
        # Not by `self.parameters()`, whose sizes torch.compile takes as constants.
        own = (parameter for parameter in self._held()[0].values() if parameter is not None)
        reference = next(own, None)
        reference = next(self.parameters()) if reference is None else reference
        castable = x.dtype in cast and torch.is_autocast_enabled(reference.device.type)
        if (x.dtype != reference.dtype and not castable) or x.device != reference.device:
            raise SequenceError(f"x is {x.dtype} on {x.device}, expected {reference.dtype} on {reference.device}")

    def tensors(self) -> dict[str, Tensor]:
        """The layer's own tensors, not copies, under their names in the state dict."""
        return {name: value for name, value in self.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}

    def shapes_at(self, order: int, like: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors at the given order; a layer with several forms takes the form of `like`."""
        return {name: self.shape_at(name, order) for name in self.tensors()}

    def require_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors from a checkpoint whose values this layer cannot take; shapes are checked later."""

    def take_form_(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Resize parameters to load tensors of these shapes; nothing changes unless all have one order."""
        wanted = self._form_in(shapes)
        if wanted is not None:
            self._reshape_(wanted)

    def _form_in(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]] | None:
        """The shapes of tensors that depend on the order, in a checkpoint with these shapes; None without one order."""
        arriving = {name: tuple(shapes.get(name, ())) for name in self.tensors() if self.grows(name)}
        orders = {self.order_at(name, shape) for name, shape in arriving.items()}
        return arriving if len(orders) == 1 and None not in orders else None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load tensors and take the checkpoint's order: a cut model loads into the module it was made from."""
        inside = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        arriving = {name: value for name, value in inside.items() if isinstance(value, Tensor)}
        self.require_values(arriving)
        # Only a complete checkpoint of one order changes shapes; for anything else torch raises its own error.
        shapes = {name: value.shape for name, value in arriving.items()}
        if self._has_other_form(shapes):
            name = prefix.removesuffix(".") or "the layer"
            require_free(self, f"{name} has order {self.order}, the state dict has another order or form")
            self.take_form_(shapes)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _has_other_form(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """True if `take_form_` would change a shape, or add or drop a tensor."""
        wanted, now = self._form_in(shapes), {name: tuple(value.shape) for name, value in self.tensors().items()}
        if wanted is None:
            return False
        dropped = any(self.grows(name) and name not in wanted for name in now)
        return dropped or any(now.get(name) != tuple(shape) for name, shape in wanted.items())

    def _reshape_(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Give the tensors of a form their shapes; their values are lost."""
        self._resize_(shapes)

    def _resize_(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Give parameters new shapes; their values are lost."""
        resized = {name: shape for name, shape in shapes.items() if self.get_parameter(name).shape != tuple(shape)}
        for name, shape in resized.items():
            parameter = self.get_parameter(name)
            replace_data(parameter, parameter.new_empty(tuple(shape)))
        if resized:
            refuse_to_train_([self])


def _all_or_nothing(load: Callable[..., Any]) -> Callable[..., Any]:
    """Let a refused `load_state_dict` of any module with a layer of ours inside leave every shape as it was.

    torch collects errors and raises them at the end, when earlier layers have taken other orders, and only the module
    whose `load_state_dict` was called sees that. If a name or a shape in the state dict is another, values are copied
    first, so that they come back too.
    """

    @functools.wraps(load)
    def load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        if not any(isinstance(module, SSMLayer) for module in self.modules()):
            return load(self, state_dict, *args, **options)
        kept = Kept(self, values=not _is_alike(self, state_dict))
        try:
            return load(self, state_dict, *args, **options)
        except BaseException:
            kept.restore_()
            raise

    return load_state_dict


def _is_alike(model: nn.Module, state_dict: object) -> bool:
    """True if the state dict has the names and shapes of the model."""
    own = {
        f"{path}.{name}" if path else name: value.shape
        for path, module in model.named_modules(remove_duplicate=False)
        for name, value in (*module._parameters.items(), *module._buffers.items())
        if value is not None and name not in module._non_persistent_buffers_set and not is_lazy(value)
    }
    given = state_dict if isinstance(state_dict, Mapping) else {}
    return own == {name: getattr(value, "shape", None) for name, value in given.items()}


nn.Module.load_state_dict = _all_or_nothing(nn.Module.load_state_dict)  # type: ignore[method-assign]


# The largest size of one axis: larger ones overflow the sizes of matrices, or are a mistake.
MOST = 2**24


def require_sizes(**given: int) -> None:
    """Require integers from 1 to `MOST`."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SequenceError(f"{name} is {value!r:.100}, expected an integer of at least 1")
        require_at_most(name, value)


def require_at_most(name: str, value: Any, most: int = MOST) -> None:
    """Refuse a number above a limit."""
    if value > most:
        raise SequenceError(f"{name} is {value!r:.100}, expected at most {most}")


def require_batch(batch: object) -> None:
    """Require a number of sequences; compilers and tracers have their own kinds of integers."""
    if isinstance(batch, torch.SymInt) or (isinstance(batch, Tensor) and torch.jit.is_tracing()):
        return
    if isinstance(batch, bool) or not isinstance(batch, Integral) or batch < 1:
        raise SequenceError(f"batch is {batch!r:.100}, expected an integer of at least 1")
    require_at_most("batch", batch)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, float32 or better: half precision would lose sums over time."""
    return torch.promote_types(dtype, torch.float32)


def require_numbers(**given: float) -> None:
    """Require real numbers; their range is checked where they are used."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise SequenceError(f"{name} is {value!r:.100}, expected a number")


def require_switches(**given: bool) -> None:
    """Require True or False."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise SequenceError(f"{name} is {value!r:.100}, expected True or False")


def check_finite(module: nn.Module) -> None:
    """Refuse NaN and infinity in the parameters of a module; the error names the first parameter that holds one.

    A cut and saving check SSM layers by themselves, and saving all parameters for NaN; `forward` and `step` do not, as
    they would have to wait for the device.
    """
    if not isinstance(module, nn.Module):
        raise SequenceError(f"module is {module!r:.80}, expected an nn.Module")
    for name, parameter in module.named_parameters():
        if not is_lazy(parameter) and (bad := int((~torch.isfinite(parameter.detach())).sum())):
            raise SequenceError(f"{name} holds {bad} entries that are not finite, expected none")


# Carries a state of a layer, as its `step` takes it, through a cut; leading axes are sequences.
StateMap: TypeAlias = Callable[[Tensor], Tensor]


class StateHolder(ABC):
    """An object, such as a stream, that keeps states of layers between calls."""

    @abstractmethod
    def carry_(self, layer: nn.Module, through: StateMap | None) -> Callable[[], None]:
        """Carry the states of a layer through a cut that is about to be written; the result takes this back.

        Without a map the states are lost.
        """


_state_holders: WeakKeyDictionary[nn.Module, WeakSet[StateHolder]] = WeakKeyDictionary()


def hold_states_(layer: nn.Module, holder: StateHolder) -> None:
    """Tell the holder, as long as it lives, when a cut of the layer changes its states."""
    _state_holders.setdefault(layer, WeakSet()).add(holder)


def state_holders(layer: nn.Module) -> list[StateHolder]:
    """The living holders of the layer's states."""
    return list(_state_holders.get(layer, ()))


class LTILayer(SSMLayer):
    """A linear recurrence over time with `width` input and output channels."""

    needs_gate = True
    D: nn.Parameter

    @property
    def order(self) -> int:
        """The number of complex modes; a conjugate pair counts as one."""
        name, axis = next(iter(self.STATE_AXES.items()))
        return getattr(self, name).shape[axis]  # inside `functional_call` this is a plain tensor

    def shape_at(self, name: str, order: int) -> tuple[int, ...]:
        shape, axis = tuple(attrgetter(name)(self).shape), self.STATE_AXES.get(name)
        return shape if axis is None else (*shape[:axis], order, *shape[axis + 1 :])

    def dynamics(self) -> Iterator[nn.Parameter]:
        """The poles, step sizes, normalisation and B, but not the readout C or the skip D."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.split("_")[0] not in ("C", "D"):
                yield parameter

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        state: Tensor | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        *,
        keep_state: bool = True,
        skip: bool = True,
        drive: Link | None = None,
    ) -> tuple[Float[Tensor, "batch length width"], Tensor | None]:
        """The outputs and the last state of a sequence; steps at and after `lengths` change nothing.

        Without `keep_state` the state is None; without `skip` the caller adds D·x. `drive` passes the gradient of x
        straight to the norm that computed x.
        """
        # On a CPU D is added to the first response, which costs nothing; in padding D·x stays as it was.
        inside = skip and lengths is None and isinstance(x, Tensor) and not x.is_cuda
        inside = inside and not torch.compiler.is_compiling()
        # A hook may have changed x: then its gradient takes the ordinary path.
        drive = drive if drive is not None and drive.u is x else None
        y, state = self._mix(x, state, lengths, keep_state, self.D if inside else None, drive)
        return torch.addcmul(y, self.D.to(x.dtype), x) if skip and not inside else y, state

    def kernel_parameters(self) -> tuple[Tensor, ...] | None:
        """The parameters that kernels for a whole block of an LRU read; None if there are no such kernels."""
        return None

    @abstractmethod
    def _mix(
        self,
        x: Tensor,
        state: Tensor | None,
        lengths: Tensor | None,
        keep_state: bool,
        D: Tensor | None,
        drive: Link | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The recurrence, plus the skip D·x if D is given."""

    def _stepped(
        self, x: Tensor, state: Tensor, advance: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """One step with the skip: `advance` gives Re(C h) and h in the dtype of states."""
        self._check_step(x, state)
        dtype = wide(self.D.dtype)
        u = x.to(dtype)
        y, h = advance(u, state.to(dtype))
        # Under autocast the input may be in half precision, and the parameters are not.
        return (y + self.D.to(dtype) * u).to(torch.promote_types(x.dtype, self.D.dtype)), h


class SystemLayer(LTILayer):
    """A linear layer with one system for all channels, which `discrete` computes from the parameters."""

    path: Path | None

    @abstractmethod
    def discrete(self) -> tuple[Float[Tensor, "2 n"], Float[Tensor, "2 n width"], Float[Tensor, "2 width n"]]:
        """(log λ, B, C) of the recurrence h[t] = λ h[t−1] + B u[t], y[t] = Re(C h[t]) + D u[t]; log λ in float64."""

    def log_poles(self) -> Float[Tensor, "2 n"]:
        """(log |λ|, arg λ), in float64."""
        return self.discrete()[0]

    def matrices(self) -> tuple[Float[Tensor, "2 n width"], Float[Tensor, "2 width n"]]:
        """B and C, as real pairs."""
        return self.discrete()[1:]

    def _mix(
        self,
        x: Tensor,
        state: Tensor | None,
        lengths: Tensor | None,
        keep_state: bool,
        D: Tensor | None,
        drive: Link | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        self._check(x, state, axes="batch length")
        return lti_layer(x, *self.discrete(), state, lengths, D=D, keep_state=keep_state, path=self.path, drive=drive)

    def step(
        self, x: Float[Tensor, "batch width"], state: Float[Tensor, "batch 2 n"]
    ) -> tuple[Float[Tensor, "batch width"], Float[Tensor, "batch 2 n"]]:
        return self._stepped(x, state, self._advance)

    def _advance(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        log_poles, B, C = self.discrete()
        h = times(exponential(log_poles).to(x.dtype), state.movedim(1, 0)) + x @ B.to(x.dtype).mT
        C = C.to(x.dtype)
        return h[0] @ C[0].mT - h[1] @ C[1].mT, h.movedim(0, 1)

    def stepper(self, dtype: torch.dtype, *, gain: float = 1.0, scaled: bool = False) -> SystemStepper:
        return SystemStepper(*self.discrete(), self.D, dtype, gain=gain, scaled=scaled)

    def initial_state(self, batch: int) -> Float[Tensor, "batch 2 n"]:
        require_batch(batch)
        return self.D.new_zeros(batch, 2, self.order, dtype=wide(self.D.dtype))
