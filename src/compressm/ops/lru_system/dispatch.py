"""One entry: plain torch, or one kernel where a GPU is."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from compressm.ops.availability import has_triton
from compressm.ops.lru_system.reference import plain_system


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
    """(log |λ|, arg λ), γ B and C, as pairs, B and C in `dtype`.

    On a GPU m is n rounded up to a multiple of 8 by idle modes: matrices of odd sizes miss its fast products.
    """
    parameters = (nu_log, theta_log, gamma_log, B_re, B_im, C_re, C_im)
    if nu_log.is_cuda and has_triton() and all(tensor.dtype == torch.float32 for tensor in parameters):
        from compressm.ops.lru_system.triton import LRUSystem

        return LRUSystem.apply(*parameters, dtype)
    poles, B, C = plain_system(*parameters)
    return poles, B.to(dtype), C.to(dtype)
