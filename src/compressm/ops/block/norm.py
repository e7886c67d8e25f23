"""Batch, running and RMS norm, and what other ops pass to them: statistics forward, sums of gradients backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from compressm.ops.dispatch import SequenceError, kernels_serve, require_floats_on_one_device, require_shapes


class Link(NamedTuple):
    """Zeros that receive the gradient of u: `carrier` at every step, `totals` as a shift and a scale for all steps.

    An op that uses u through a link treats u as a constant. It sends the gradient g of u to `carrier`, and Σ g and
    Σ g ⊙ u over all steps to `totals`. A norm needs these sums: products with u have them at hand, while the norm
    would have to read g and u once more.
    """

    u: Float[Tensor, "batch length width"]
    carrier: Float[Tensor, "batch length width"]
    totals: Float[Tensor, "2 width"] | None = None

    def zeros(self) -> Float[Tensor, "batch length width"]:
        """The zeros to add to u, or to D ⊙ u, so that autograd does all of this by itself."""
        if self.totals is None:
            return self.carrier
        shift, scale = self.totals.to(self.u.dtype)
        return self.carrier + shift + scale * self.u.detach()


_NAME = "_compressm_moments"


class ColumnStatistics(NamedTuple):
    """The mean, the sum of squared deviations and the number of the rows that each program wrote."""

    parts: Float[Tensor, "programs 3 width"]
    version: int


def leave_moments(x: Tensor, parts: Float[Tensor, "programs 3 width"]) -> None:
    """Attach moments to x, valid as long as x is this very tensor and nothing is written into it."""
    setattr(x, _NAME, ColumnStatistics(parts, x._version))


def moments_of(x: Tensor) -> Float[Tensor, "programs 3 width"] | None:
    """The moments attached to x if they are still valid, else None."""
    moments = getattr(x, _NAME, None)
    return moments.parts if isinstance(moments, ColumnStatistics) and moments.version == x._version else None


class RunningStatistics(NamedTuple):
    """Averages over batches, updated in place; without a momentum every batch counts the same."""

    mean: Float[Tensor, " width"]
    variance: Float[Tensor, " width"]
    batches: Int[Tensor, ""]
    momentum: float | None = 0.1


def plain_batch_norm(
    x: Float[Tensor, "batch length width"],
    weight: Float[Tensor, " width"] | None,
    bias: Float[Tensor, " width"] | None,
    running: RunningStatistics,
    eps: float,
) -> Float[Tensor, "batch length width"]:
    """(x − μ) / √(σ² + ε) · weight + bias, as `nn.BatchNorm1d` computes and tracks it."""
    running.batches.add_(1)
    share = 1.0 / float(running.batches) if running.momentum is None else running.momentum
    flat = functional.batch_norm(x.flatten(0, 1), running.mean, running.variance, weight, bias, True, share, eps)
    return flat.view_as(x)


def plain_running_norm(
    x: Float[Tensor, "batch length width"],
    weight: Float[Tensor, " width"] | None,
    bias: Float[Tensor, " width"] | None,
    running: RunningStatistics,
    eps: float,
    *,
    through: bool,
    moments: tuple[Float[Tensor, " width"], Float[Tensor, " width"]] | None = None,
) -> Float[Tensor, "batch length width"]:
    """(x − μ) / √(σ² + ε) · weight + bias by the running averages μ and σ², which the batch moves first.

    The first batch replaces the averages, a later one moves them by the share `momentum`. Gradients go `through` that
    share of the batch's own mean and variance, or take the averages as constants. `moments` are the batch's, if known.
    """
    if moments is None:
        raised = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = raised.sum((0, 1)) / x.shape[:2].numel()
        moments = mean, (raised - mean).square().sum((0, 1)) / x.shape[:2].numel()
    running.batches.add_(1)
    # As a float32 number 0.01 would be off by 2e-8, beside averages in float64.
    first = (running.batches == 1).to(torch.promote_types(running.mean.dtype, torch.float32))
    share = first + (1 - first) * (running.momentum or 0.0)
    moved = []
    for average, found in zip(running[:2], moments, strict=True):
        moved.append(average + share * ((found if through else found.detach()) - average))
        with torch.no_grad():
            average.copy_(moved[-1])
    y = (x - moved[0]) * torch.rsqrt(moved[1] + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


class Normalised(NamedTuple):
    """The normalised u, x again, and links for the gradients of D ⊙ u and of B u.

    If u, D ⊙ u, B u and x are used through this record, their gradients reach the norm together and are added as they
    are read. `link` takes the gradient of D ⊙ u, `drive` the gradient of a product with u; they are None where autograd
    adds the gradients.
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
    """(x − μ) / √(σ² + ε) · weight + bias over batch and time; the running statistics move towards μ and σ².

    `skip` is the D of a layer whose D ⊙ u `gated_residual` will add, given the links returned here.
    """
    if torch.compiler.is_compiling():
        return Normalised(plain_batch_norm(x, weight, bias, running, eps), x)
    _check(x, weight, bias, running, skip)
    if x.shape[:2].numel() == 1:
        raise SequenceError(f"x is {tuple(x.shape)}: batch norm trains on at least 2 steps in all")
    if not _serve(x, running):
        return Normalised(plain_batch_norm(x, weight, bias, running, eps), x)
    return _by_kernels(x, weight, bias, running, eps, skip, None)


def running_norm(
    x: Float[Tensor, "batch length width"],
    weight: Float[Tensor, " width"] | None,
    bias: Float[Tensor, " width"] | None,
    running: RunningStatistics,
    *,
    through: bool,
    eps: float = 1e-5,
    skip: Float[Tensor, " width"] | None = None,
) -> Normalised:
    """Normalise by the running averages, as `plain_running_norm`; `skip` and the links are those of `batch_norm`."""
    if torch.compiler.is_compiling():
        return Normalised(plain_running_norm(x, weight, bias, running, eps, through=through), x)
    _check(x, weight, bias, running, skip)
    if not _serve(x, running):
        return Normalised(plain_running_norm(x, weight, bias, running, eps, through=through), x)
    return _by_kernels(x, weight, bias, running, eps, skip, through)


def _serve(x: Tensor, running: RunningStatistics) -> bool:
    """True if kernels normalise x and can update the averages in place."""
    return running.mean.is_contiguous() and running.variance.is_contiguous() and kernels_serve(x)


def _by_kernels(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningStatistics,
    eps: float,
    skip: Tensor | None,
    through: bool | None,
) -> Normalised:
    from compressm.ops.block.norm_triton import FusedBatchNorm

    weight, bias, skip = (None if vector is None else vector.contiguous() for vector in (weight, bias, skip))
    u, x, *carriers = FusedBatchNorm.apply(x, weight, bias, skip, *running, eps, moments_of(x), through)
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


def plain_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Compute the RMS norm in float32 at least, then cast it to the dtype of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = None if weight is None else weight.to(wide)
    return nn.functional.rms_norm(x.to(wide), x.shape[-1:], scale, eps).to(x.dtype)


# The widest row that fits into the registers of one program.
_WIDEST = 4096


def rms_norm(
    x: Float[Tensor, "*rest width"], weight: Float[Tensor, " width"] | None = None, eps: float = 1e-5
) -> tuple[Float[Tensor, "*rest width"], Float[Tensor, "*rest width"]]:
    """weight x / √(mean x² + ε) over the last axis, computed in float32 at least, in the dtype of x; and x again.

    Use the returned x for everything else: on a GPU one pass over memory then adds both gradients.
    """
    if not kernels_serve(x) or x.shape[-1] > _WIDEST:
        return plain_rms_norm(x, weight, eps), x
    from compressm.ops.block.norm_triton import RMSNormRows

    return RMSNormRows.apply(x, weight, eps)
