"""The gated residual on a CPU with its gradient written out: autograd copied the halves of the product four times."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu

from compressm.ops.packed import MANY, packed_row, packed_weight, steps_a_row

# Columns of a row that meets every step: of 8 it takes twice as long as of 16 steps side by side.
_ROW = 128
# A product that is added to another takes up to six times as long where its columns are no multiple of this.
_VECTOR = 16


class ExplicitGatedResidual(torch.autograd.Function):
    """x + k₂ ⊙ v ⊙ σ(g) with (v, g) = W z + b and z = k₁ ⊙ gelu(y); everything of one dtype, k₁ and k₂ in `factors`.

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
    ) -> Float[Tensor, "batch length width"]:
        y = y.contiguous()
        z = gelu(y)
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
        needs_y, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if not (needs_y or needs_weight or needs_bias):
            return None, dout, None, None, None
        dy = dweight = dbias = None
        halves = [half.view(-1, y.shape[2]) for half in _through_the_gate(dout, factors, opening, gated)]
        if needs_weight:
            rows = z.view(-1, y.shape[2])
            dweight = torch.cat([half.mT @ rows for half in halves])
        if needs_bias:
            dbias = torch.cat([half.sum(0) for half in halves])
        if needs_y:
            dz = _through_the_product(halves[0], halves[1], weight).view_as(y)
            dy = torch.ops.aten.gelu_backward(dz if factors is None else dz.mul_(factors[0]), y)
        return dy, dout, dweight, dbias, None


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
    """∂L/∂v and ∂L/∂g; a gradient that is the same at every step of a sequence, a mean's, is never written out."""
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
    """Wᵀ(∂L/∂v, ∂L/∂g)."""
    tokens, width = dv.shape
    steps = steps_a_row(_VECTOR, width, tokens) if tokens >= MANY else 1
    W_v, W_g = (packed_weight(half, steps) for half in weight.chunk(2))
    dv, dg = dv.view(-1, len(W_v)), dg.view(-1, len(W_g))
    return (dv @ W_v).addmm_(dg, W_g) if len(W_g) % _VECTOR == 0 else (dv @ W_v).add_(dg @ W_g)
