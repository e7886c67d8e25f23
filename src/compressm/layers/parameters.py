"""Parameters that change shape: new data in place, old data put back, and those that hold the old shapes.

These are wrappers, averages and compressors.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import compress
from typing import Any, ClassVar, final
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _foreach_supported_types

from compressm.errors import CompressionError


class StateParameter(nn.Parameter):
    """A parameter with an axis of states in a compiled model.

    torch.compile takes the sizes of parameters that are just `nn.Parameter` as constants: it would compile again after
    every cut. `Ordered.mark_states_` changes the class of a parameter; its identity, values and hooks stay.
    """


@final
class StateRows(StateParameter):
    """A parameter whose first axis counts states."""

    _dynamo_weak_dynamic_indices: ClassVar = {0}  # what torch._dynamo.maybe_mark_dynamic writes into a tensor


@final
class StateColumns(StateParameter):
    """A parameter whose second axis counts states."""

    _dynamo_weak_dynamic_indices: ClassVar = {1}


_KINDS = (StateRows, StateColumns)
# An optimizer of torch updates its parameters one by one if the class of one is not in this list.
_foreach_supported_types.extend(_KINDS)


def is_plain(tensor: object) -> bool:
    """True for a tensor or parameter that is not sharded, quantised or else of another package."""
    return type(tensor) in (Tensor, nn.Parameter, *_KINDS)


class Ordered(nn.Module):
    """A module with parameters and buffers whose sizes depend on an order that may change."""

    # The axis of the states in every such tensor.
    STATE_AXES: ClassVar[Mapping[str, int]] = {}

    def __getattr__(self, name: str) -> Any:
        """Look up a parameter or buffer, then what else torch finds.

        torch.compile takes the sizes of all that torch's own function finds as constants; this one it traces.
        """
        own = self.__dict__
        if "_sized" in own:
            for held in self._held():
                if name in held:
                    return held[name]
        elif "_parameters" in own and name in own["_parameters"]:
            return own["_parameters"][name]  # as torch does, in half the time
        return super().__getattr__(name)

    def _held(self) -> tuple[dict[str, nn.Parameter | None], dict[str, Tensor | None]]:
        """The module's own parameters and buffers, by the name that `mark_states_` gives them.

        Of all that torch 2.11 finds in `_parameters` and `_buffers` it takes the sizes as constants. `_sized` comes
        first: it remembers a thing by the name that it met first.
        """
        own = self.__dict__
        if "_sized" in own:
            parameters, buffers = own["_sized"]
            if parameters is own["_parameters"] and buffers is own["_buffers"]:
                return parameters, buffers
        return own["_parameters"], own["_buffers"]

    def mark_states_(self) -> bool:
        """Let torch.compile take the sizes along axes of states as dynamic, here and in all modules inside."""
        if not torch.compiler.is_dynamo_compiling():
            for module in self.modules():
                if isinstance(module, Ordered):
                    module._mark_own_states_()
        return True

    # As torch.compiler.assume_constant_result, which would load the compiler: this runs while a model is traced.
    mark_states_._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _mark_own_states_(self) -> None:
        self.__dict__["_sized"] = (self._parameters, self._buffers)
        for name, axis in self.STATE_AXES.items():
            tensor = self._parameters.get(name, self._buffers.get(name))
            if type(tensor) is nn.Parameter:
                tensor.__class__ = _KINDS[axis]
            elif type(tensor) is Tensor:
                vars(tensor)["_dynamo_weak_dynamic_indices"] = {axis % tensor.ndim}


_form_changes, _is_unrecorded = 0, False
# Code that torch 2.11 has compiled runs on with a parameter whose data has another size, and computes nonsense.
_MISSES_SIZES = torch.__version__ < "2.13"


def form_changes() -> int:
    """The number of times that parameters or states of optimizers moved to other memory: a CUDA graph reads the old."""
    return _form_changes


def count_form_change() -> None:
    """Count a change that `replace_data` does not see."""
    global _form_changes
    _form_changes += 1


@contextmanager
def unrecorded() -> Iterator[None]:
    """A context for changes of a copy that no CUDA graph and no compiled code has seen: they do not count."""
    global _form_changes, _is_unrecorded
    before, _is_unrecorded = (_form_changes, _is_unrecorded), True
    try:
        yield
    finally:
        _form_changes, _is_unrecorded = before


def replace_data(parameter: Tensor, data: Tensor) -> None:
    """Replace a parameter's data in place; the shape may change. Hooks and attributes stay, the old gradient goes."""
    count_form_change()
    misses = _MISSES_SIZES and not _is_unrecorded and "torch._dynamo" in sys.modules
    if misses and type(parameter) is nn.Parameter and parameter.shape != data.shape:
        torch.compiler.reset()
    parameter.grad = None
    # An earlier loss that is still referenced holds a gradient accumulator of the old shape, which makes the next
    # backward fail ("invalid gradient ... expected shape"); a change of dtype makes torch forget it.
    other = torch.float16 if parameter.dtype != torch.float16 else torch.float32
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = data


class Kept:
    """The tensors of a model as they are now, which `restore_` puts back: objects, shapes, flags, gradients, values.

    Without `values` nothing is copied: a tensor that was written in its own memory keeps the new values. Copies are on
    the CPU, or on the GPU of their tensors if they take at most an eighth of its free memory.
    """

    def __init__(self, model: nn.Module, *, values: bool = True) -> None:
        self._held = [
            (path, vars(module), table, held := vars(module)[table], dict(held))
            for path, module in model.named_modules()
            for table in ("_parameters", "_buffers", "_modules")
        ]
        values_held = (value for *_, before in self._held for value in before.values())
        tensors = {id(value): value for value in values_held if isinstance(value, Tensor) and _is_made(value)}
        beside = _with_memory(tensors.values()) if values else set()
        with torch.no_grad():
            self._tensors = {
                number: _KeptTensor(value, (value.device if value.device in beside else _CPU) if values else None)
                for number, value in tensors.items()
            }

    def hide_gradients_(self) -> None:
        """Set all gradients to None until `restore_`; a backward pass would add to them in place."""
        for kept in self._tensors.values():
            if kept.gradient is not None:
                kept.tensor.grad = None

    def restore_(self) -> list[str]:
        """Put everything back; return the names of parameters that had other values, and of replaced parts."""
        with torch.no_grad():
            same = _same_bits_each({number: kept.pair for number, kept in self._tensors.items() if kept.pair})
            changed = {number for number, kept in self._tensors.items() if kept.restore_(same.get(number))}
        names = []
        for path, owner, table, held, before in self._held:
            present = owner[table]  # a ModuleList makes a new one if an item is deleted
            for name in {**before, **present}:
                then, now = before.get(name), present.get(name)
                is_other = then is not now or id(then) in changed
                if is_other and any(isinstance(value, nn.Parameter | nn.Module) for value in (then, now)):
                    names.append(f"{path}.{name}" if path else name)
            owner[table] = held
            if [(name, id(value)) for name, value in held.items()] != [(n, id(v)) for n, v in before.items()]:
                held.clear()
                held.update(before)
        return names


class _KeptTensor:
    def __init__(self, tensor: Tensor, device: torch.device | None) -> None:
        """Keep a tensor, with a copy of its values on `device` if one is given."""
        self.tensor, self.data = tensor, tensor.data
        self.gradient, self.requires_grad = (tensor.grad if tensor.is_leaf else None), tensor.requires_grad
        self.copy = tensor.detach().to(device, copy=True) if device is not None and not tensor.is_meta else None

    @property
    def pair(self) -> tuple[Tensor, Tensor] | None:
        """The tensor and its copy, if both are on a GPU and the tensor is where it was."""
        tensor, copy = self.tensor, self.copy
        there = copy is not None and copy.device.type != "cpu" and _place(tensor) == _place(self.data)
        return (tensor.detach(), copy) if there and copy is not None else None

    def restore_(self, same: bool | None) -> bool:
        """Put the tensor back; True if its shape, dtype, device or a bit of its values had changed.

        `same` is True if all bits of tensor and copy are the same, None if nobody has compared them.
        """
        tensor = self.tensor
        is_changed = _kind(tensor) != _kind(self.data)
        if _place(tensor) != _place(self.data):
            # Other memory may hold the same values.
            is_changed = is_changed or (self.copy is not None and not _same_bits(tensor, self.copy))
            replace_data(tensor, self.data)
        if self.copy is not None and not (_same_bits(tensor, self.copy) if same is None else same):
            is_changed = True
            # `.data` keeps the version that autograd checks: the values are those of the earlier forward pass.
            with torch.inference_mode(tensor.is_inference()):
                tensor.data.copy_(self.copy)
        if tensor.is_leaf:
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad_(self.requires_grad)
            if tensor.grad is not self.gradient:
                tensor.grad = self.gradient
        return is_changed


def _is_made(tensor: Tensor) -> bool:
    """False for a parameter of a lazy module, which has no shape yet."""
    return not torch.nn.parameter.is_lazy(tensor)


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _place(tensor: Tensor) -> tuple[object, ...]:
    """The memory of a tensor and its view of it, where they can be told."""
    if tensor.layout is not torch.strided or type(tensor.data) is not Tensor:
        return _kind(tensor)
    return *_kind(tensor), tensor.data_ptr(), tensor.stride()


def _same_bits(tensor: Tensor, copy: Tensor) -> bool:
    """True if all bits are the same; NaN equals itself."""
    now = tensor.detach().to(copy.device)
    if now.shape != copy.shape or now.dtype != copy.dtype:
        return False
    if not _has_bits(now):
        return torch.equal(now, copy)
    return torch.equal(_bits(now), _bits(copy))


def _same_bits_each(pairs: Mapping[int, tuple[Tensor, Tensor]]) -> dict[int, bool]:
    """The same for tensors and copies of equal shapes on GPUs, each of which is waited for once."""
    flags: dict[torch.device, dict[int, Tensor]] = {}
    for number, (tensor, copy) in pairs.items():
        if _has_bits(tensor):
            flags.setdefault(tensor.device, {})[number] = (_bits(tensor) == _bits(copy)).all()
    return {
        number: same
        for there in flags.values()
        for number, same in zip(there, torch.stack(list(there.values())).tolist(), strict=True)
    }


def _has_bits(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def _bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(_INTEGERS.get(tensor.itemsize, torch.uint8))


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_CPU = torch.device("cpu")
_SHARE = 8


def _with_memory(tensors: Iterable[Tensor]) -> set[torch.device]:
    """The GPUs on which copies of their tensors take at most an eighth of the free memory."""
    needed: dict[torch.device, int] = {}
    for tensor in tensors:
        if tensor.is_cuda:
            needed[tensor.device] = needed.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
    return {device for device, size in needed.items() if _SHARE * size <= _free(device)}


def _free(device: torch.device) -> int:
    """The free memory of a GPU, with that which torch keeps for tensors."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


# The objects, such as compressors, that must know when a module's order changes, with their optimizers.
_holders: WeakKeyDictionary[nn.Module, WeakKeyDictionary[object, list[ref[Any]]]] = WeakKeyDictionary()


def hold_(model: nn.Module, holder: object, optimizers: Iterable[Any]) -> None:
    """Refuse, while the holder lives, to load other orders into this model without all of these optimizers."""
    held = list(map(ref, optimizers))  # a hook of an optimizer may know the holder
    for module in model.modules():
        _holders.setdefault(module, WeakKeyDictionary())[holder] = held


def require_free(module: nn.Module, said: str, optimizers: Sequence[Any] = ()) -> None:
    """Refuse to load other orders into a module that is held, unless the holder's optimizers are loaded too.

    `said` are the module's name and its orders.
    """
    for holder in holders_beside(module, optimizers):
        raise CompressionError(
            f"{said}: a {type(holder).__name__} with an optimizer holds this model, and the state of that optimizer"
            " would not fit; load all of them by load_checkpoint(path, model=..., optimizer=..., compressor=...),"
            " or load the weights first and make optimizer and compressor afterwards"
        )


def holders_beside(module: nn.Module, optimizers: Sequence[Any]) -> list[object]:
    """The holders of a module whose optimizers are not all among the given ones."""
    if _holding(module, optimizers):
        gc.collect()  # a holder in a cycle may be dead already
    return _holding(module, optimizers)


def _holding(module: nn.Module, given: Sequence[Any]) -> list[object]:
    """The holders of a module with an optimizer that is none of the given ones."""
    # One that wraps another, as accelerate does, has its state.
    states = {id(one.state) for one in given}
    holders = list(_holders.get(module, {}).items())
    return [holder for holder, held in holders if not {id(own.state) for one in held if (own := one())} <= states]


# The calls at work now, by their marks: each with its model and its text.
_at_work: dict[object, tuple[nn.Module, str]] = {}


def begin_work_(model: nn.Module, call: str, undo: ExitStack) -> object:
    """Refuse other cuts of the model until `end_work_` of the mark that is returned, or until `undo` is closed."""
    require_idle(model, call)
    mark = object()
    undo.callback(end_work_, mark)
    _at_work[mark] = (model, call)
    return mark


def end_work_(mark: object) -> None:
    """Let the model be cut again."""
    _at_work.pop(mark, None)


def is_idle() -> bool:
    """True if no call works on any model."""
    return not _at_work


def require_idle(model: nn.Module, call: str) -> None:
    """Refuse a call that comes from inside another one that works on the same layers."""
    for busy, other in list(_at_work.values()):
        if not set(busy.modules()).isdisjoint(model.modules()):
            raise CompressionError(
                f"{call} was called inside {other}, by evaluate, calibrate, filter_fn, a policy or another thread:"
                " expected functions that only run the model"
            )


# The last entry is raised; a package that can renew wrappers adds its own error.
_errors: list[type[RuntimeError]] = [RuntimeError]


def refuses_with(error: type[RuntimeError]) -> None:
    """Set the error that outdated wrappers raise."""
    _errors.append(error)


def refuse_to_train_(changed: Iterable[nn.Module], but: Iterable[nn.Module] = ()) -> None:
    """Make every wrapper around one of the `changed` modules refuse to train, except the wrappers in `but`.

    Wrappers are found among all living objects, because a module does not know its wrapper.
    """
    _refuse_to_train_(_living(_wrappers()), set(changed), set(but))


def refuse_outdated_(model: nn.Module, changed: Iterable[nn.Module], but: Iterable[nn.Module] = ()) -> None:
    """Do as `refuse_to_train_`, and make averages of the model refuse to average until they have its shapes.

    An average is a module with a method `update_parameters` or `update` and with a copy of the model as its `module`:
    an AveragedModel of torch, or a ModelEma of timm.
    """
    modules = set(changed)
    averaging = _averaging(modules)
    living = _living(_wrappers() | averaging)
    _refuse_to_train_([thing for thing in living if isinstance(thing, DistributedDataParallel)], modules, set(but))
    for average in living:
        if type(average) in averaging and _is_outdated(average, model, modules):
            for name in _updates(type(average)):
                vars(average)[name] = Checked(average, name)


def refuse_to_average_(model: nn.Module, changed: Iterable[nn.Module], undo: ExitStack) -> None:
    """Make averages in the model whose own layers were cut refuse to average; closing `undo` takes this back.

    Their states have other coordinates than those of the model that they average.
    """
    modules = set(changed)
    for average in model.modules():
        names = _updates(type(average))
        own = getattr(average, "module", None) if names else None
        if isinstance(own, nn.Module) and not modules.isdisjoint(own.modules()):
            for name in names:
                undo.callback(_put_back_, vars(average), name, vars(average).get(name))
                vars(average)[name] = Checked(average, name, _shapes(own))


def _put_back_(held: dict[str, Any], name: str, value: Any | None) -> None:
    held.pop(name, None)
    if value is not None:
        held[name] = value


def _is_outdated(average: nn.Module, model: nn.Module, changed: set[nn.Module]) -> bool:
    """True if the average has its own copies of layers of the changed kinds, and other shapes than the model."""
    # One whose constructor failed has no modules.
    own = vars(average).get("_modules", {}).get("module")
    if own is None:
        return False
    inside = set(own.modules())
    alike = not {type(module) for module in changed}.isdisjoint(map(type, inside))
    return alike and changed.isdisjoint(inside) and _odd_one(own, model) is not None


def _refuse_to_train_(living: Iterable[Any], changed: set[nn.Module], but: set[nn.Module]) -> None:
    for wrapper in living:
        # A wrapper whose constructor failed has no modules.
        held = set(wrapper.modules()) if "_modules" in vars(wrapper) else set()
        if wrapper not in but and not refuses(wrapper) and changed & held:
            wrapper.register_forward_pre_hook(_refuse)


def _living(kinds: Collection[type[nn.Module]]) -> list[Any]:
    """All living objects of exactly these classes."""
    if not kinds:
        return []
    # Not isinstance, which asks proxies of other packages for their class, nor issubclass, which asks an abstract base
    # of the wrapper; nor a loop. This takes a third of their 0.15 s for 300 000 objects.
    numbers = set(map(id, kinds))
    things = gc.get_objects()
    return list(compress(things, map(numbers.__contains__, map(id, map(type, things)))))


def _wrappers() -> set[type[nn.Module]]:
    """The classes of wrappers, if there can be any."""
    started = dist.is_available() and dist.is_initialized()
    return set(_with_subclasses(DistributedDataParallel)) if started else set()


def _with_subclasses(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _with_subclasses(derived)


def _updates(kind: type[nn.Module]) -> list[str]:
    """The methods that update an average of this class; those of torch's own containers do something else."""
    names = () if kind.__module__.startswith("torch.nn.") else ("update_parameters", "update")
    return [name for name in names if callable(getattr(kind, name, None))]


class Remembered(Ordered):
    """A module whose copies are remembered while they live: if there are none, no average needs to be searched."""

    copies: ClassVar[WeakSet[nn.Module]] = WeakSet()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a module that is copied or unpickled."""
        super().__setstate__(state)
        Remembered.copies.add(self)


def _averaging(changed: set[nn.Module]) -> set[type[nn.Module]]:
    """The classes that may have averages with copies of the changed modules, of other shapes, if there can be any."""
    present = {(type(module), tuple(_shapes(module).items())) for module in changed}
    kinds = {kind for kind, _ in present}
    copies = (copy for copy in list(Remembered.copies) if type(copy) in kinds)
    if all(issubclass(kind, Remembered) for kind in kinds) and all(
        (type(copy), tuple(_shapes(copy).items())) in present for copy in copies
    ):
        return set()
    return {kind for kind in _with_subclasses(nn.Module) if _updates(kind)}


@final
class Checked:
    """An average's method that first requires the shapes of the model, and gives way to the method once they agree.

    `alone` are the shapes of an average that was cut by itself: while it has them, its coordinates are its own.
    """

    alone: Mapping[str, tuple[int, ...]] | None = None

    def __init__(self, average: Any, name: str, alone: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self.average, self.name, self.alone = average, name, alone

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Average, or refuse a model of other shapes or coordinates."""
        model = args[0] if args else kwargs.get("model")
        if isinstance(model, nn.Module):
            kind, own = type(self.average).__name__, self.average.module
            cure = (
                "Give averages to the compressor, follow=[average]: they are then cut and restored with the model, and"
                " saved and loaded with it by save_checkpoint and load_checkpoint(..., compressor=...). This one cannot"
                f" follow any more: load its own saved state of these orders, or make a new one, {kind}(model)"
            )
            if self.alone == _shapes(own):
                raise CompressionError(f"this {kind} was cut alone, so its states are not those of the model. {cure}")
            if (odd := _odd_one(own, model)) is not None:
                raise CompressionError(
                    f"this {kind} was made before a cut, or before other orders were loaded or restored: {odd}. {cure}"
                )
        vars(self.average).pop(self.name, None)
        return getattr(self.average, self.name)(*args, **kwargs)


def _odd_one(copy: nn.Module, model: nn.Module) -> str | None:
    """The first parameter that does not have the same shape in both, and its shapes."""
    here, there = _shapes(copy), _shapes(model)
    for name in there | here:
        if here.get(name) != there.get(name):
            if name not in here or name not in there:
                return f"{name} is only in {'the average' if name in here else 'the model'}"
            return f"{name} has the shape {here[name]} in it and {there[name]} in the model"
    return None


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters, by their names without those of wrappers."""
    modules = dict(model.named_modules())
    return {plain_name(name, modules): tuple(p.shape) for name, p in model.named_parameters()}


# The name that each wrapper gives to what it wraps; another module's own child of that name keeps it.
_WRAPPED = {
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
}


def wrapped_name(module: nn.Module) -> str | None:
    """The name of the child that this module wraps; None for a module that is no wrapper."""
    kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__)
    return next((_WRAPPED[kind] for kind in kinds if kind in _WRAPPED), None)


def plain_name(path: str, modules: Mapping[str, nn.Module]) -> str:
    """The name of a module or parameter without the parts that wrappers add."""
    kept, walked = [], ""
    for part in path.split("."):
        around = modules.get(walked) if part in _WRAPPED.values() else None
        kept += [] if around is not None and part == wrapped_name(around) else [part]
        walked = f"{walked}.{part}" if walked else part
    return ".".join(kept)


def refuses(wrapper: nn.Module) -> bool:
    """True if the wrapper refuses to train."""
    return _refuse in wrapper._forward_pre_hooks.values()


def trust_(wrapper: nn.Module) -> None:
    """Let a renewed wrapper train again."""
    for key in [key for key, hook in wrapper._forward_pre_hooks.items() if hook is _refuse]:
        del wrapper._forward_pre_hooks[key]


def _refuse(wrapper: nn.Module, args: object) -> None:
    if torch.is_grad_enabled():
        raise _errors[-1](
            "this DistributedDataParallel was made before a cut, or before a state_dict of other orders was loaded,"
            " and would not average gradients: call compressm.rewrap_(model) on every process,"
            " or pass the wrapper to the compressor or to load_checkpoint"
        )
