"""Ways to compute layers and banks: through every state, or by impulse responses and FFTs, and the last state alone."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from compressm.ops.dispatch import once_differentiable
from compressm.ops.lti.cost import best_chunk, fast_length, walks_pairs
from compressm.ops.lti.recurrence import (
    complex_dtype,
    from_interleaved,
    interleaved,
    pair_recurrence,
    powers,
    recurrence,
    to_complex,
    to_pair,
)
from compressm.ops.opaque import define_recomputed


def impulse_response(
    log_poles: Float[Tensor, "2 n"], B: Float[Tensor, "2 n p"], C: Float[Tensor, "2 q n"], length: int
) -> Float[Tensor, "p q length"]:
    """The impulse response K[kT + j] = Re((C Λ^{kT}) (Λʲ B)), transposed."""
    near, far = power_tables(log_poles, length, complex_dtype(B.dtype))
    driven = interleaved(near[:, None] * to_complex(B, 0).mT)
    read = interleaved((far[:, None] * to_complex(C, 0)).conj())
    product = driven.flatten(0, 1) @ read.flatten(0, 1).mT
    shape = (*driven.shape[:2], *read.shape[:2])
    return product.reshape(shape).permute(1, 3, 2, 0).flatten(2)[..., :length]


def free_response(
    log_poles: Float[Tensor, "2 n"], C: Float[Tensor, "2 q n"], state: Float[Tensor, "batch 2 n"], length: int
) -> Float[Tensor, "batch length q"]:
    """The output Re(C Λᵗ⁺¹ h₀) of the initial state alone."""
    near, far = power_tables(log_poles, length, complex_dtype(C.dtype))
    first = powers(log_poles, 1, first=1, dtype=near.dtype)
    carried = interleaved(to_complex(state, 1).to(near.dtype)[:, None] * (first * far))
    read = interleaved((near[:, None] * to_complex(C, 0)).conj())
    return (carried @ read.flatten(0, 1).mT).reshape(len(state), -1, C.shape[1])[:, :length]


def power_tables(
    log_poles: Float[Tensor, "2 *modes"], length: int, dtype: torch.dtype
) -> tuple[Complex[Tensor, "T *modes"], Complex[Tensor, "count *modes"]]:
    """Λʲ for j < T and Λ^{kT} for kT < L; numbers below 1e-19 are 0."""
    chunk = best_chunk(length)
    near = powers(log_poles, chunk, dtype=dtype)
    far = powers(log_poles.to(torch.float64) * chunk, -(-length // chunk), dtype=dtype)
    # Products with numbers below 1e-38 take a processor ten times as long; 1e-19 · 1e-19 is not below.
    return torch.where(near.abs() < 1e-19, 0, near), torch.where(far.abs() < 1e-19, 0, far)


class MatrixConvolution(torch.autograd.Function):
    """y[t] = Σ_s u[t − s] K[s] with p × q matrices K: one product at every frequency; the gradients use K* and U*."""

    @staticmethod
    def forward(
        ctx: Any, u: Float[Tensor, "batch length p"], kernel: Float[Tensor, "p q length"]
    ) -> Float[Tensor, "batch length q"]:
        size = fast_length(2 * u.shape[1] - 1)
        U, K = _matrices(u.mT, size), _matrices(kernel, size)
        ctx.save_for_backward(U, K)
        ctx.size = size
        return _signals(U @ K, size, u.shape[1]).mT.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        U, K = ctx.saved_tensors
        length = grads[0].shape[1]
        G = _matrices(grads[0].mT, ctx.size)
        return _signals(G @ K.mH, ctx.size, length).mT.contiguous(), _signals(U.mH @ G, ctx.size, length)


class ChannelConvolution(torch.autograd.Function):
    """y[t, i] = Σ_s k[s, i] u[t − s, i]: one number a channel at every frequency."""

    @staticmethod
    def forward(
        ctx: Any, u: Float[Tensor, "batch length width"], kernel: Float[Tensor, "length width"]
    ) -> Float[Tensor, "batch length width"]:
        size = fast_length(2 * u.shape[1] - 1)
        U, K = _spectrum(u.mT, size), _spectrum(kernel.mT, size)
        ctx.save_for_backward(U, K)
        ctx.size = size
        return torch.fft.irfft(U * K, n=size)[..., : u.shape[1]].mT.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        U, K = ctx.saved_tensors
        length = grads[0].shape[1]
        G = _spectrum(grads[0].mT, ctx.size)
        pulled = torch.fft.irfft(G * K.conj(), n=ctx.size)[..., :length].mT.contiguous()
        return pulled, torch.fft.irfft((U.conj() * G).sum(0), n=ctx.size)[..., :length].mT


def _spectrum(x: Float[Tensor, "*rest length"], size: int) -> Complex[Tensor, "*rest f"]:
    """FFT along the last axis, which should be contiguous: one copy makes it so and appends the zeros."""
    room = x.new_zeros(*x.shape[:-1], size)
    room[..., : x.shape[-1]] = x
    return torch.fft.rfft(room)


def _matrices(x: Float[Tensor, "rows columns length"], size: int) -> Complex[Tensor, "f rows columns"]:
    """The spectrum as one matrix a frequency."""
    rows, columns, _ = x.shape
    return _spectrum(x, size).flatten(0, 1).mT.contiguous().unflatten(1, (rows, columns))


def _signals(
    spectrum: Complex[Tensor, "f rows columns"], size: int, length: int
) -> Float[Tensor, "rows columns length"]:
    """The first `length` steps of the inverse FFT."""
    flat = torch.fft.irfft(spectrum.flatten(1).mT.contiguous(), n=size)
    return flat[:, :length].unflatten(0, spectrum.shape[1:])


def through_states(
    u: Float[Tensor, "batch length p"],
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    C: Float[Tensor, "2 q n"],
    state: Float[Tensor, "batch 2 n"] | None,
) -> tuple[Float[Tensor, "batch length q"], Float[Tensor, "batch 2 n"]]:
    """Compute B u, scan, then multiply by C: best if n is not much larger than the number of channels."""
    if not u.is_cuda and walks_pairs(len(u), u.shape[1], B.shape[1], driven=True):
        driven = (u @ B.flatten(0, 1).mT).unflatten(-1, (2, -1))
        pairs, last = pair_recurrence(driven, log_poles, state)
        return pairs.flatten(-2) @ torch.cat([C[0], -C[1]], dim=1).mT, last
    x = from_interleaved(u @ interleaved(to_complex(B, 0).mT))
    h = recurrence(x, log_poles, None if state is None else to_complex(state, 1))
    # Re(C h) is the product of [re, −im] of C with [re, im] of h.
    return interleaved(h) @ interleaved(to_complex(C, 0).conj()).mT, to_pair(h[:, -1], 1)


def padded_order(
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    C: Float[Tensor, "2 q n"],
    state: Float[Tensor, "batch 2 n"] | None,
    multiple: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Add idle modes up to the next multiple: matrices of other sizes miss the fast kernels of a GPU."""
    missing = -B.shape[1] % multiple
    if missing == 0:
        return log_poles, B, C, state
    idle = None if state is None else pad(state, (0, missing))
    return pad(log_poles, (0, missing), value=-1.0), pad(B, (0, 0, 0, missing)), pad(C, (0, missing)), idle


def _fake_padded_order(
    log_poles: Tensor, B: Tensor, C: Tensor, state: Tensor | None, multiple: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    m = (B.shape[1] + multiple - 1) // multiple * multiple
    idle = None if state is None else state.new_empty(state.shape[0], 2, m)
    return log_poles.new_empty(2, m), B.new_empty(2, m, B.shape[2]), C.new_empty(2, C.shape[1], m), idle


# As an op, because torch.compile would compile once for orders that are multiples and once for others.
define_recomputed(
    "padded_order",
    "Tensor log_poles, Tensor B, Tensor C, Tensor? state, int multiple",
    padded_order,
    _fake_padded_order,
)


def convolution(
    u: Float[Tensor, "batch length p"],
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    C: Float[Tensor, "2 q n"],
    state: Float[Tensor, "batch 2 n"] | None,
    D: Float[Tensor, " q"] | None,
) -> Float[Tensor, "batch length q"]:
    """Convolve with the impulse response by FFTs: only the response depends on n, so this is best for few channels."""
    length = u.shape[1]
    kernel = impulse_response(log_poles, B, C, length)
    if D is not None:
        kernel[..., 0].diagonal().add_(D)
    y: Tensor = MatrixConvolution.apply(u, kernel)
    return y if state is None else y + free_response(log_poles, C, state, length)


def final_state(
    u: Float[Tensor, "batch length p"],
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    state: Float[Tensor, "batch 2 n"] | None,
    lengths: Int[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch 2 n"]:
    """h at the end of each sequence, Σⱼ λʲ B u[end − j], in blocks of j, without the states in between."""
    batch, length, p = u.shape
    dtype, chunk = complex_dtype(u.dtype), best_chunk(length)
    count = -(-length // chunk)
    collect = interleaved(powers(log_poles, chunk, dtype=dtype)[:, None] * to_complex(B, 0).mT).flatten(0, 1)
    blocks = pad(backwards(u, lengths), (0, 0, 0, count * chunk - length)).reshape(batch, count, chunk * p)
    last = (from_interleaved(blocks @ collect) * powers(log_poles.to(torch.float64) * chunk, count, dtype=dtype)).sum(1)
    if state is not None:
        last = last + after(log_poles, lengths, length, dtype) * to_complex(state, 1).to(dtype)
    return to_pair(last, 1).to(u.dtype)


def after(log_poles: Tensor, lengths: Tensor | None, length: int, dtype: torch.dtype) -> Tensor:
    """λ^length, or λ^lengths with a length for each sequence."""
    if lengths is None:
        return powers(log_poles, 1, first=length, dtype=dtype)
    logs = torch.complex(*log_poles.to(torch.float64).unbind(0))
    return torch.exp(lengths.reshape(-1, *([1] * logs.ndim)) * logs).to(dtype)


def backwards(
    u: Float[Tensor, "batch length p"], lengths: Int[Tensor, " batch"] | None
) -> Float[Tensor, "batch length p"]:
    """Reverse each sequence from its own end; zeros follow its first step."""
    if lengths is None:
        return u.flip(1)
    position = lengths[:, None] - 1 - torch.arange(u.shape[1], device=u.device)
    read = u.gather(1, position.clamp_min(0)[..., None].expand_as(u))
    return torch.where((position >= 0)[..., None], read, 0)


def bank_convolution(
    u: Float[Tensor, "batch length width"],
    log_poles: Float[Tensor, "2 width n"],
    B: Float[Tensor, "2 width n"],
    C: Float[Tensor, "2 width n"],
    state: Float[Tensor, "batch 2 width n"] | None,
    D: Float[Tensor, " width"] | None,
) -> Float[Tensor, "batch length width"]:
    """Convolve each channel with kᵢ[t] = Re(Cᵢ Λᵢᵗ Bᵢ) by FFTs; the kernel takes two tables of about √L powers."""
    length = u.shape[1]
    kernel = _responses(log_poles, (to_complex(B, 0) * to_complex(C, 0))[None], length, u.dtype)[0]
    if D is not None:
        kernel[0].add_(D)
    y: Tensor = ChannelConvolution.apply(u, kernel)
    if state is None:
        return y
    read = to_complex(C, 0) * to_complex(state, 1) * powers(log_poles, 1, first=1, dtype=complex_dtype(u.dtype))
    return y + _responses(log_poles, read, length, u.dtype)


def bank_final_state(
    u: Float[Tensor, "batch length width"],
    log_poles: Float[Tensor, "2 width n"],
    B: Float[Tensor, "2 width n"],
    state: Float[Tensor, "batch 2 width n"] | None,
    lengths: Int[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch 2 width n"]:
    """The states of a bank at the end of each sequence."""
    batch, length, width = u.shape
    dtype, chunk = complex_dtype(u.dtype), best_chunk(length)
    count = -(-length // chunk)
    blocks = pad(backwards(u, lengths), (0, 0, 0, count * chunk - length)).reshape(batch * count, chunk, width)
    collect = interleaved(powers(log_poles, chunk, dtype=dtype))
    ends = from_interleaved(blocks.permute(2, 0, 1) @ collect.transpose(0, 1)).reshape(width, batch, count, -1)
    strides = powers(log_poles.to(torch.float64) * chunk, count, dtype=dtype)
    last = torch.einsum("wbcn,cwn->bwn", ends, strides) * to_complex(B, 0)
    if state is not None:
        last = last + after(log_poles, lengths, length, dtype) * to_complex(state, 1).to(dtype)
    return to_pair(last, 1).to(u.dtype)


def _responses(
    log_poles: Float[Tensor, "2 width n"], weights: Complex[Tensor, "batch width n"], length: int, real: torch.dtype
) -> Float[Tensor, "batch length width"]:
    """Re Σₙ w Λᵗ for t < length, as one real product a channel: t = kT + j needs √L powers twice instead of L."""
    near, far = power_tables(log_poles, length, complex_dtype(real))
    batch, width, _ = weights.shape
    weighted = (weights.to(far.dtype)[:, None] * far).conj()
    product = interleaved(weighted).permute(2, 0, 1, 3).flatten(1, 2) @ interleaved(near).permute(1, 2, 0)
    return product.reshape(width, batch, -1)[..., :length].permute(1, 2, 0)
