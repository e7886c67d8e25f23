"""The system of a linear recurrent unit in one GPU kernel, and the gradients of its seven parameters in another."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressm.ops.dispatch import once_differentiable
from compressm.ops.launching_triton import launched
from compressm.ops.memory import cdiv

_MODES, _CHANNELS = 16, 64


@launched
@triton.jit(do_not_specialize=["n", "m", "p", "q", "readers"])
def _forward(nu, theta, gamma, b_re, b_im, c_re, c_im, logs, B, C, n, m, p, q, readers,
             MODES: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """Write poles, γ B and C: the first programs own modes (poles and rows of B), the last `readers` own rows of C."""
    program = tl.program_id(0)
    drivers = tl.num_programs(0) - readers
    if program < drivers:
        mode = program * MODES + tl.arange(0, MODES)
        real = mode < n
        modulus = -tl.exp(tl.load(nu + mode, mask=real, other=0.0))
        phase = tl.exp(tl.load(theta + mode, mask=real, other=0.0))
        tl.store(logs + mode, tl.where(real, modulus, -1.0), mask=mode < m)
        tl.store(logs + m + mode, tl.where(real, phase, 0.0), mask=mode < m)
        scale = tl.exp(tl.load(gamma + mode, mask=real, other=0.0))[:, None]
        for start in range(0, p, CHANNELS):
            channel = start + tl.arange(0, CHANNELS)
            live = real[:, None] & (channel < p)[None, :]
            inside = (mode < m)[:, None] & (channel < p)[None, :]
            at = mode[:, None] * p + channel[None, :]
            re = scale * tl.load(b_re + at, mask=live, other=0.0)
            im = scale * tl.load(b_im + at, mask=live, other=0.0)
            tl.store(B + at, re.to(B.dtype.element_ty), mask=inside)
            tl.store(B + m * p + at, im.to(B.dtype.element_ty), mask=inside)
    else:
        row = (program - drivers) * MODES + tl.arange(0, MODES)
        for start in range(0, m, CHANNELS):
            mode = start + tl.arange(0, CHANNELS)
            live = (row < q)[:, None] & (mode < n)[None, :]
            inside = (row < q)[:, None] & (mode < m)[None, :]
            at, to = row[:, None] * n + mode[None, :], row[:, None] * (2 * m) + mode[None, :]
            tl.store(C + to, tl.load(c_re + at, mask=live, other=0.0).to(C.dtype.element_ty), mask=inside)
            tl.store(C + to + m, tl.load(c_im + at, mask=live, other=0.0).to(C.dtype.element_ty), mask=inside)


@launched
@triton.jit(do_not_specialize=["n", "m", "p", "q", "readers"])
def _backward(nu, theta, gamma, b_re, b_im, dlogs, dB, dC, dnu, dtheta, dgamma, db_re, db_im, dc_re, dc_im,
              n, m, p, q, readers, MODES: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    drivers = tl.num_programs(0) - readers
    if program < drivers:
        mode = program * MODES + tl.arange(0, MODES)
        real = mode < n
        nu_grad = -tl.load(dlogs + mode, mask=real, other=0.0) * tl.exp(tl.load(nu + mode, mask=real, other=0.0))
        phase = tl.exp(tl.load(theta + mode, mask=real, other=0.0))
        tl.store(dnu + mode, nu_grad, mask=real)
        tl.store(dtheta + mode, tl.load(dlogs + m + mode, mask=real, other=0.0) * phase, mask=real)
        scale = tl.exp(tl.load(gamma + mode, mask=real, other=0.0))[:, None]
        total = tl.zeros((MODES,), tl.float32)
        for start in range(0, p, CHANNELS):
            channel = start + tl.arange(0, CHANNELS)
            live = real[:, None] & (channel < p)[None, :]
            at = mode[:, None] * p + channel[None, :]
            re = scale * tl.load(dB + at, mask=live, other=0.0).to(tl.float32)
            im = scale * tl.load(dB + m * p + at, mask=live, other=0.0).to(tl.float32)
            tl.store(db_re + at, re, mask=live)
            tl.store(db_im + at, im, mask=live)
            total += tl.sum(re * tl.load(b_re + at, mask=live, other=0.0), 1)
            total += tl.sum(im * tl.load(b_im + at, mask=live, other=0.0), 1)
        tl.store(dgamma + mode, total, mask=real)
    else:
        row = (program - drivers) * MODES + tl.arange(0, MODES)
        for start in range(0, n, CHANNELS):
            mode = start + tl.arange(0, CHANNELS)
            live = (row < q)[:, None] & (mode < n)[None, :]
            to, at = row[:, None] * n + mode[None, :], row[:, None] * (2 * m) + mode[None, :]
            tl.store(dc_re + to, tl.load(dC + at, mask=live, other=0.0).to(tl.float32), mask=live)
            tl.store(dc_im + to, tl.load(dC + at + m, mask=live, other=0.0).to(tl.float32), mask=live)


class LRUSystem(torch.autograd.Function):
    """The system of a linear recurrent unit; C lies in memory as (q, 2, m), so that [h_re, h_im] needs no copy."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *parameters, dtype = given
        parameters = [tensor.contiguous() for tensor in parameters]
        (n, p), q = parameters[3].shape, parameters[5].shape[0]
        m = -(-n // 8) * 8
        device = parameters[0].device
        logs = torch.empty(2, m, device=device)
        B, C = torch.empty(2, m, p, device=device, dtype=dtype), torch.empty(q, 2, m, device=device, dtype=dtype)
        grid, readers = _grid(m, q)
        _forward[grid](*parameters, logs, B, C, n, m, p, q, readers, MODES=_MODES, CHANNELS=_CHANNELS)
        ctx.save_for_backward(*parameters[:5])
        ctx.sizes = (n, m, p, q)
        return logs, B, C.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, (n, m, p, q) = ctx.saved_tensors, ctx.sizes
        arriving = (grads[0].contiguous(), grads[1].contiguous(), grads[2].transpose(0, 1).contiguous())
        vectors = [torch.empty(n, device=saved[0].device) for _ in range(3)]
        matrices = [saved[0].new_empty(shape) for shape in ((n, p), (n, p), (q, n), (q, n))]
        grid, readers = _grid(m, q)
        _backward[grid](*saved, *arriving, *vectors, *matrices, n, m, p, q, readers, MODES=_MODES, CHANNELS=_CHANNELS)
        return (*vectors, *matrices, None)


def _grid(m: int, q: int) -> tuple[tuple[int], int]:
    readers = cdiv(q, _MODES)
    return (cdiv(m, _MODES) + readers,), readers
