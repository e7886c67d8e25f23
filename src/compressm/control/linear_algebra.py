"""Complex functions computed from real and imaginary parts, and decompositions of many matrices at once.

Both avoid slow paths: a GPU compiles PyTorch's complex kernels at their first use, and decomposes one matrix at a time.
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
    """The largest absolute real or imaginary part in each matrix; NaN if an entry is."""
    if not z.is_complex():
        return torch.maximum(z.amax((-2, -1)), -z.amin((-2, -1)))
    parts = torch.view_as_real(z.conj() if z.is_conj() else z)
    return torch.maximum(parts.amax((-3, -2, -1)), -parts.amin((-3, -2, -1)))


def power_of_two(sizes: Float[Tensor, "*shape"], step: int = 1) -> Float[Tensor, "*shape"]:
    """The next power of two above each size whose exponent is a multiple of `step`, 1, 2 or 4; 1 for zeros.

    Division by it is exact, and afterwards squares stay in the range of float64.
    """
    exponent = torch.frexp(sizes.detach()).exponent
    # 2^1024 is infinite, and so is 1 / 2^-1024, which a complex division may compute.
    exponent = (-step * torch.div(-exponent, step, rounding_mode="floor")).clamp(-1020, 1020)
    return torch.where(sizes > 0, torch.ldexp(torch.ones_like(sizes), exponent), 1)


# Scales 2^(256 k), k = −3 … 3: sizes divided by theirs lie between 2^-307 and 2^257, and their squares in float64.
COARSE_SCALES = tuple(2.0 ** (256 * k) for k in range(-3, 4))


def coarse_scale(sizes: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The nearest of `COARSE_SCALES`: 1 for ordinary sizes, 2^-128 to 2^128, and the least one for zeros."""
    k = torch.round(torch.frexp(sizes.detach()).exponent.to(torch.float64) / 256).clamp(-3, 3)
    scale = torch.ldexp(torch.ones_like(sizes), (256 * k).to(torch.int32))
    return torch.where(sizes > 0, scale, COARSE_SCALES[0])


def exponential(z: Inexact[Tensor, "*shape"]) -> Inexact[Tensor, "*shape"]:
    """exp z; 0 where Re z is −∞."""
    if not z.is_complex():
        return torch.exp(z)
    size = torch.exp(z.real)
    return torch.complex(size * torch.cos(z.imag), size * torch.sin(z.imag))


def logarithm(z: Complex[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """log |z| and arg z in [−π, π]."""
    return torch.log(modulus(z)), torch.atan2(z.imag, z.real)


def row_norms(z: Inexact[Tensor, "*bank i j"]) -> Float[Tensor, "*bank i"]:
    """The Euclidean norm of each row."""
    parts = torch.view_as_real(z.resolve_conj()).flatten(-2) if z.is_complex() else z
    return torch.linalg.vector_norm(parts, dim=-1)


def column_norms(z: Inexact[Tensor, "*bank i j"]) -> Float[Tensor, "*bank j"]:
    """The Euclidean norm of each column."""
    if not z.is_complex():
        return torch.linalg.vector_norm(z, dim=-2)
    return torch.linalg.vector_norm(torch.view_as_real(z.resolve_conj()), dim=(-3, -1))


_SMALL = 32  # up to this order the GPU's batched solvers are faster
_FEW = 16  # above _SMALL, the GPU's eigh is faster for at most this many matrices
_ALONE = 512  # a single matrix of a higher order gets all threads

Item = TypeVar("Item")
Result = TypeVar("Result")


def eig(A: Inexact[Tensor, "*bank n n"]) -> tuple[Complex[Tensor, "*bank n"], Complex[Tensor, "*bank n n"]]:
    """`torch.linalg.eig`, on CPU threads."""
    values, vectors = _on_threads(torch.linalg.eig, A)
    return values, vectors


def eigh(A: Inexact[Tensor, "*bank n n"]) -> tuple[Float[Tensor, "*bank n"], Inexact[Tensor, "*bank n n"]]:
    """`torch.linalg.eigh`, on the GPU or on CPU threads, whichever is faster."""
    here = A.is_cuda and (A.shape[-1] <= _SMALL or A.shape[:-2].numel() <= _FEW)
    values, vectors = _solved(torch.linalg.eigh, A, here=here)
    return values, vectors


def eigvalsh(A: Inexact[Tensor, "*bank n n"]) -> Float[Tensor, "*bank n"]:
    """`torch.linalg.eigvalsh`, on the GPU or on CPU threads, whichever is faster."""
    here = A.is_cuda and (A.shape[-1] <= _SMALL or A.shape[:-2].numel() <= _FEW)
    return _solved(lambda part: (torch.linalg.eigvalsh(part),), A, here=here)[0]


def svd(A: Inexact[Tensor, "*bank m n"]) -> tuple[Inexact[Tensor, "..."], Float[Tensor, "..."], Inexact[Tensor, "..."]]:
    """The thin `torch.linalg.svd`, on the GPU or on CPU threads, whichever is faster."""
    here = A.is_cuda and max(A.shape[-2:]) <= _SMALL
    U, sigma, Vh = _solved(lambda part: torch.linalg.svd(part, full_matrices=False), A, here=here)
    return U, sigma, Vh


def svdvals(A: Inexact[Tensor, "*bank m n"]) -> Float[Tensor, "*bank k"]:
    """`torch.linalg.svdvals`, on the GPU or on CPU threads, whichever is faster."""
    here = A.is_cuda and max(A.shape[-2:]) <= _SMALL
    return _solved(lambda part: (torch.linalg.svdvals(part),), A, here=here)[0]


def each(
    function: Callable[[Item], Result], items: Sequence[Item], *, alone_on_one_thread: bool = False
) -> list[Result]:
    """Apply `function` to every item, on as many threads as torch may use, each with one BLAS thread."""
    threads = torch.get_num_threads()
    workers = min(threads, len(items))
    if threads == 1 or workers < (1 if alone_on_one_thread else 2):
        return [function(item) for item in items]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _load_solvers()
    try:
        # Each worker must set this itself: a new thread starts with as many BLAS threads as there are cores.
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, items))
    finally:
        torch.set_num_threads(threads)


@cache
def _load_solvers() -> None:
    """Load the GPU's solvers; torch loads them at the first call, which fails if two threads make it at once."""
    torch.linalg.cholesky_ex(torch.eye(1, dtype=torch.float64, device="cuda"))


def _on_threads(solve: Callable[[Tensor], tuple[Tensor, ...]], A: Tensor) -> tuple[Tensor, ...]:
    """Solve the bank in one chunk per torch thread; results go back to the device of A."""
    members = A.reshape(-1, *A.shape[-2:]).cpu()
    chunks = members.chunk(min(torch.get_num_threads(), len(members)))
    parts = each(solve, chunks, alone_on_one_thread=A.shape[-1] <= _ALONE)
    whole = (torch.cat(pieces) if len(pieces) > 1 else pieces[0] for pieces in zip(*parts, strict=True))
    return tuple(piece.to(A.device).reshape(*A.shape[:-2], *piece.shape[1:]) for piece in whole)


def _solved(solve: Callable[[Tensor], tuple[Tensor, ...]], A: Tensor, *, here: bool) -> tuple[Tensor, ...]:
    """Solve on A's own device if `here` is True; otherwise, or if that does not converge, on CPU threads."""
    if here:
        try:
            return solve(A)
        except torch.linalg.LinAlgError:
            pass
    return _on_threads(solve, A)
