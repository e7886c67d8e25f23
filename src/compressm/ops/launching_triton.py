"""Launches of Triton kernels with little work on the host: Triton's own takes 20 µs each time, this one 10.

Triton classifies every argument at each launch, to find the kernel that it has compiled for such arguments. Here the
values of all sizes are part of the key, so nothing has to be classified; only pointers differ between launches with the
same key, and they must be multiples of 16 bytes, as torch allocates them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
import triton
from torch import Tensor

# The call below is that of these versions; others launch by themselves.
_KNOWN = (3, 3) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 7)
_MOST = 4096  # entries; a training with many cuts and shapes starts anew


@final
class Launched:
    """A kernel, called as kernel[grid](*arguments, **constants) like Triton's own."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._ready: dict[tuple[Any, ...], Callable[[int, list[Any]], None]] = {}

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
            self._ready[key] = self._prepared(compiled, grid, len(given), options)

    def _prepared(
        self, compiled: Any, grid: tuple[int, ...], given: int, options: dict[str, Any]
    ) -> Callable[[int, list[Any]], None]:
        constants = [options[name] for name in self.kernel.arg_names[given:]]
        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
        x, y, z = (*grid, 1, 1)[:3]

        def ready(stream: int, values: list[Any]) -> None:
            run(x, y, z, stream, function, packed, None, None, None, *values, *constants)

        return ready


def launched(kernel: Any) -> Any:
    """Decorate a kernel that Triton has jitted; others, as in its interpreter, stay as they are."""
    return Launched(kernel) if _KNOWN and isinstance(kernel, triton.JITFunction) else kernel
