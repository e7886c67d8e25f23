"""The definition: λ = exp(−exp(ν) + i exp(θ)), γ = exp(γ_log), and B scaled by γ."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def plain_system(
    nu_log: Float[Tensor, " n"],
    theta_log: Float[Tensor, " n"],
    gamma_log: Float[Tensor, " n"],
    B_re: Float[Tensor, "n p"],
    B_im: Float[Tensor, "n p"],
    C_re: Float[Tensor, "q n"],
    C_im: Float[Tensor, "q n"],
) -> tuple[Float[Tensor, "2 n"], Float[Tensor, "2 n p"], Float[Tensor, "2 q n"]]:
    """(log |λ|, arg λ), γ B and C, as pairs."""
    gamma = torch.exp(gamma_log)[:, None]
    poles = torch.stack([-torch.exp(nu_log), torch.exp(theta_log)])
    return poles, torch.stack([gamma * B_re, gamma * B_im]), torch.stack([C_re, C_im])
