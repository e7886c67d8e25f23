"""A bank of single-input single-output systems, one a channel, as convolutions."""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from compressm.ops.diagonal_scan.convolution import ChannelConvolution
from compressm.ops.diagonal_scan.cost import best_chunk
from compressm.ops.diagonal_scan.layer_forms import after, backwards
from compressm.ops.diagonal_scan.pairs import complex_dtype, from_interleaved, interleaved, powers, to_complex, to_pair
from compressm.ops.diagonal_scan.responses import power_tables


def bank_convolution(
    u: Float[Tensor, "batch length width"],
    log_poles: Float[Tensor, "2 width n"],
    B: Float[Tensor, "2 width n"],
    C: Float[Tensor, "2 width n"],
    state: Float[Tensor, "batch 2 width n"] | None,
    D: Float[Tensor, " width"] | None,
) -> Float[Tensor, "batch length width"]:
    """kᵢ[t] = Re(Cᵢ Λᵢᵗ Bᵢ) in two steps of about √L powers, then FFTs channel by channel."""
    length = u.shape[1]
    kernel = _responses(log_poles, (to_complex(B, 0) * to_complex(C, 0))[None], length, u.dtype)[0]
    if D is not None:
        kernel[0].add_(D)
    y: Tensor = ChannelConvolution.apply(u, kernel)
    if state is None:
        return y
    read = to_complex(C, 0) * to_complex(state, 1) * powers(log_poles, 1, first=1, dtype=complex_dtype(u.dtype))
    return y + _responses(log_poles, read, length, u.dtype)


def bank_final_state(
    u: Float[Tensor, "batch length width"],
    log_poles: Float[Tensor, "2 width n"],
    B: Float[Tensor, "2 width n"],
    state: Float[Tensor, "batch 2 width n"] | None,
    lengths: Int[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch 2 width n"]:
    """h at the end of each sequence."""
    batch, length, width = u.shape
    dtype, chunk = complex_dtype(u.dtype), best_chunk(length)
    count = -(-length // chunk)
    blocks = pad(backwards(u, lengths), (0, 0, 0, count * chunk - length)).reshape(batch * count, chunk, width)
    collect = interleaved(powers(log_poles, chunk, dtype=dtype))
    ends = from_interleaved(blocks.permute(2, 0, 1) @ collect.transpose(0, 1)).reshape(width, batch, count, -1)
    strides = powers(log_poles.to(torch.float64) * chunk, count, dtype=dtype)
    last = torch.einsum("wbcn,cwn->bwn", ends, strides) * to_complex(B, 0)
    if state is not None:
        last = last + after(log_poles, lengths, length, dtype) * to_complex(state, 1).to(dtype)
    return to_pair(last, 1).to(u.dtype)


def _responses(
    log_poles: Float[Tensor, "2 width n"], weights: Complex[Tensor, "batch width n"], length: int, real: torch.dtype
) -> Float[Tensor, "batch length width"]:
    """Re Σₙ w Λᵗ for t < length, as one real product a channel: t = kT + j needs √L powers twice instead of L."""
    near, far = power_tables(log_poles, length, complex_dtype(real))
    batch, width, _ = weights.shape
    weighted = (weights.to(far.dtype)[:, None] * far).conj()
    product = interleaved(weighted).permute(2, 0, 1, 3).flatten(1, 2) @ interleaved(near).permute(1, 2, 0)
    return product.reshape(width, batch, -1)[..., :length].permute(1, 2, 0)
