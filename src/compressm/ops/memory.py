"""Launch sizes and memory layout: dense rows for kernels, narrow steps packed side by side, large pages on the CPU."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


def cdiv(total: int, size: int) -> int:
    """⌈total / size⌉; Triton's own takes 8 µs."""
    return -(-total // size)


def next_power_of_2(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


class Launch(NamedTuple):
    """The rows and columns of a tile, the warps of a program, and how many programs share the tiles of a column."""

    ROWS: int
    COLS: int
    num_warps: int
    programs: int

    def workers(self, tiles: int) -> int:
        """The fewest programs that still take no more tiles each than `programs` would."""
        return -(-tiles // -(-tiles // self.programs))

    def options(self, **more: int | str) -> dict[str, int | str]:
        """The keyword arguments of a kernel: sizes, warps and `more`."""
        return {"ROWS": self.ROWS, "COLS": self.COLS, "num_warps": self.num_warps, **more}


def rows_of(gradient: Tensor) -> tuple[Tensor, int]:
    """Return a gradient as dense rows, and the number of steps that share a row; 0 means one row a step.

    The gradient of a mean over time is the same at every step; writing it out would cost a pass over memory.
    """
    if gradient.ndim == 3 and gradient.stride(1) == 0 and gradient.shape[1] > 1:
        return gradient[:, 0].contiguous(), gradient.shape[1]
    return gradient.contiguous(), 0


def rows(x: Tensor) -> tuple[Tensor, int]:
    """x (batch, length, …) and the distance of its steps; a copy unless rows are dense, as in half of a projection."""
    batch, length, *last = x.shape
    by_batch, by_step, *strides = x.stride()
    size = 1
    is_dense = batch == 1 or by_batch == length * by_step
    for count, stride in zip(reversed(last), reversed(strides), strict=True):
        is_dense = is_dense and (count == 1 or stride == size)
        size *= count
    if is_dense:
        return x, by_step
    x = x.contiguous()
    return x, x.stride(1)


MANY = 4096  # steps from which a packed product, despite its zeros, saves more than writing its weight costs


def steps_a_row(columns: int, width: int, steps: int) -> int:
    """The greatest common divisor of `steps` and the number of steps that fit into `columns`; at least one."""
    return math.gcd(max(columns // width, 1), steps)


def packed_weight(weight: Float[Tensor, "q p"], steps: int) -> Float[Tensor, "sq sp"]:
    """Repeat W for `steps` steps side by side, as blocks on a diagonal."""
    if steps == 1:
        return weight
    blocks = torch.eye(steps, dtype=weight.dtype, device=weight.device)[:, None, :, None] * weight[:, None, :]
    return blocks.flatten(2).flatten(0, 1)


def packed_row(row: Float[Tensor, "*rest width"], steps: int) -> Float[Tensor, "*rest sw"]:
    """Repeat a row that applies to every step, `steps` times side by side."""
    return row[..., None, :].expand(*row.shape[:-1], steps, row.shape[-1]).flatten(-2)


def product_in(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in `dtype`, directly from the float32 sums where the device can."""
    if a.is_cuda and a.dtype != dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


# Smaller tensors reuse memory; larger ones get fresh pages from the system. The first touch of 80 MB took 35 ms in
# small pages and 10 ms in large ones, while a copy takes 15 ms.
_FRESH = 32 * 2**20
_PAGE = 2 * 2**20


@cache
def keep_freed_memory() -> None:
    """Let the allocator keep up to 62 MB that tensors free, for later tensors.

    By default it returns all but about 2 MB to the system: a step of the paper's sMNIST model touched 1300 fresh pages,
    which took 3 of its 16 ms. The C library of Linux raises its limits permanently when it frees a large block;
    nothing changes if a user has set the limits, or on another system.
    """
    torch.empty(_FRESH - _PAGE // 2, dtype=torch.uint8, device="cpu")


def empty_in_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate like torch.empty on the CPU, in large pages if the system has some left, else in small ones."""
    room = torch.empty(shape, dtype=dtype, device="cpu")
    size, advise = room.numel() * room.element_size(), _advise()
    if size < _FRESH or advise is None or type(room) is not Tensor:
        return room
    begin = room.data_ptr()
    first, end = -(-begin // _PAGE) * _PAGE, (begin + size) // _PAGE * _PAGE
    advise(first, end - first, mmap.MADV_HUGEPAGE)
    return room


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    """The system's madvise; None if the system has no large pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise
