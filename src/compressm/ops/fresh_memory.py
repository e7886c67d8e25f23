"""Memory fresh from the system is cleared page by page at the first touch, which can take longer than to fill it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

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
