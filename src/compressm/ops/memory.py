"""How numbers lie in memory: rows that kernels read, narrow steps packed side by side, pages cleared before."""

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


class Launch(NamedTuple):
    """Rows and columns of a tile, the warps of a program, and how many programs share the tiles of a column."""

    ROWS: int
    COLS: int
    num_warps: int
    programs: int

    def workers(self, tiles: int) -> int:
        """As few programs as take the same number of tiles each."""
        return -(-tiles // -(-tiles // self.programs))

    def options(self, **more: int | str) -> dict[str, int | str]:
        """What a kernel is told besides its arguments."""
        return {"ROWS": self.ROWS, "COLS": self.COLS, "num_warps": self.num_warps, **more}


def rows_of(gradient: Tensor) -> tuple[Tensor, int]:
    """A gradient as dense rows, and for how many steps each of them stands: 0 for one row a step.

    What a mean over time sends back is the same at every step; written out it would be a pass over memory of its own.
    """
    if gradient.ndim == 3 and gradient.stride(1) == 0 and gradient.shape[1] > 1:
        return gradient[:, 0].contiguous(), gradient.shape[1]
    return gradient.contiguous(), 0


def rows(x: Tensor) -> tuple[Tensor, int]:
    """x (batch, length, …) as it is where it lies so, as half of a projection does, else a copy; and the distance."""
    dense = torch.empty(x.shape[2:], device="meta").stride()
    if x.stride()[2:] != dense or (x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1)):
        x = x.contiguous()
    return x, x.stride(1)


MANY = 4096  # steps from which a packed product, with its zeros, saves more than its weight takes to write


def steps_a_row(columns: int, width: int, steps: int) -> int:
    """As many as fit into `columns` and divide `steps`; at least one."""
    return math.gcd(max(columns // width, 1), steps)


def packed_weight(weight: Float[Tensor, "q p"], steps: int) -> Float[Tensor, "sq sp"]:
    """W for each of `steps` side by side: blocks on a diagonal."""
    if steps == 1:
        return weight
    blocks = torch.eye(steps, dtype=weight.dtype, device=weight.device)[:, None, :, None] * weight[:, None, :]
    return blocks.flatten(2).flatten(0, 1)


def packed_row(row: Float[Tensor, "*rest width"], steps: int) -> Float[Tensor, "*rest sw"]:
    """A row that counts for every step, `steps` times side by side."""
    return row[..., None, :].expand(*row.shape[:-1], steps, row.shape[-1]).flatten(-2)


def product_in(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """a @ b in `dtype`: straight from the float32 sums where the device can."""
    if a.is_cuda and a.dtype != dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


# Smaller tensors get memory that was used before; larger ones get theirs from the system, whose first touch of 80 MB
# took 35 ms in small pages and 10 ms in large ones, beside 15 ms for a copy.
_FRESH = 32 * 2**20
_PAGE = 2 * 2**20


@cache
def keep_freed_memory() -> None:
    """Let the allocator keep up to 62 MB that tensors give back, for the next ones.

    By default it returns all but some 2 MB to the system: a step of the paper's sMNIST model touched 1300 fresh pages,
    which took 3 ms of its 16. The C library of Linux raises its limits as it frees a large block, once for good; where
    a user has set them, or elsewhere, nothing changes.
    """
    torch.empty(_FRESH - _PAGE // 2, dtype=torch.uint8)


def empty_in_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As torch.empty on the CPU; a system without large pages, or out of them, gives small ones."""
    room = torch.empty(shape, dtype=dtype)
    size, advise = room.numel() * room.element_size(), _advise()
    if size < _FRESH or advise is None or type(room) is not Tensor:
        return room
    begin = room.data_ptr()
    first, end = -(-begin // _PAGE) * _PAGE, (begin + size) // _PAGE * _PAGE
    advise(first, end - first, mmap.MADV_HUGEPAGE)
    return room


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    """The system's madvise; None where there are no large pages to ask for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise
