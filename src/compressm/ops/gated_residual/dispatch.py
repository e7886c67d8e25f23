"""One function: kernels where a GPU is, on a CPU a gradient written out, plain torch for the rest."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compressm.ops.diagonal_scan.checks import require_floats_on_one_device, require_shapes
from compressm.ops.errors import SequenceError
from compressm.ops.gated_residual.explicit import ExplicitGatedResidual
from compressm.ops.gated_residual.reference import factors, plain_gated_residual, with_skip
from compressm.ops.kernels import kernels_serve
from compressm.ops.link import Link
from compressm.ops.moments import leave_moments

# Up to here the whole product fits into the registers of one program.
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
) -> Float[Tensor, "batch length width"]:
    """x + k₂ ⊙ v ⊙ sigmoid(g) with (v, g) = W z + b and z = k₁ ⊙ gelu(y + D ⊙ u), in the dtype of x.

    k is keep / (1 − rate), for the whole batch if it has one row. With `link` (`Normalised.link`) the gradient of
    D ⊙ u goes there instead of to u. Under autocast the product is one of its dtype. What is `measured` may be left
    with the result for a batch norm that reads it next (`moments_of`).
    """
    if torch.compiler.is_compiling():
        return plain_gated_residual(y, x, weight, bias, u, D, link, keep, rate)
    _check(y, x, weight, bias, u, D, link, keep, rate)
    if not kernels_serve(y):
        if not _on_cpu_in_one_dtype(y, x, weight, bias):
            return plain_gated_residual(y, x, weight, bias, u, D, link, keep, rate)
        scales = None if keep is None else factors(keep, rate, y.dtype)
        return ExplicitGatedResidual.apply(with_skip(y, u, D, link), x, weight, bias, scales)
    from compressm.ops.gated_residual.fused import NarrowGatedResidual, WideGatedResidual

    u = u if link is None or u is None else u.detach()
    # The narrow kernels count entries in 32 bits.
    narrow = y.shape[-1] <= _NARROW and y.numel() < 2**31
    bias, D = bias.contiguous(), None if D is None else D.contiguous()
    carrier, totals = (None, None) if link is None else link[1:]
    given = (y, x, weight, bias, u, D, carrier, totals, keep, rate, _working_dtype(y))
    if narrow or not measured:
        return (NarrowGatedResidual if narrow else WideGatedResidual).apply(*given)
    out, moments = WideGatedResidual.apply(*given, True)
    leave_moments(out, moments)
    return out


def _on_cpu_in_one_dtype(*tensors: Tensor) -> bool:
    """In float32 or float64, which autocast does not narrow."""
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
        raise SequenceError(f"{'u' if u is None else 'D'} is None, expected u and D or neither")
    if keep is None:
        return
    if keep.dtype != torch.bool or keep.device != y.device:
        raise SequenceError(f"keep is {keep.dtype} on {keep.device}, expected torch.bool on {y.device}")
    if sizes["rows"] not in (1, sizes["batch"]):
        raise SequenceError(f"keep has {sizes['rows']} rows, expected 1 or batch = {sizes['batch']}")
    if not 0 <= rate < 1:
        raise SequenceError(f"rate is {rate}, expected a number from 0 to below 1")
