"""A whole training step of a block around a linear recurrent unit as one autograd function.

Norm, system, recurrence and gate are the functions of their own files; here they are called one after the other, and
their gradients are passed on by hand. Autograd then has one node a block instead of five, and nothing is checked or
chosen in between: on the host a block takes half as long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compressm.ops.block.gated_residual_triton import NarrowGatedResidual, WideGatedResidual
from compressm.ops.block.norm import RunningStatistics, leave_moments, moments_of
from compressm.ops.block.norm_triton import FusedBatchNorm
from compressm.ops.dispatch import full_precision, once_differentiable
from compressm.ops.lti.cost import FEW_STATES, NARROW
from compressm.ops.lti.layer_triton import ChunkedLayer, NarrowLayer
from compressm.ops.lti.lru_system_triton import LRUSystem
from compressm.ops.lti.scan_triton import DrivenRecurrence
from compressm.ops.memory import product_in


class BlockOptions(NamedTuple):
    """What a block's kernels need beside tensors; `narrow` is for few channels, `dtype` that of the products."""

    momentum: float | None
    eps: float
    rate: float
    dtype: torch.dtype
    narrow: bool
    measured: bool


def train_lru_block(
    x: Tensor,
    vectors: tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor],
    keep: Tensor | None,
    rate: float,
    running: RunningStatistics,
    eps: float,
    parameters: tuple[Tensor, ...],
    *,
    measured: bool,
) -> Tensor:
    """The output of a block; `vectors` are the norm's weight and bias, D, and the gate's weight and bias."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    # Narrow kernels count entries in 32 bits.
    narrow = x.shape[-1] <= NARROW and x.numel() < 2**31
    options = BlockOptions(running.momentum, eps, rate, dtype, narrow, measured and not narrow)
    given = (None if vector is None else vector.contiguous() for vector in vectors)
    out = LRUBlock.apply(x, *given, keep, moments_of(x), running[:3], options, *parameters)
    if not options.measured:
        return out
    leave_moments(*out)
    return out[0]


# The functions inside, whose contexts are stages here.
_NORM: Any = FusedBatchNorm
_SYSTEM: Any = LRUSystem
_FEW: Any = NarrowLayer
_MANY: Any = ChunkedLayer
_SCAN: Any = DrivenRecurrence
_NARROW_GATE: Any = NarrowGatedResidual
_WIDE_GATE: Any = WideGatedResidual


class Stage:
    """The context of one function inside another."""

    def __init__(self, *needs: bool) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: Any = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors; the function around saves them."""
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Gradients are passed on as they are."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """No gradient is passed to them."""


class LRUBlock(torch.autograd.Function):
    """x + dropout(GLU(dropout(GELU(LRU(batch_norm(x)))))), and moments of it for the next norm if `measured`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        D: Tensor,
        gate: Tensor,
        gate_bias: Tensor,
        keep: Tensor | None,
        moments: Tensor | None,
        running: tuple[Tensor, Tensor, Tensor],
        options: BlockOptions,
        *parameters: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        norm, system, layer, after = Stage(True), Stage(), Stage(True), Stage(*[True] * 4, False, *[True] * 3)
        with full_precision(x):
            given: Any = (x, weight, bias, D, *running, options.momentum, options.eps, moments)
            u, _, carrier, totals, drive, sums = _NORM.forward(norm, *given)
            ends: Any = (keep, options.rate, options.dtype)
            if options.narrow:
                logs, B, C = _SYSTEM.forward(system, *parameters, torch.float32)
                mixer, wide = (_FEW, u) if B.shape[1] <= FEW_STATES else (_MANY, u.float())
                y = mixer.forward(layer, wide, logs, B, C, None).to(u.dtype)
                out = _NARROW_GATE.forward(after, y, x, gate, gate_bias, u, D, carrier, None, *ends)
            else:
                logs, B, C = _SYSTEM.forward(system, *parameters, options.dtype)
                mixer = _SCAN
                h, _ = mixer.forward(layer, u, drive, sums, logs, B, None, True, False)
                y = (h.flatten(0, 1).flatten(1) @ C.transpose(0, 1).flatten(1).mT).view(x.shape).to(u.dtype)
                system.saved_tensors += (C, h)
                given = (y, x, gate, gate_bias, u, D, carrier, totals, *ends)
                out = _WIDE_GATE.forward(after, *given, options.measured)
        stages = (norm, system, layer, after)
        ctx.save_for_backward(*(tensor for stage in stages for tensor in stage.saved_tensors))
        ctx.counts = [len(stage.saved_tensors) for stage in stages]
        for stage in stages:
            stage.saved_tensors = ()
        ctx.stages, ctx.mixer, ctx.narrow = stages, mixer, options.narrow
        ctx.set_materialize_grads(False)
        if isinstance(out, tuple):
            ctx.mark_non_differentiable(out[1])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * len(ctx.needs_input_grad)
        stages: tuple[Any, ...] = ctx.stages
        norm, system, layer, after = stages
        saved = list(ctx.saved_tensors)
        for stage, count in zip(stages, ctx.counts, strict=True):
            stage.saved_tensors, saved = tuple(saved[:count]), saved[count:]
        arriving: Any
        with full_precision(dout):
            if ctx.narrow:
                dy, _, dgate, dgate_bias, _, dD, *_ = _NARROW_GATE.backward(after, dout)
                du, dlogs, dB, dC, _ = ctx.mixer.backward(layer, dy)
                arriving = (du.to(dy.dtype), dout, dy, None, None, None)
            else:
                dy, _, dgate, dgate_bias, _, dD, _, totals, *_ = _WIDE_GATE.backward(after, dout)
                *system.saved_tensors, C, h = system.saved_tensors
                rows, read = dy.flatten(0, 1).to(C.dtype), C.transpose(0, 1).flatten(1)
                dC = product_in(torch.float32, rows.mT, h.flatten(0, 1).flatten(1)).view(C.shape[1], 2, -1)
                dh = (rows @ read).view_as(h)
                _, drive, sums, dlogs, dB, *_ = ctx.mixer.backward(layer, dh, None)
                arriving, dC = (None, dout, dy, totals, drive, sums), dC.transpose(0, 1)
            dx, dweight, dbias, *_ = _NORM.backward(norm, *arriving)
            parameters = _SYSTEM.backward(system, dlogs, dB, dC)[:-1]
        for stage in stages:
            stage.saved_tensors = ()
        return dx, dweight, dbias, dD, dgate, dgate_bias, None, None, None, None, *parameters
