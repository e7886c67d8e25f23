"""One function: torch's kernels, or ours where a GPU is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from compressm.ops.batch_norm.reference import plain_batch_norm
from compressm.ops.batch_norm.statistics import RunningStatistics
from compressm.ops.diagonal_scan.checks import require_floats_on_one_device, require_shapes
from compressm.ops.errors import SequenceError
from compressm.ops.kernels import kernels_serve
from compressm.ops.link import Link
from compressm.ops.moments import moments_of


class Normalised(NamedTuple):
    """u, x again, and what carries the gradients of D ⊙ u and of B u.

    Where u, D ⊙ u, B u and x are used through this record, their gradients arrive at the norm together and are added
    where they are read. `link` is for the gradient of D ⊙ u, `drive` for that of a product with u; None where autograd
    adds them.
    """

    u: Tensor
    x: Tensor
    link: Link | None = None
    drive: Link | None = None


def batch_norm(
    x: Float[Tensor, "batch length width"],
    weight: Float[Tensor, " width"] | None,
    bias: Float[Tensor, " width"] | None,
    running: RunningStatistics,
    *,
    eps: float = 1e-5,
    skip: Float[Tensor, " width"] | None = None,
) -> Normalised:
    """(x − μ) / √(σ² + ε) · weight + bias over batch and time, and the running statistics moved towards μ and σ².

    `skip` is the D of a layer whose D ⊙ u will be added by `gated_residual`, given what is returned here.
    """
    if torch.compiler.is_compiling():
        return Normalised(plain_batch_norm(x, weight, bias, running, eps), x)
    _check(x, weight, bias, running, skip)
    dense = running.mean.is_contiguous() and running.variance.is_contiguous()
    if not (dense and kernels_serve(x)):
        return Normalised(plain_batch_norm(x, weight, bias, running, eps), x)
    from compressm.ops.batch_norm.triton import FusedBatchNorm

    weight, bias, skip = (None if vector is None else vector.contiguous() for vector in (weight, bias, skip))
    u, x, *carriers = FusedBatchNorm.apply(x, weight, bias, skip, *running, eps, moments_of(x))
    link, drive = (
        None if carrier is None else Link(u, carrier, totals)
        for carrier, totals in zip(carriers[::2], carriers[1::2], strict=True)
    )
    return Normalised(u, x, link, drive)


def _check(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running: RunningStatistics, skip: Tensor | None
) -> None:
    vector = ("width",)
    require_shapes(
        x=(x, ("batch", "length", "width")),
        weight=(weight, vector),
        bias=(bias, vector),
        running_mean=(running.mean, vector),
        running_var=(running.variance, vector),
        skip=(skip, vector),
    )
    require_floats_on_one_device(
        x=x, weight=weight, bias=bias, running_mean=running.mean, running_var=running.variance, skip=skip
    )
    if x.shape[:2].numel() == 1:
        raise SequenceError(f"x is {tuple(x.shape)}: batch norm trains on at least 2 steps in all")
