"""Checks that every op makes before it chooses a path: valid arguments, and whether hand-written kernels apply."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from enum import Enum
from functools import cache
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


class SequenceError(ValueError):
    """A sequence, state or parameter of the wrong shape, dtype, device or length; it says what is allowed."""


@cache
def has_triton() -> bool:
    """True if Triton, which compiles the GPU kernels, is installed."""
    return importlib.util.find_spec("triton") is not None


_DEVICES = ("cuda",)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def kernels_serve(x: Tensor) -> bool:
    """True on a GPU with Triton, up to float32, outside torch.compile and torch.func, which take plain torch."""
    if torch.compiler.is_compiling() or x.device.type not in _DEVICES or x.dtype not in _DTYPES:
        return False
    return has_triton() and not is_transformed()


# Known before torch.compile traces what asks for it.
_TRITON = importlib.util.find_spec("triton") is not None


def compiled_kernels_serve(x: Tensor) -> bool:
    """True inside torch.compile where `kernels_serve` would be true outside; not in an export."""
    # torch.compiler.is_exporting() is always true in what torch 2.11 compiles; the flag behind it is not.
    if not torch.compiler.is_compiling() or torch.compiler._is_exporting_flag or is_transformed():
        return False
    return _TRITON and x.device.type in _DEVICES and x.dtype in _DTYPES


def is_transformed() -> bool:
    """True inside torch.func and forward-mode derivatives, which need nothing but operations of torch."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse `create_graph` for the gradient of a Function: a second derivative would miss what it computes."""

    @functools.wraps(backward)
    def alone(ctx: Any, *grads: Any) -> Any:
        require_last_derivative()
        return backward(ctx, *grads)

    return alone


def require_last_derivative() -> None:
    """Refuse to compute a gradient that is to be differentiated again."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: gradients of layers and models cannot be differentiated again here; take second"
            " derivatives by torch.func, such as torch.func.grad of torch.func.grad, which runs them in plain torch"
        )


def can_read(values: Tensor) -> bool:
    """False where no value can be read: in torch.compile and torch.func, and while a CUDA graph is recorded."""
    if torch.compiler.is_compiling() or is_transformed():
        return False
    return not (values.is_cuda and torch.cuda.is_current_stream_capturing())


def is_watched(module: nn.Module) -> bool:
    """True if the module has hooks: then it must be called, even where a fused kernel could replace it."""
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)


_READS = "_compressm_only_reads"
Hook = TypeVar("Hook", bound=Callable[..., object])


def only_reads(hook: Hook) -> Hook:
    """Mark a forward pre-hook that only reads the input of its module."""
    setattr(hook, _READS, True)
    return hook


def is_only_read(module: nn.Module) -> bool:
    """True if no hook can change the input or the output of the module, or needs its whole output."""
    if module._forward_hooks or module._backward_pre_hooks or module._backward_hooks:
        return False
    return all(getattr(hook, _READS, False) for hook in module._forward_pre_hooks.values())


_TRAINED: ContextVar[bool] = ContextVar("_TRAINED", default=False)


@contextmanager
def trained_kernels() -> Iterator[None]:
    """Run models in evaluation mode by the kernels that training has compiled, where these can do the same."""
    token = _TRAINED.set(True)
    try:
        yield
    finally:
        _TRAINED.reset(token)


def wants_trained_kernels() -> bool:
    """True inside of `trained_kernels`."""
    return _TRAINED.get()


@final
class _WithoutAutocast:
    """The same as torch.autocast(kind, enabled=False), in a tenth of its 10 µs."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.kind, False)

    def __exit__(self, *error: object) -> None:
        torch.set_autocast_enabled(self.kind, True)


_NOTHING = nullcontext()


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast changes nothing."""
    kind = tensor.device.type
    if torch.compiler.is_compiling():
        return torch.autocast(kind, enabled=False)
    return _WithoutAutocast(kind) if torch.is_autocast_enabled(kind) else _NOTHING


def require_path(path: object, *allowed: Enum) -> None:
    """Require one of the allowed paths, or None, which takes the fastest one."""
    if path is not None and not any(path is one for one in allowed):
        names = ", ".join(map(str, allowed))
        raise SequenceError(f"path is {path!r:.100}, expected None, which takes the fastest one, or one of {names}")


def require_given(**tensors: Tensor | None) -> None:
    """Refuse None for a tensor that is needed."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise SequenceError(f"{name} is None, expected a tensor")


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


_MOST = 1024  # shapes that are remembered
_seen: dict[tuple[Any, ...], dict[str, int]] = {}


def require_shapes(**given: tuple[Tensor | None, tuple[str | int, ...]]) -> dict[str, int]:
    """Check each tensor against its named axes and return the sizes; a name must have one size everywhere."""
    if torch.compiler.is_compiling():
        return _checked_sizes(given)
    key = tuple(
        [(axes, tensor if tensor is None else getattr(tensor, "shape", None)) for tensor, axes in given.values()]
    )
    sizes = _seen.get(key)
    if sizes is None:
        sizes = _checked_sizes(given)
        if len(_seen) >= _MOST:
            _seen.clear()
        _seen[key] = sizes
    return dict(sizes)


def _checked_sizes(given: Mapping[str, tuple[Tensor | None, tuple[str | int, ...]]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, (tensor, axes) in given.items():
        if tensor is None:
            continue
        shape = ", ".join(str(axis) for axis in axes)
        if not isinstance(tensor, Tensor) or tensor.ndim != len(axes):
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise SequenceError(f"{name} is {got}, expected a tensor of shape ({shape})")
        for axis, size in zip(axes, tensor.shape, strict=True):
            expected = axis if isinstance(axis, int) else sizes.setdefault(axis, size)
            if size != expected:
                raise SequenceError(
                    f"{name} has shape {tuple(tensor.shape)}, expected ({shape}) with {axis} = {expected}"
                )
            if size == 0:
                raise SequenceError(f"{name} has shape {tuple(tensor.shape)}: {axis} is 0, expected at least 1")
    return sizes


def require_floats_on_one_device(**given: Tensor | None) -> None:
    """Require real floating point tensors, all on the device of the first."""
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    first = next(iter(tensors))
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise SequenceError(f"{name} has dtype {tensor.dtype}, expected one of {', '.join(map(str, _FLOATS))}")
        if tensor.device != tensors[first].device:
            raise SequenceError(f"{name} is on {tensor.device}, expected {tensors[first].device} like {first}")


def require_lengths(lengths: Tensor | None, batch: int, length: int) -> None:
    """Require one integer from 1 to `length` for each sequence."""
    if lengths is None:
        return
    if not isinstance(lengths, Tensor) or lengths.shape != (batch,) or lengths.dtype not in (torch.int32, torch.int64):
        got = f"{lengths.dtype} {tuple(lengths.shape)}" if isinstance(lengths, Tensor) else repr(lengths)
        raise SequenceError(f"lengths are {got}, expected an integer tensor of shape ({batch},)")
    if not can_read(lengths):
        return
    low, high = torch.stack(lengths.aminmax()).tolist()
    if low < 1 or high > length:
        raise SequenceError(f"lengths range from {low} to {high}, expected 1 to {length}")
