"""A whole Mamba layer on sequences as one autograd function on a GPU.

Convolution, scan and gate are the functions of their own files; the four projections and their gradients are matrix
products here. Autograd has one node a layer instead of about thirty, weights are cast once, and nothing is checked or
chosen in between: on the host a layer takes half as long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressm.ops.block.lru_block_triton import Stage
from compressm.ops.dispatch import full_precision, once_differentiable
from compressm.ops.launching_triton import Planned, kinds_of, launched, plan_of
from compressm.ops.memory import cdiv, product_in
from compressm.ops.selective.conv_and_gate_triton import CausalConv, Gate, conv_gradient, gate_gradient
from compressm.ops.selective.gpu import Scan

_CONV: Any = CausalConv
_SCAN: Any = Scan
_GATE: Any = Gate


class MixerWeights(NamedTuple):
    """The parameters of a Mamba layer, under their names there; biases of projections may be None."""

    in_proj: Tensor
    in_bias: Tensor | None
    conv: Tensor
    conv_bias: Tensor | None
    x_proj: Tensor
    dt_proj: Tensor
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor
    out_proj: Tensor
    out_bias: Tensor | None


def mix(x: Tensor, weights: MixerWeights, *, keep_state: bool) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The outputs, and with `keep_state` the last inputs of the convolution (batch, past, inner) and the states."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    out, before, last = MambaMixer.apply(x, dtype, (keep_state, torch.is_grad_enabled()), *weights)
    return out, (before, last) if keep_state else None


class Kept(NamedTuple):
    """The tensors for a layer's gradient: inputs and weights for products, and what they gave."""

    rows: Tensor
    vz: Tensor
    u: Tensor
    chosen: Tensor
    g: Tensor
    A: Tensor
    in_proj: Tensor
    x_proj: Tensor
    dt_proj: Tensor
    out_proj: Tensor


def stages() -> tuple[Any, Any, Any]:
    """The stages of convolution, scan and gate."""
    return Stage(True), Stage(True), Stage(True)


def prepared(x: Tensor, weights: MixerWeights, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The rows of x, the rates, and the weights of the four projections, for products in `dtype`."""
    given = (weights.in_proj, weights.x_proj, weights.dt_proj, weights.out_proj)
    casts, A = cast_weights(given, weights.A_log, dtype)
    return x.reshape(-1, x.shape[-1]).to(dtype), A, casts


def mixer_forward(
    x: Tensor, dtype: torch.dtype, wanted: tuple[bool, bool], weights: MixerWeights, memory: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None, Kept, tuple[Any, Any, Any]]:
    """The output, last inputs of the convolution and states if wanted, and what the gradient needs."""
    conv, scan, gate = parts = stages()
    batch, length, _ = x.shape
    inner, past, rank = weights.D.shape[0], weights.conv.shape[-1] - 1, weights.dt_proj.shape[1]
    n = (weights.x_proj.shape[0] - rank) // 2
    with full_precision(x):
        rows, A, (w_in, w_x, w_dt, w_out) = prepared(x, weights, dtype)
        vz = _product(rows, w_in, weights.in_bias).view(batch, length, 2 * inner)
        v, z = vz[..., :inner], vz[..., inner:]
        u = _CONV.forward(conv, v, weights.conv, weights.conv_bias)
        chosen = (u.view(-1, inner) @ w_x.mT).view(batch, length, -1)
        delta = (chosen.view(-1, rank + 2 * n)[:, :rank] @ w_dt.mT).view(batch, length, inner)
        rest = (A, *chosen[..., rank:].split_with_sizes([n, n], dim=-1), weights.D, None, None, True, wanted, memory)
        y, last = _SCAN.forward(scan, u, delta, weights.dt_bias, None, *rest)
        g = _GATE.forward(gate, y, z)
        out = _product(g.view(-1, inner), w_out, weights.out_bias).view(batch, length, -1)
    before = v[:, max(0, length - past) :].clone() if wanted[0] else None
    return out, before, last, Kept(rows, vz, u, chosen, g, A, w_in, w_x, w_dt, w_out), parts


def mixer_backward(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None], kept: Kept, parts: tuple[Any, Any, Any], kinds: Kinds
) -> tuple[Tensor | None, ...]:
    """The gradients of x and of all weights."""
    rows, vz, u, chosen, g, A, w_in, w_x, w_dt, w_out = kept
    batch, length, inner = u.shape
    (conv, scan, gate), (dout, dbefore, dlast), rank = parts, grads, w_dt.shape[1]
    with full_precision(rows):
        dout = rows.new_zeros(rows.shape[0], w_out.shape[0]) if dout is None else dout.to(rows.dtype)
        dout = dout.reshape(-1, w_out.shape[0])
        dw_out = product_in(kinds.out_proj, dout.mT, g.view(-1, inner))
        dvz = torch.empty_like(vz)
        dv, dz = dvz[..., :inner], dvz[..., inner:]
        y, z = gate.saved_tensors
        dy = gate_gradient((dout @ w_out).view(batch, length, inner), y, z, dz)
        du, ddelta, dbias, _, dA, dB, dC, dD, *_ = _SCAN.backward(scan, dy, dlast)
        ddelta, dt = ddelta.view(-1, inner), chosen.view(-1, chosen.shape[-1])[:, :rank]
        dw_dt = product_in(kinds.dt_proj, ddelta.mT, dt)
        dchosen = torch.empty_like(chosen).view(-1, chosen.shape[-1])
        torch.mm(ddelta, w_dt, out=dchosen[:, :rank])
        torch.cat([dB, dC], dim=-1, out=dchosen[:, rank:].view(batch, length, -1))
        dw_x = product_in(kinds.x_proj, dchosen.mT, u.view(-1, inner))
        du = du.view(-1, inner).addmm_(dchosen, w_x).view(batch, length, inner)
        v, weight, bias = conv.saved_tensors
        dconv, dconv_bias = conv_gradient(du, v, weight, bias, dv)
        if dbefore is not None:
            dvz[:, length - dbefore.shape[1] :, :inner] += dbefore
        dvz = dvz.view(-1, 2 * inner)
        dw_in, dx = product_in(kinds.in_proj, dvz.mT, rows), dvz @ w_in
    in_bias, out_bias = (
        None if kind is None else total.sum(0, dtype=torch.float32).to(kind)
        for kind, total in ((kinds.in_bias, dvz), (kinds.out_bias, dout))
    )
    dA_log = (dA * A).to(kinds.A_log)
    return (
        *(dx.view(batch, length, -1).to(kinds.x), dw_in, in_bias, dconv, dconv_bias, dw_x, dw_dt),
        *(dbias, dA_log, dD, dw_out, out_bias),
    )


class MambaMixer(torch.autograd.Function):
    """out_proj((Re(C h) + D u) ⊙ silu(z)), and the last inputs of the convolution and states if wanted."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, wanted: tuple[bool, bool], *given: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        weights = MixerWeights(*given)
        out, before, last, kept, parts = mixer_forward(x, dtype, wanted, weights)
        ctx.save_for_backward(*kept, *(tensor for part in parts for tensor in part.saved_tensors))
        ctx.counts = [len(part.saved_tensors) for part in parts]
        for part in parts:
            part.saved_tensors = ()
        ctx.parts, ctx.kinds = parts, learned_kinds(x, weights)
        ctx.set_materialize_grads(False)
        return out, before, last

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: Tensor | None, dbefore: Tensor | None, dlast: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        kept, saved = Kept(*saved[: len(Kept._fields)]), saved[len(Kept._fields) :]
        for part, count in zip(ctx.parts, ctx.counts, strict=True):
            part.saved_tensors, saved = tuple(saved[:count]), saved[count:]
        dx, *found = mixer_backward((dout, dbefore, dlast), kept, ctx.parts, ctx.kinds)
        for part in ctx.parts:
            part.saved_tensors = ()
        return dx, None, None, *found


@launched
@triton.jit(do_not_specialize=["first", "second", "third", "fourth", "rates"])
def _cast(
    w_in, w_x, w_dt, w_out, A_log, to_in, to_x, to_dt, to_out, A, first, second, third, fourth, rates,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy four matrices in another dtype and write −exp(A_log); each program takes a block of one of them."""
    block, at = tl.program_id(0), tl.arange(0, BLOCK)
    if block < tl.cdiv(first, BLOCK):
        _copy(w_in, to_in, block * BLOCK + at, first)
    block -= tl.cdiv(first, BLOCK)
    if (block >= 0) & (block < tl.cdiv(second, BLOCK)):
        _copy(w_x, to_x, block * BLOCK + at, second)
    block -= tl.cdiv(second, BLOCK)
    if (block >= 0) & (block < tl.cdiv(third, BLOCK)):
        _copy(w_dt, to_dt, block * BLOCK + at, third)
    block -= tl.cdiv(third, BLOCK)
    if (block >= 0) & (block < tl.cdiv(fourth, BLOCK)):
        _copy(w_out, to_out, block * BLOCK + at, fourth)
    block -= tl.cdiv(fourth, BLOCK)
    if block >= 0:
        place = block * BLOCK + at
        value = tl.load(A_log + place, mask=place < rates, other=0.0).to(tl.float32)
        tl.store(A + place, -tl.exp(value), mask=place < rates)


@triton.jit
def _copy(source, target, at, count):
    value = tl.load(source + at, mask=at < count, other=0.0)
    tl.store(target + at, value.to(target.dtype.element_ty), mask=at < count)


_BLOCK = 2048  # numbers that a program casts


def cast_weights(given: tuple[Tensor, ...], A_log: Tensor, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor]:
    """Four matrices in `dtype`, and the rates −exp(A_log) in float32, by one kernel if there is anything to cast."""
    if all(weight.dtype is dtype for weight in given):
        return given, -torch.exp(A_log.float())
    given, A_log = tuple([weight.contiguous() for weight in given]), A_log.contiguous()
    cast = tuple([torch.empty_like(weight, dtype=dtype) for weight in given])
    A = torch.empty_like(A_log, dtype=torch.float32)
    counts = tuple([weight.numel() for weight in (*given, A_log)])
    _cast_plan(counts, dtype, kinds_of(*given, A_log), A.device)(*given, A_log, *cast, A)
    return cast, A


@plan_of
def _cast_plan(counts: tuple[int, ...], dtype: torch.dtype, kinds: tuple[Any, ...], device: torch.device) -> Planned:
    grid = (sum(cdiv(count, _BLOCK) for count in counts),)
    return Planned(_cast, grid, *counts, BLOCK=_BLOCK, num_warps=4)


class Kinds(NamedTuple):
    """The dtypes of what gets a gradient."""

    x: torch.dtype
    in_proj: torch.dtype
    in_bias: torch.dtype | None
    x_proj: torch.dtype
    dt_proj: torch.dtype
    A_log: torch.dtype
    out_proj: torch.dtype
    out_bias: torch.dtype | None


def learned_kinds(x: Tensor, weights: MixerWeights) -> Kinds:
    """The dtypes of x and of the weights."""
    held = (getattr(weights, name) for name in Kinds._fields[1:])
    kinds: list[Any] = [None if weight is None else weight.dtype for weight in held]
    return Kinds(x.dtype, *kinds)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows @ weight.mT if bias is None else torch.addmm(bias.to(rows.dtype), rows, weight.mT)
