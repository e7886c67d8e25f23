"""Launches of Triton kernels with little work on the host: Triton's own takes 20 µs each time, a `Planned` one 2.

Triton classifies every argument at each launch, to find the kernel that it has compiled for such arguments. A plan of
an operation, made once for all its sizes and dtypes, holds kernels that are ready to be launched: only pointers differ
between their launches, and they must be multiples of 16 bytes, as torch allocates them. `Launched` is for kernels of
operations without a plan: the values of all sizes are the key under which it remembers what is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, ParamSpec, TypeVar, cast, final

import torch
import triton
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# The calls below are those of these versions; others launch by themselves.
_KNOWN = (3, 3) <= _VERSION <= (3, 7)
# Before its part in C the launcher of this version only allocates memory, which none of our kernels asks for.
_DIRECT = _VERSION == (3, 6)
_MOST = 4096  # entries; a training with many cuts and shapes starts anew


@final
class Launched:
    """A kernel, called as kernel[grid](*arguments, **constants) like Triton's own."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._ready: dict[tuple[Any, ...], _Call] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], /, *given: Any, **options: Any) -> None:
        values: list[Any] = []
        kinds: list[Any] = []
        bits = 0
        for value in given:
            if isinstance(value, Tensor):
                kinds.append(value.dtype)
                value = value.data_ptr()
                bits |= value
            else:
                kinds.append(value)
            values.append(value)
        device = torch._C._cuda_getDevice()
        key = (device, grid, *kinds, *options, *options.values())
        ready = self._ready.get(key)
        if ready is not None and not bits & 15:
            ready(torch._C._cuda_getCurrentRawStream(device), values)
            return
        compiled = self.kernel[grid](*given, **options)
        if not bits & 15:
            if len(self._ready) >= _MOST:
                self._ready.clear()
            self._ready[key] = _Call(compiled, grid, [options[name] for name in self.kernel.arg_names[len(given) :]])


@final
class _Call:
    """A launch of a compiled kernel with everything but its stream and its first arguments."""

    __slots__ = ("after", "before", "last", "launch")

    def __init__(self, compiled: Any, grid: tuple[int, ...], last: list[Any]) -> None:
        run = compiled.run
        x, y, z = (*grid, 1, 1)[:3]
        rest: tuple[Any, ...] = (compiled.packed_metadata, None, None, None)
        if _DIRECT and not (run.global_scratch_size or run.profile_scratch_size):
            self.launch = run.launch
            rest = (run.launch_cooperative_grid, run.launch_pdl, None, None, *rest)
        else:
            self.launch = run
        self.before, self.after, self.last = (x, y, z), (compiled.function, *rest), last

    def __call__(self, stream: int, values: list[Any]) -> None:
        self.launch(*self.before, stream, *self.after, *values, *self.last)


@final
class Planned:
    """A kernel with its grid, the sizes that follow its tensors, and its options; a call gives the tensors alone.

    Their dtypes, and which of them are None, are the same in every call; a plan belongs to one device.
    """

    __slots__ = ("_call", "_kinds", "grid", "kernel", "options", "sizes")

    def __init__(self, kernel: Any, grid: tuple[int, ...], *sizes: Any, **options: Any) -> None:
        self.kernel, self.grid, self.sizes, self.options = kernel, grid, sizes, options
        self._call: _Call | None = None
        self._kinds: list[torch.dtype | None] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch the kernel on the current stream."""
        call = self._call
        if call is None:
            self._first(tensors)
            return
        bits = 0
        places: list[int | None] = []
        for tensor in tensors:
            if tensor is None:
                places.append(None)
            else:
                place = tensor.data_ptr()
                bits |= place
                places.append(place)
        if bits & 15:
            self._first(tensors)
            return
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        call.launch(*call.before, stream, *call.after, *places, *call.last)

    def _first(self, tensors: tuple[Tensor | None, ...]) -> None:
        kinds = [None if tensor is None else tensor.dtype for tensor in tensors]
        if self._kinds is not None and kinds != self._kinds:
            raise RuntimeError(f"{self.kernel} was planned for {self._kinds} and called with {kinds}")
        self._kinds = kinds
        if not isinstance(self.kernel, Launched):
            self.kernel[self.grid](*tensors, *self.sizes, **self.options)
            return
        kernel = self.kernel.kernel
        compiled = kernel[self.grid](*tensors, *self.sizes, **self.options)
        if not any(tensor is not None and tensor.data_ptr() & 15 for tensor in tensors):
            names = kernel.arg_names[len(tensors) + len(self.sizes) :]
            self._call = _Call(compiled, self.grid, [*self.sizes, *(self.options[name] for name in names)])


def launched(kernel: Any) -> Any:
    """Decorate a kernel that Triton has jitted; others, as in its interpreter, stay as they are."""
    return Launched(kernel) if _KNOWN and isinstance(kernel, triton.JITFunction) else kernel


def kinds_of(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    """The dtypes of tensors, None where there is none: a part of what a plan is made for."""
    return tuple([None if tensor is None else tensor.dtype for tensor in tensors])


_plans: list[Any] = []


def plan_of(make: Callable[_P, _R]) -> Callable[_P, _R]:
    """Remember the plan that `make` gives for its arguments, which name all sizes, all dtypes and the device."""
    remembered = lru_cache(_MOST)(make)
    _plans.append(remembered)
    return cast("Callable[_P, _R]", remembered)


def forget_plans() -> None:
    """Make all plans anew, after a constant that they follow from was changed."""
    for remembered in _plans:
        remembered.cache_clear()
