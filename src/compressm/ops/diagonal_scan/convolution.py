"""Causal convolutions by FFT, with gradients that transform real signals only.

Autograd takes the gradient of a real transform through a complex one of all frequencies, which was half of the step.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from compressm.ops.diagonal_scan.cost import fast_length


class MatrixConvolution(torch.autograd.Function):
    """y[t] = Σ_s u[t − s] K[s] with p × q matrices K: a product at every frequency, the gradients with K* and U*."""

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
    """y[t, i] = Σ_s k[s, i] u[t − s, i]: at every frequency one number a channel."""

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
    """Transforms run along the last axis, and want it contiguous: zeros are put behind a signal as it is copied."""
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
    """The first steps of the inverse."""
    flat = torch.fft.irfft(spectrum.flatten(1).mT.contiguous(), n=size)
    return flat[:, :length].unflatten(0, spectrum.shape[1:])
