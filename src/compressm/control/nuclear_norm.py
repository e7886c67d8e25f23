"""The sum of the Hankel singular values as a differentiable penalty (app:hnn_det)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Inexact
from torch import Tensor

from compressm.control import validation
from compressm.control.errors import ControlError
from compressm.control.geometric_mean import geometric_mean
from compressm.control.hankel import hankel_singular_values
from compressm.control.parts import column_norms, row_norms
from compressm.control.poles import reciprocal_products
from compressm.control.system import DiagonalSystem, LinearSystem

# σ² is known to ε σ₁², so that below it σ and its directions are rounding noise.
_LEAST_FLOOR = 1e-6


def hankel_nuclear_norm(system: LinearSystem, *, floor: float = 0.0) -> Float[Tensor, "*bank"]:
    """Σσᵢ, the penalty of Hankel-nuclear-norm regularisation; finite gradients at ties and at zero.

    With a floor, from 1e-6 on, states of a diagonal system below floor·σ₁ count for less in value and gradient. That
    takes a tenth of the time where the Gramians are nearly singular, and products alone on a GPU.
    """
    if floor == 0:
        return hankel_singular_values(system).sum(-1)
    validation.require_kind("a floor", system, DiagonalSystem, hint="call diagonalise first")
    if not _LEAST_FLOOR <= floor < 1:
        raise ControlError(f"floor is {floor}, expected 0, or at least {_LEAST_FLOOR:g} and below 1")
    assert isinstance(system, DiagonalSystem)
    flat = system.flat()
    return FlooredNorm.apply(flat.poles, flat.B, flat.C, flat.decay.detach(), float(floor)).reshape(system.bank)  # type: ignore[no-untyped-call]


def hankel_nuclear_norm_majoriser(system: DiagonalSystem) -> Float[Tensor, "*bank"]:
    """Σᵢ √(Pᵢᵢ Qᵢᵢ) = Σᵢ ‖bᵢ‖ ‖cᵢ‖ / (1 − |λᵢ|²) ≥ Σσᵢ, in O(n(p + q)) and without a Gramian."""
    validation.require_kind("hankel_nuclear_norm_majoriser", system, DiagonalSystem, hint="call diagonalise first")
    return (row_norms(system.B) * column_norms(system.C) / system.decay).sum(-1)


class FlooredNorm(torch.autograd.Function):
    """(λ, B, C) ↦ Σσ with the gradient in closed form: that of P and Q by X⁻¹ and X, and on to λ, B and C.

    With V = 1/(1 − λᵢλ̄ⱼ), P = (B Bᴴ)∘V and Q = (Cᴴ C)∘V̄: g_B = (X⁻¹∘V̄) B, g_C = C (X∘V), and
    g_λ = (V̄∘(X⁻¹∘P̄ + X̄∘Q)) λ. All of it is found at once with the value, where a gradient is wanted. `decay` is
    1 − |λ|², which a system knows: in doubled precision it takes forty operations.
    """

    @staticmethod
    def forward(
        ctx: Any,
        poles: Inexact[Tensor, "m n"],
        B: Inexact[Tensor, "m n p"],
        C: Inexact[Tensor, "m q n"],
        decay: Float[Tensor, "m n"],
        floor: float,
    ) -> Float[Tensor, " m"]:
        # The scales of single modes are free: with Pᵢᵢ = Qᵢᵢ rounding is least.
        scale = _balanced_scale(B, C)
        B, C = B * scale[:, :, None], C / scale[:, None, :]
        weights, conjugates = reciprocal_products(poles, None, decay)
        P, Q = (B @ B.mH).mul_(weights), (C.mH @ C).mul_(conjugates)
        mean, inverse, trace = geometric_mean(P, Q, floor)
        if any(ctx.needs_input_grad):
            inward = (P.conj_physical_().mul_(inverse) + Q.mul_(mean.conj_physical())).mul_(conjugates)
            by_B, by_C = inverse.mul_(conjugates) @ B, C @ mean.mul_(weights)
            ctx.save_for_backward(
                (inward @ poles[..., None])[..., 0], by_B * scale[:, :, None], by_C / scale[:, None, :]
            )
        return trace

    @staticmethod
    def backward(ctx: Any, *grads: Float[Tensor, " m"]) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # What is saved is constant: a second derivative through it would be wrong.
            raise RuntimeError("the Hankel nuclear norm has first derivatives only: leave out create_graph=True")
        poles, B, C = ctx.saved_tensors
        weight = grads[0][:, None]
        return weight * poles, weight[..., None] * B, weight[..., None] * C, None, None


def _balanced_scale(B: Tensor, C: Tensor) -> Float[Tensor, "m n"]:
    """s with ‖s b‖ = ‖c/s‖ for every mode; 1 for modes that do nothing."""
    b, c = row_norms(B), column_norms(C)
    both = (b > 0) & (c > 0)
    return torch.where(both, torch.where(both, c, 1) / torch.where(both, b, 1), 1).sqrt()
