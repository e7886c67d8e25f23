"""Hankel singular values: how much each state matters, independent of the basis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Inexact
from torch import Tensor

from compressm.control import validation
from compressm.control.balancing import Balancing, GramianPair, balance_factors, balance_sorted, hankel_values
from compressm.control.gramians import controllability_gramian, gramians, lyapunov_factor, observability_gramian
from compressm.control.linear_algebra import svdvals
from compressm.control.system import DenseSystem, DiagonalSystem, LinearSystem, require_system
from compressm.control.validation import PrecisionError


def hankel_singular_values(
    system: LinearSystem, *, P: Inexact[Tensor, "*bank n n"] | None = None
) -> Float[Tensor, "*bank n"]:
    """σ = sort↓ √spec(P Q), computed as the singular values of Loᴴ Lc; gradients have a closed form (`HankelValues`).

    `P`, a measured Gramian for instance, replaces the exact controllability Gramian.
    """
    require_system("hankel_singular_values", system)
    if P is None and isinstance(system, DenseSystem):
        return _dense_values(system)
    pair = gramian_pair(system, P)
    sigma = HankelValues.apply(pair.P, pair.Q, lambda states: balance_sorted(pair, states), lambda: hankel_values(pair))  # type: ignore[no-untyped-call]
    return (sigma * pair.sigma_scale).reshape(*system.bank, system.order)


def _dense_values(system: DenseSystem) -> Float[Tensor, "*bank n"]:
    """σ of a dense system, from factors found without its Gramians; only the gradient flows through the Gramians."""
    n = system.order
    Lc, Lo = (factor.reshape(-1, n, n) for factor in dense_factors(system.detach()))
    if not (system.requires_grad and torch.is_grad_enabled()):
        return svdvals(Lo.mH @ Lc).reshape(*system.bank, n)
    pair = (gramian.reshape(-1, n, n) for gramian in gramians(system))
    sigma = HankelValues.apply(*pair, lambda states: balance_factors(Lc, Lo, states), None)  # type: ignore[no-untyped-call]
    return sigma.reshape(*system.bank, n)


def dense_factors(system: DenseSystem) -> tuple[Inexact[Tensor, "*bank n n"], Inexact[Tensor, "*bank n n"]]:
    """Lc and Lo of a dense system, computed without its Gramians."""
    return lyapunov_factor(system.A, system.B), lyapunov_factor(system.A.mH, system.C.mH)


def gramian_pair(system: LinearSystem, P: Inexact[Tensor, "*bank n n"] | None) -> GramianPair:
    """The sorted pair of P (the given one, checked, or the exact one) and the exact Q; bank axes become one axis."""
    n = system.order
    if P is None and isinstance(system, DiagonalSystem):
        return GramianPair.of_system(system.flat())
    if P is None:
        P = controllability_gramian(system)
    else:
        P = validation.require_gramian("P", P, system.bank, n, system.device)
        if P.is_complex() and not system.is_complex:
            raise PrecisionError(f"P has dtype {P.dtype}, expected float64: the system is real")
    output_scale = system.scales(step=2)[1]
    system = system.divided(torch.ones_like(output_scale), output_scale)
    Q = observability_gramian(system)
    dtype = torch.promote_types(P.dtype, Q.dtype)
    source = system.flat() if isinstance(system, DiagonalSystem) else None
    pair = GramianPair.of(P.to(dtype).reshape(-1, n, n), Q.to(dtype).reshape(-1, n, n), source)
    return replace(pair, output_scale=pair.output_scale * output_scale.reshape(-1))


class HankelValues(torch.autograd.Function):
    """(P, Q) ↦ σ with dσᵢ = ½ (wᵢᴴ dP wᵢ + tᵢᴴ dQ tᵢ), t and w the columns of the balancing T and W.

    The caller's functions compute σ, T and W; P and Q only receive the gradient. Second derivatives raise an error.

    The derivative of an SVD divides by differences of σ and fails at ties; this form divides by none. In a cluster of
    equal σ it is exact for losses that treat them alike, such as a sum. Where σᵢ is rounding noise it is 0, a
    subgradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        P: Inexact[Tensor, "m n n"],
        Q: Inexact[Tensor, "m n n"],
        balance_onto: Callable[[Tensor], Balancing],
        values: Callable[[], Tensor] | None,
    ) -> Float[Tensor, "m n"]:
        if values is not None and not any(ctx.needs_input_grad):
            return values()
        result = balance_onto(torch.arange(P.shape[-1], device=P.device).expand(P.shape[:-1]))
        ctx.save_for_backward(result.left, result.right)
        return result.sigma

    @staticmethod
    def backward(ctx: Any, *grads: Float[Tensor, "m n"]) -> tuple[Tensor, Tensor, None, None]:
        if torch.is_grad_enabled():
            # T and W are saved as constants: a second derivative through them would be wrong.
            raise RuntimeError("Hankel singular values have first derivatives only: leave out create_graph=True")
        left, right = ctx.saved_tensors
        half = grads[0][..., None, :] / 2
        return (left * half) @ left.mH, (right * half) @ right.mH, None, None
