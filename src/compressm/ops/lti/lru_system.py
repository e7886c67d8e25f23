"""The parameters of a linear recurrent unit as a system: λ = exp(−exp(ν) + i exp(θ)), B scaled by γ."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from compressm.ops.dispatch import kernels_serve
from compressm.ops.lti.states import raised


def plain_system(
    nu_log: Float[Tensor, " n"],
    theta_log: Float[Tensor, " n"],
    gamma_log: Float[Tensor, " n"],
    B_re: Float[Tensor, "n p"],
    B_im: Float[Tensor, "n p"],
    C_re: Float[Tensor, "q n"],
    C_im: Float[Tensor, "q n"],
) -> tuple[Float[Tensor, "2 n"], Float[Tensor, "2 n p"], Float[Tensor, "2 q n"]]:
    """Return (log |λ|, arg λ), γ B and C as pairs, in float32 or better."""
    nu_log, theta_log, gamma_log, B_re, B_im, C_re, C_im = map(
        raised, (nu_log, theta_log, gamma_log, B_re, B_im, C_re, C_im)
    )
    gamma = torch.exp(gamma_log)[:, None]
    poles = torch.stack([-torch.exp(nu_log), torch.exp(theta_log)])
    return poles, torch.stack([gamma * B_re, gamma * B_im]), torch.stack([C_re, C_im])


def lru_system(
    nu_log: Float[Tensor, " n"],
    theta_log: Float[Tensor, " n"],
    gamma_log: Float[Tensor, " n"],
    B_re: Float[Tensor, "n p"],
    B_im: Float[Tensor, "n p"],
    C_re: Float[Tensor, "q n"],
    C_im: Float[Tensor, "q n"],
    *,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "2 m"], Float[Tensor, "2 m p"], Float[Tensor, "2 q m"]]:
    """Return (log |λ|, arg λ), γ B and C as pairs, B and C in `dtype`.

    On a GPU idle modes round n up to m, a multiple of 8: products of other sizes miss its fast kernels.
    """
    parameters = (nu_log, theta_log, gamma_log, B_re, B_im, C_re, C_im)
    if kernels_serve(nu_log) and all(tensor.dtype == torch.float32 for tensor in parameters):
        from compressm.ops.lti.lru_system_triton import LRUSystem

        return LRUSystem.apply(*parameters, dtype)
    poles, B, C = plain_system(*parameters)
    return poles, B.to(dtype), C.to(dtype)
