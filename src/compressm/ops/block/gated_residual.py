"""Ops after the recurrence in a residual block: activation, gate, dropout, residual."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import gelu

from compressm.ops.block.norm import Link, leave_moments
from compressm.ops.dispatch import (
    SequenceError,
    is_transformed,
    kernels_serve,
    once_differentiable,
    require_floats_on_one_device,
    require_shapes,
)
from compressm.ops.memory import MANY, packed_row, packed_weight, steps_a_row

_FORMS = ("none", "tanh")  # of the GELU, as torch calls them


def plain_gated_residual(
    y: Float[Tensor, "batch length width"],
    x: Float[Tensor, "batch length width"],
    weight: Float[Tensor, "twice width"],
    bias: Float[Tensor, " twice"],
    u: Float[Tensor, "batch length width"] | None,
    D: Float[Tensor, " width"] | None,
    link: Link | None,
    keep: Bool[Tensor, "2 rows length width"] | None,
    rate: float,
    *,
    tanh: bool = False,
) -> Float[Tensor, "batch length width"]:
    """x + k₂ ⊙ v ⊙ sigmoid(g) with (v, g) = W z + b, z = k₁ ⊙ gelu(y + D ⊙ u) and dropout k."""
    first, second = (None, None) if keep is None else keep
    y = with_skip(y, u, D, link)
    active = functional.gelu(y, approximate=_FORMS[tanh])
    value, gate = functional.linear(dropped(active, first, rate), weight, bias).chunk(2, dim=-1)
    # Half a row is too short to vectorise on a CPU: after a copy, the sigmoid and its gradient are faster.
    return (x + dropped(value * torch.sigmoid(gate.contiguous()), second, rate)).to(x.dtype)


def with_skip(
    y: Float[Tensor, "batch length width"],
    u: Float[Tensor, "batch length width"] | None,
    D: Float[Tensor, " width"] | None,
    link: Link | None,
) -> Float[Tensor, "batch length width"]:
    """y + D ⊙ u; the gradient of u goes to the link, if there is one."""
    if u is not None and D is not None:
        y = torch.addcmul(y, D.to(u.dtype), u if link is None else u.detach())
    return y if link is None else y + link.zeros()


def dropped(
    z: Float[Tensor, "batch length width"], keep: Bool[Tensor, "rows length width"] | None, rate: float
) -> Float[Tensor, "batch length width"]:
    """z / (1 − rate) where `keep` is true, 0 elsewhere."""
    if keep is None:
        return z
    return (z * factors(keep, rate, z.dtype)).to(z.dtype)


def factors(keep: Bool[Tensor, "*rest"], rate: float, dtype: torch.dtype) -> Float[Tensor, "*rest"]:
    """1 / (1 − rate) where `keep` is true, 0 elsewhere."""
    # In float32: 1 / 0.9 in bfloat16 would be off by 0.2 % everywhere.
    return keep.to(torch.promote_types(dtype, torch.float32)).mul_(1 / (1 - rate))


# Columns in a row that is combined with every step: 8 columns take twice as long as 16 such steps side by side.
_ROW = 128
# Adding one product to another takes up to six times as long if the columns are not a multiple of this.
_VECTOR = 16


class ExplicitGatedResidual(torch.autograd.Function):
    """x + k₂ ⊙ v ⊙ σ(g) with (v, g) = W z + b and z = k₁ ⊙ gelu(y); all in one dtype, k₁ and k₂ in `factors`.

    With d = k₂ ⊙ ∂L/∂out: ∂L/∂v = d ⊙ σ(g) and ∂L/∂g = d ⊙ v ⊙ σ(g) ⊙ (1 − σ(g)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Float[Tensor, "batch length width"],
        x: Float[Tensor, "batch length width"],
        weight: Float[Tensor, "twice width"],
        bias: Float[Tensor, " twice"],
        factors: Float[Tensor, "2 rows length width"] | None,
        tanh: bool = False,
    ) -> Float[Tensor, "batch length width"]:
        y, ctx.form = y.contiguous(), _FORMS[tanh]
        z = gelu(y, approximate=ctx.form)
        if factors is not None:
            z.mul_(factors[0])
        gated, opening = (_linear(z, *half) for half in zip(weight.chunk(2), bias.chunk(2), strict=True))
        gated.mul_(opening.sigmoid_())
        ctx.save_for_backward(y, weight, factors, z, opening, gated)
        return x + gated if factors is None else torch.addcmul(x, gated, factors[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Float[Tensor, "batch length width"]) -> tuple[Tensor | None, ...]:
        y, weight, factors, z, opening, gated = ctx.saved_tensors
        needs_y, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if not (needs_y or needs_weight or needs_bias):
            return None, dout, None, None, None, None
        dy = dweight = dbias = None
        halves = [half.view(-1, y.shape[2]) for half in _through_the_gate(dout, factors, opening, gated)]
        if needs_weight:
            rows = z.view(-1, y.shape[2])
            dweight = torch.cat([half.mT @ rows for half in halves])
        if needs_bias:
            dbias = torch.cat([half.sum(0) for half in halves])
        if needs_y:
            dz = _through_the_product(halves[0], halves[1], weight).view_as(y)
            dz = dz if factors is None else dz.mul_(factors[0])
            dy = torch.ops.aten.gelu_backward(dz, y, approximate=ctx.form)
        return dy, dout, dweight, dbias, None, None


def _linear(
    z: Float[Tensor, "batch length width"], weight: Float[Tensor, "width width"], bias: Float[Tensor, " width"]
) -> Float[Tensor, "batch length width"]:
    steps = steps_a_row(_ROW, len(bias), z.shape[0] * z.shape[1])
    product = z.view(-1, len(bias)) @ weight.mT
    return product.view(-1, steps * len(bias)).add_(packed_row(bias, steps)).view_as(z)


def _through_the_gate(
    dout: Float[Tensor, "batch length width"],
    factors: Float[Tensor, "2 rows length width"] | None,
    opening: Float[Tensor, "batch length width"],
    gated: Float[Tensor, "batch length width"],
) -> tuple[Float[Tensor, "batch lines columns"], Float[Tensor, "batch lines columns"]]:
    """∂L/∂v and ∂L/∂g; a gradient that is the same at every step, as after a mean over time, is never written out."""
    _, length, H = dout.shape
    steps = steps_a_row(_ROW, H, length)
    wide = (-1, length // steps, steps * H)
    opening, gated = opening.view(wide), gated.view(wide)
    d = packed_row(dout[:, :1], steps) if dout.stride(1) == 0 else dout.contiguous().view(wide)
    if factors is None:
        dv, dg = d * opening, d * gated
    else:
        d = d * factors[1].reshape(wide)
        dv, dg = d * opening, d.mul_(gated)
    return dv, dg.addcmul_(dg, opening, value=-1)


def _through_the_product(
    dv: Float[Tensor, "tokens width"], dg: Float[Tensor, "tokens width"], weight: Float[Tensor, "twice width"]
) -> Float[Tensor, "rows columns"]:
    """∂L/∂z = Wᵀ(∂L/∂v, ∂L/∂g)."""
    tokens, width = dv.shape
    steps = steps_a_row(_VECTOR, width, tokens) if tokens >= MANY else 1
    W_v, W_g = (packed_weight(half, steps) for half in weight.chunk(2))
    dv, dg = dv.view(-1, len(W_v)), dg.view(-1, len(W_g))
    return (dv @ W_v).addmm_(dg, W_g) if len(W_g) % _VECTOR == 0 else (dv @ W_v).add_(dg @ W_g)


# Up to this width the whole product fits into the registers of one program.
_NARROW = 32


def gated_residual(
    y: Float[Tensor, "batch length width"],
    x: Float[Tensor, "batch length width"],
    weight: Float[Tensor, "twice width"],
    bias: Float[Tensor, " twice"],
    *,
    u: Float[Tensor, "batch length width"] | None = None,
    D: Float[Tensor, " width"] | None = None,
    link: Link | None = None,
    keep: Bool[Tensor, "2 rows length width"] | None = None,
    rate: float = 0.0,
    measured: bool = False,
    tanh: bool = False,
) -> Float[Tensor, "batch length width"]:
    """x + k₂ ⊙ v ⊙ sigmoid(g) with (v, g) = W z + b and z = k₁ ⊙ gelu(y + D ⊙ u), in the dtype of x.

    k is keep / (1 − rate); one row of `keep` serves the whole batch. With `link` (`Normalised.link`) the gradient of
    D ⊙ u goes to the link instead of u. Under autocast the product has its dtype. If `measured`, moments may be
    attached to the result for a batch norm that reads it next (`moments_of`). With `tanh` the GELU is its
    approximation by tanh.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return plain_gated_residual(y, x, weight, bias, u, D, link, keep, rate, tanh=tanh)
    _check(y, x, weight, bias, u, D, link, keep, rate)
    if not kernels_serve(y):
        if not _on_cpu_in_one_dtype(y, x, weight, bias):
            return plain_gated_residual(y, x, weight, bias, u, D, link, keep, rate, tanh=tanh)
        scales = None if keep is None else factors(keep, rate, y.dtype)
        return ExplicitGatedResidual.apply(with_skip(y, u, D, link), x, weight, bias, scales, tanh)
    from compressm.ops.block.gated_residual_triton import NarrowGatedResidual, WideGatedResidual

    u = u if link is None or u is None else u.detach()
    # The narrow kernels count entries in 32 bits.
    narrow = y.shape[-1] <= _NARROW and y.numel() < 2**31
    bias, D = bias.contiguous(), None if D is None else D.contiguous()
    carrier, totals = (None, None) if link is None else link[1:]
    given = (y, x, weight, bias, u, D, carrier, totals, keep, rate, _working_dtype(y), tanh)
    if narrow or not measured:
        return (NarrowGatedResidual if narrow else WideGatedResidual).apply(*given)
    out, moments = WideGatedResidual.apply(*given, True)
    leave_moments(out, moments)
    return out


def _on_cpu_in_one_dtype(*tensors: Tensor) -> bool:
    """True if all tensors are on the CPU in float32, or all in float64, and autocast does not narrow them."""
    return (
        all(tensor.device.type == "cpu" for tensor in tensors)
        and {tensor.dtype for tensor in tensors} in ({torch.float32}, {torch.float64})
        and not torch.is_autocast_enabled("cpu")
    )


def _working_dtype(y: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else y.dtype


def _check(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    u: Tensor | None,
    D: Tensor | None,
    link: Link | None,
    keep: Tensor | None,
    rate: float,
) -> None:
    sequence = ("batch", "length", "width")
    twice = 2 * require_shapes(y=(y, sequence))["width"]
    sizes = require_shapes(
        y=(y, sequence),
        x=(x, sequence),
        weight=(weight, (twice, "width")),
        bias=(bias, (twice,)),
        u=(u, sequence),
        D=(D, ("width",)),
        link=(None if link is None else link.carrier, sequence),
        keep=(keep, (2, "rows", "length", "width")),
    )
    require_floats_on_one_device(y=y, x=x, weight=weight, bias=bias, u=u, D=D)
    if (u is None) != (D is None):
        raise SequenceError(f"{'u' if u is None else 'D'} is None, expected both u and D, or neither")
    if keep is None:
        return
    if keep.dtype != torch.bool or keep.device != y.device:
        raise SequenceError(f"keep is {keep.dtype} on {keep.device}, expected torch.bool on {y.device}")
    if sizes["rows"] not in (1, sizes["batch"]):
        raise SequenceError(f"keep has {sizes['rows']} rows, expected 1 or batch = {sizes['batch']}")
    if not 0 <= rate < 1:
        raise SequenceError(f"rate is {rate}, expected a number from 0 to below 1")


def dropped_residual(
    x: Float[Tensor, "batch length width"],
    y: Float[Tensor, "batch length width"],
    keep: Bool[Tensor, "rows length width"] | None,
    rate: float,
) -> Float[Tensor, "batch length width"]:
    """x + y / (1 − rate) where `keep` is true, x elsewhere, in the dtype of x; `keep` has 1 or batch rows."""
    if keep is None:
        return x + y.to(x.dtype)
    if not kernels_serve(x) or not kernels_serve(y):
        return x + dropped(y, keep, rate).to(x.dtype)
    from compressm.ops.block.gated_residual_triton import DroppedResidual

    return DroppedResidual.apply(x, y, keep, rate)
