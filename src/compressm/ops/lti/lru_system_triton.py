"""The system of a linear recurrent unit in one GPU kernel, and the gradients of its seven parameters in another."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressm.ops.dispatch import once_differentiable
from compressm.ops.launching_triton import Planned, kinds_of, launched, plan_of
from compressm.ops.memory import cdiv, next_power_of_2

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
@triton.jit(do_not_specialize=["n", "m", "p", "q", "readers", "sums"])
def _backward(nu, theta, gamma, b_re, b_im, dlogs, dB, dC, dnu, dtheta, dgamma, db_re, db_im, dc_re, dc_im,
              n, m, p, q, readers, sums, MODES: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    drivers = tl.num_programs(0) - readers
    if program < drivers:
        mode = program * MODES + tl.arange(0, MODES)
        real = mode < n
        of_modulus, of_phase = tl.zeros((ROWS, MODES), tl.float32), tl.zeros((ROWS, MODES), tl.float32)
        for start in range(0, sums, ROWS):
            row = start + tl.arange(0, ROWS)[:, None]
            at, live = dlogs + row * (2 * m) + mode[None, :], (row < sums) & real[None, :]
            of_modulus += tl.load(at, mask=live, other=0.0)
            of_phase += tl.load(at + m, mask=live, other=0.0)
        decay = tl.exp(tl.load(nu + mode, mask=real, other=0.0))
        phase = tl.exp(tl.load(theta + mode, mask=real, other=0.0))
        tl.store(dnu + mode, -tl.sum(of_modulus, 0) * decay, mask=real)
        tl.store(dtheta + mode, tl.sum(of_phase, 0) * phase, mask=real)
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


def system_of(parameters: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Poles (2, m), B (2m, p) and C (q, 2m), for dense parameters in float32."""
    (n, p), q, device = parameters[3].shape, parameters[5].shape[0], parameters[0].device
    plan = _plan(n, p, q, dtype, kinds_of(parameters[0]), device)
    logs = torch.empty(2, plan.m, device=device)
    B, C = (
        torch.empty(2 * plan.m, p, device=device, dtype=dtype),
        torch.empty(q, 2 * plan.m, device=device, dtype=dtype),
    )
    plan.forward(*parameters, logs, B, C)
    return logs, B, C


def system_gradient(
    parameters: tuple[Tensor, ...], q: int, dlogs: Tensor, dB: Tensor, dC: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of all seven parameters, in one piece of memory; the first five are given.

    Those that arrive are dense, in the shapes that `system_of` gives; that of the poles may be in parts, to be summed.
    """
    (n, p), device = parameters[3].shape, dlogs.device
    plan = _plan(n, p, q, torch.float32, kinds_of(dlogs, dB, dC), device, dlogs.numel() // (2 * _padded(n)))
    # Every part begins at a multiple of 16 bytes.
    parts = torch.empty(plan.size, dtype=torch.float32, device=device).split_with_sizes(plan.parts)
    found = [part[:n] if plan.padded[0] else part for part in parts[:3]]
    matrices = [part[: n * p] if plan.padded[1] else part for part in parts[3:5]]
    found += [part.view(n, p) for part in matrices]
    matrices = [part[: n * q] if plan.padded[2] else part for part in parts[5:]]
    found += [part.view(q, n) for part in matrices]
    plan.backward(*parameters, dlogs, dB, dC, *found)
    return tuple(found)


class _Plan(NamedTuple):
    """The kernels of both passes, the padded order, and the memory of the gradients."""

    forward: Planned
    backward: Planned
    m: int
    size: int
    parts: list[int]
    padded: list[bool]


def _padded(n: int) -> int:
    return -(-n // 8) * 8


@plan_of
def _plan(
    n: int, p: int, q: int, dtype: torch.dtype, kinds: tuple[Any, ...], device: torch.device, sums: int = 1
) -> _Plan:
    m, readers = _padded(n), cdiv(q, _MODES)
    given = ((cdiv(m, _MODES) + readers,), n, m, p, q, readers)
    forward = Planned(_forward, *given, MODES=_MODES, CHANNELS=_CHANNELS)
    rows = min(64, next_power_of_2(sums))
    backward = Planned(_backward, *given, sums, MODES=_MODES, CHANNELS=_CHANNELS, ROWS=rows)
    sizes = (n, n * p, n * q)
    vector, drive, readout = (-(-size // 4) * 4 for size in sizes)
    parts = [vector] * 3 + [drive] * 2 + [readout] * 2
    return _Plan(forward, backward, m, sum(parts), parts, [size % 4 > 0 for size in sizes])


class LRUSystem(torch.autograd.Function):
    """The system of a linear recurrent unit; C lies in memory as (q, 2, m), so that [h_re, h_im] needs no copy."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *parameters, dtype = given
        parameters = [tensor.contiguous() for tensor in parameters]
        logs, B, C = system_of(parameters, dtype)
        ctx.save_for_backward(*parameters[:5])
        ctx.q = len(C)
        return logs, B.view(2, -1, B.shape[1]), C.view(len(C), 2, -1).transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        arriving = (grads[0].contiguous(), grads[1].contiguous(), grads[2].transpose(0, 1).contiguous())
        return *system_gradient(ctx.saved_tensors, ctx.q, *arriving), None
