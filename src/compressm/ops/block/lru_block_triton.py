"""A whole training step of a block around a linear recurrent unit as one autograd function.

Norm, system, recurrence and gate are the functions of their own files; here they are called one after the other, and
their gradients are passed on by hand. Autograd then has one node a block instead of five, and nothing is checked or
chosen in between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compressm.ops.block.gated_residual_triton import NarrowGatedResidual, flags_of, gate_gradient, wide_gate
from compressm.ops.block.norm import RunningStatistics, leave_moments, moments_of
from compressm.ops.block.norm_triton import norm_gradient, normalise
from compressm.ops.dispatch import full_precision, once_differentiable
from compressm.ops.lti.cost import NARROW
from compressm.ops.lti.layer_triton import ChunkedLayer
from compressm.ops.lti.lru_system_triton import system_gradient, system_of
from compressm.ops.lti.scan_triton import Walk, compile_walks, drive_gradient
from compressm.ops.memory import product_in
from compressm.ops.sums_triton import column_sums


class BlockOptions(NamedTuple):
    """The options of a block's kernels: `dtype` of products, `through` of `normalise`, `tanh` of the GELU."""

    momentum: float | None
    eps: float
    rate: float
    dtype: torch.dtype
    measured: bool
    through: bool | None = None
    tanh: bool = False


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
    through: bool | None = None,
    tanh: bool = False,
) -> Tensor:
    """The output of a block; `vectors` are the norm's weight and bias, D, and the gate's weight and bias."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    # Narrow kernels count entries in 32 bits.
    if x.shape[-1] <= NARROW and x.numel() < 2**31:
        options = BlockOptions(running.momentum, eps, rate, dtype, False, through, tanh)
        return NarrowBlock.apply(x, *vectors, keep, running[:3], options, *parameters)
    options = BlockOptions(running.momentum, eps, rate, dtype, measured, through, tanh)
    out = WideBlock.apply(x, *vectors, keep, moments_of(x), running[:3], options, *parameters)
    if not measured:
        return out
    leave_moments(*out)
    return out[0]


def _dense(tensors: tuple[Tensor | None, ...]) -> list[Any]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


class WideKept(NamedTuple):
    """The tensors for the gradient of a wide block; `rows` is u, and `cast` the gate, for products."""

    statistics: Tensor
    u: Tensor
    rows: Tensor
    logs: Tensor
    B: Tensor
    C: Tensor
    h: Tensor
    y: Tensor
    cast: Tensor
    z: Tensor
    vg: Tensor


def wide_forward(
    x: Tensor,
    vectors: tuple[Any, ...],
    keep: Tensor | None,
    moments: Tensor | None,
    running: tuple[Tensor, Tensor, Tensor],
    options: BlockOptions,
    parameters: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor | None, WideKept, Walk]:
    """The output of a wide block and its moments, with what the gradient needs; all tensors are dense."""
    dtype, (batch, length, H) = options.dtype, x.shape
    weight, bias, D, gate, gate_bias = vectors
    compile_walks(dtype, torch.float32, x.device, -1, False, False, True, True)
    with full_precision(x):
        u, statistics = normalise(
            x, weight, bias, running, options.momentum, options.eps, moments, through=options.through
        )
        logs, B, C = system_of(list(parameters), dtype)
        rows = u.view(-1, H).to(dtype)
        drive = (rows @ B.mT).view(batch, length, 2, -1)
        # The conjugates of h: Re(C h) = [C_re, C_im] · [h̄_re, h̄_im].
        walk = Walk(drive, logs, flip=-1)
        h = walk.forward(drive, None, keep_last=False)[0]
        y = (h.view(len(rows), -1) @ C.mT).view(batch, length, H).to(x.dtype)
        cast, flags = gate.to(dtype), flags_of(keep, options.rate, len(rows))
        out, z, vg, left = wide_gate(y, x, cast, gate_bias, u, D, flags, options.measured, options.tanh)
    return out, left, WideKept(statistics, u, rows, logs, B, C, h, y, cast, z, vg), walk


def wide_backward(
    dout: Tensor,
    x: Tensor,
    vectors: tuple[Any, ...],
    keep: Tensor | None,
    rate: float,
    kept: WideKept,
    walk: Walk,
    parameters: tuple[Tensor, ...],
    *,
    tanh: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, of the vectors and of the seven parameters, the first five of which are given."""
    weight, bias, D, gate, gate_bias = vectors
    statistics, u, rows, _, B, C, h, y, cast, z, vg = kept
    H = x.shape[-1]
    with full_precision(dout):
        flags = flags_of(keep, rate, len(rows))
        dvg, dy, _, partial = gate_gradient(dout, y, cast, gate_bias, u, D, flags, z, vg, tanh=tanh)
        assert dy is not None
        dgate = product_in(gate.dtype, dvg.mT, z)
        # Σ over steps of ∂L/∂(v, g), of dy, and of dy ⊙ u.
        dgate_bias, link = column_sums(partial).split_with_sizes([2 * H, 2 * H])
        read, states = dy.view(-1, H).to(C.dtype), h.view(len(rows), -1)
        dC, dh = product_in(torch.float32, read.mT, states), (read @ C).view_as(h)
        g, dlogs, _, sums = walk.backward(dh, h, None, None, summed=True)
        assert sums is not None
        du, dB, drive = drive_gradient(g.view(len(rows), -1), sums, rows, B)
        du = du.view_as(x).to(x.dtype)
        dx, total = norm_gradient(du, dy, dout, (link, drive), x, weight, bias, D, statistics)
        pulled = system_gradient(parameters, H, dlogs, dB, dC)
    dbias, dweight = total.unbind(0)
    return (
        *(dx, None if weight is None else dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype)),
        *(link[H:].to(D.dtype), dgate, dgate_bias.to(gate_bias.dtype), *pulled),
    )


class WideBlock(torch.autograd.Function):
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
        x, weight, bias, D, gate_bias, *own = _dense((x, weight, bias, D, gate_bias, *parameters))
        vectors = (weight, bias, D, gate, gate_bias)
        out, left, kept, ctx.walk = wide_forward(x, vectors, keep, moments, running, options, tuple(own))
        ctx.save_for_backward(x, weight, bias, D, gate, gate_bias, keep, *own[:5], *kept)
        ctx.rate, ctx.tanh = options.rate, options.tanh
        ctx.set_materialize_grads(False)
        if left is None:
            return out
        ctx.mark_non_differentiable(left)
        return out, left

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        (x, *vectors, keep), own, kept = saved[:7], saved[7:12], WideKept(*saved[12:])
        found = wide_backward(dout, x, tuple(vectors), keep, ctx.rate, kept, ctx.walk, own, tanh=ctx.tanh)
        return *found[:6], None, None, None, None, *found[6:]


# The function inside, whose context is a stage here.
_GATE: Any = NarrowGatedResidual


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


def layer_stage() -> Any:
    """The stage of the recurrence of few channels."""
    return Stage(True)


def gate_stage() -> Any:
    """The stage of the gate of few channels; u gets its gradient as a link."""
    return Stage(*[True] * 4, False, *[True] * 3)


def mixed(layer: Stage, u: Tensor, parameters: tuple[Tensor, ...]) -> Tensor:
    """The output of the recurrence for few channels."""
    return ChunkedLayer.outputs(layer, u, *system_of(list(parameters), torch.float32), None)


def narrow_forward(
    x: Tensor,
    vectors: tuple[Any, ...],
    keep: Tensor | None,
    running: tuple[Tensor, Tensor, Tensor],
    options: BlockOptions,
    parameters: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Any, Any]:
    """The output of a narrow block, its statistics, and the stages of layer and gate."""
    weight, bias, D, gate, gate_bias = vectors
    layer, after = layer_stage(), gate_stage()
    with full_precision(x):
        u, statistics = normalise(
            x, weight, bias, running, options.momentum, options.eps, None, through=options.through
        )
        y = mixed(layer, u, parameters)
        ends = (None, None, keep, options.rate, options.dtype, options.tanh)
        out = _GATE.forward(after, y, x, gate, gate_bias, u, D, *ends)
    return out, statistics, layer, after


def narrow_backward(
    dout: Tensor,
    x: Tensor,
    vectors: tuple[Any, ...],
    statistics: Tensor,
    layer: Any,
    after: Any,
    parameters: tuple[Tensor, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients of x, of the vectors and of the seven parameters, the first five of which are given."""
    weight, bias, D, *_ = vectors
    with full_precision(dout):
        dy, _, dgate, dgate_bias, _, dD, *_ = _GATE.backward(after, dout)
        du, dlogs, dB, dC, _ = ChunkedLayer.gradients(layer, dy)
        dx, sums = norm_gradient(du, dy, dout, None, x, weight, bias, D, statistics)
        pulled = system_gradient(parameters, x.shape[-1], dlogs, dB, dC)
    dbias, dweight = sums.unbind(0)
    return (
        *(dx, None if weight is None else dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype)),
        *(dD, dgate, dgate_bias, *pulled),
    )


class NarrowBlock(torch.autograd.Function):
    """The same for few channels."""

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
        running: tuple[Tensor, Tensor, Tensor],
        options: BlockOptions,
        *parameters: Tensor,
    ) -> Tensor:
        x, weight, bias, D, gate, gate_bias, *own = _dense((x, weight, bias, D, gate, gate_bias, *parameters))
        vectors = (weight, bias, D, gate, gate_bias)
        out, statistics, layer, after = narrow_forward(x, vectors, keep, running, options, tuple(own))
        ctx.save_for_backward(x, weight, bias, D, statistics, *own[:5], *layer.saved_tensors, *after.saved_tensors)
        ctx.layer, ctx.after, ctx.split = layer, after, 10 + len(layer.saved_tensors)
        # The function around holds them.
        layer.saved_tensors = after.saved_tensors = ()
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        x, weight, bias, D, statistics, *own = saved[:10]
        layer, after = ctx.layer, ctx.after
        layer.saved_tensors, after.saved_tensors = saved[10 : ctx.split], saved[ctx.split :]
        found = narrow_backward(dout, x, (weight, bias, D), statistics, layer, after, tuple(own))
        layer.saved_tensors = after.saved_tensors = ()
        return *found[:6], None, None, None, *found[6:]
