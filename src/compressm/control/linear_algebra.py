"""Decompositions of many matrices at once, and complex functions by real and imaginary parts.

A GPU compiles PyTorch's complex kernels when they are first used, and decomposes one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch
from jaxtyping import Complex, Float, Inexact
from torch import Tensor


def modulus(z: Inexact[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """|z|."""
    return torch.hypot(z.real, z.imag) if z.is_complex() else z.abs()


def square_modulus(z: Inexact[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """|z|²."""
    return z.real * z.real + z.imag * z.imag if z.is_complex() else z * z


def largest_part(z: Inexact[Tensor, "*bank i j"]) -> Float[Tensor, "*bank"]:
    """The largest real or imaginary part of each matrix, by size."""
    if not z.is_complex():
        return z.abs().amax((-2, -1))
    return torch.maximum(z.real.abs().amax((-2, -1)), z.imag.abs().amax((-2, -1)))


def exponential(z: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
    """exp z, 0 where Re z is −∞."""
    if not z.is_complex():
        return torch.exp(z)
    size = torch.exp(z.real)
    return torch.complex(size * torch.cos(z.imag), size * torch.sin(z.imag))


def logarithm(z: Complex[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """log |z| and arg z in [−π, π]."""
    return torch.log(modulus(z)), torch.atan2(z.imag, z.real)


def row_norms(z: Inexact[Tensor, "*bank i j"]) -> Float[Tensor, "*bank i"]:
    """Of each row its Euclidean length."""
    parts = torch.view_as_real(z.resolve_conj()).flatten(-2) if z.is_complex() else z
    return torch.linalg.vector_norm(parts, dim=-1)


def column_norms(z: Inexact[Tensor, "*bank i j"]) -> Float[Tensor, "*bank j"]:
    """Of each column its Euclidean length."""
    if not z.is_complex():
        return torch.linalg.vector_norm(z, dim=-2)
    return torch.linalg.vector_norm(torch.view_as_real(z.resolve_conj()), dim=(-3, -1))


_SMALL = 32  # up to this order the GPU's batched solvers win
_FEW = 16  # up to as many matrices, and above _SMALL, its eigh does
_ALONE = 512  # one matrix of a higher order gets all threads

Item = TypeVar("Item")
Result = TypeVar("Result")


def eig(A: Inexact[Tensor, "*bank n n"]) -> tuple[Complex[Tensor, "*bank n"], Complex[Tensor, "*bank n n"]]:
    """`torch.linalg.eig`."""
    values, vectors = _on_threads(torch.linalg.eig, A)
    return values, vectors


def eigh(A: Inexact[Tensor, "*bank n n"]) -> tuple[Float[Tensor, "*bank n"], Inexact[Tensor, "*bank n n"]]:
    """`torch.linalg.eigh`."""
    here = A.is_cuda and (A.shape[-1] <= _SMALL or A.shape[:-2].numel() <= _FEW)
    values, vectors = _solved(torch.linalg.eigh, A, here=here)
    return values, vectors


def eigvalsh(A: Inexact[Tensor, "*bank n n"]) -> Float[Tensor, "*bank n"]:
    """`torch.linalg.eigvalsh`."""
    here = A.is_cuda and (A.shape[-1] <= _SMALL or A.shape[:-2].numel() <= _FEW)
    return _solved(lambda part: (torch.linalg.eigvalsh(part),), A, here=here)[0]


def svd(A: Inexact[Tensor, "*bank m n"]) -> tuple[Inexact[Tensor, "..."], Float[Tensor, "..."], Inexact[Tensor, "..."]]:
    """`torch.linalg.svd`, thin."""
    here = A.is_cuda and max(A.shape[-2:]) <= _SMALL
    U, sigma, Vh = _solved(lambda part: torch.linalg.svd(part, full_matrices=False), A, here=here)
    return U, sigma, Vh


def svdvals(A: Inexact[Tensor, "*bank m n"]) -> Float[Tensor, "*bank k"]:
    """`torch.linalg.svdvals`."""
    here = A.is_cuda and max(A.shape[-2:]) <= _SMALL
    return _solved(lambda part: (torch.linalg.svdvals(part),), A, here=here)[0]


def each(
    function: Callable[[Item], Result], items: Sequence[Item], *, alone_on_one_thread: bool = False
) -> list[Result]:
    """`function` of every item, several at a time if torch may use several threads, with one BLAS thread each."""
    threads = torch.get_num_threads()
    workers = min(threads, len(items))
    if threads == 1 or workers < (1 if alone_on_one_thread else 2):
        return [function(item) for item in items]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _load_solvers()
    try:
        # Each worker must say so itself: new threads start with as many BLAS threads as there are cores.
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, items))
    finally:
        torch.set_num_threads(threads)


@cache
def _load_solvers() -> None:
    """Torch loads those of a GPU when they are first called, and fails where two threads are the first."""
    torch.linalg.cholesky_ex(torch.eye(1, dtype=torch.float64, device="cuda"))


def _on_threads(solve: Callable[[Tensor], tuple[Tensor, ...]], A: Tensor) -> tuple[Tensor, ...]:
    """`solve` on as many parts of the bank as torch may use threads; results go back to the device of A."""
    members = A.reshape(-1, *A.shape[-2:]).cpu()
    chunks = members.chunk(min(torch.get_num_threads(), len(members)))
    parts = each(solve, chunks, alone_on_one_thread=A.shape[-1] <= _ALONE)
    whole = (torch.cat(pieces) if len(pieces) > 1 else pieces[0] for pieces in zip(*parts, strict=True))
    return tuple(piece.to(A.device).reshape(*A.shape[:-2], *piece.shape[1:]) for piece in whole)


def _solved(solve: Callable[[Tensor], tuple[Tensor, ...]], A: Tensor, *, here: bool) -> tuple[Tensor, ...]:
    """`solve` where A is; on CPU threads if not `here`, or if it does not converge here."""
    if here:
        try:
            return solve(A)
        except torch.linalg.LinAlgError:
            pass
    return _on_threads(solve, A)
