"""A bank of single-input single-output systems, one a channel, as convolutions."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressm.ops.diagonal_scan.layer_forms import backwards
from compressm.ops.diagonal_scan.pairs import complex_dtype, powers, to_complex, to_pair


def bank_convolution(
    u: Float[Tensor, "batch length width"],
    log_poles: Float[Tensor, "2 width n"],
    B: Float[Tensor, "2 width n"],
    C: Float[Tensor, "2 width n"],
    state: Float[Tensor, "batch 2 width n"] | None,
) -> Float[Tensor, "batch length width"]:
    """kᵢ[t] = Re(Cᵢ Λᵢᵗ Bᵢ) by one product, then FFTs channel by channel."""
    length = u.shape[1]
    table = powers(log_poles, length + 1, dtype=complex_dtype(u.dtype))
    weights = to_complex(B, 0) * to_complex(C, 0)
    kernel = torch.einsum("lwn,wn->lw", table[:length], weights.to(table.dtype)).real
    response = torch.fft.rfft(kernel, n=2 * length, dim=0)
    y = torch.fft.irfft(response * torch.fft.rfft(u, n=2 * length, dim=1), n=2 * length, dim=1)[:, :length]
    if state is None:
        return y
    read = to_complex(C, 0) * to_complex(state, 1)
    return y + torch.einsum("lwn,bwn->blw", table[1:], read.to(table.dtype)).real


def bank_final_state(
    u: Float[Tensor, "batch length width"],
    log_poles: Float[Tensor, "2 width n"],
    B: Float[Tensor, "2 width n"],
    state: Float[Tensor, "batch 2 width n"] | None,
    lengths: Int[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch 2 width n"]:
    """h at the end of each sequence."""
    length, dtype = u.shape[1], complex_dtype(u.dtype)
    table = powers(log_poles, length + 1, dtype=dtype)
    last = torch.einsum("blw,lwn->bwn", backwards(u, lengths).to(dtype), table[:length]) * to_complex(B, 0)
    if state is not None:
        reached = table[length] if lengths is None else table[lengths]
        last = last + reached * to_complex(state, 1).to(dtype)
    return to_pair(last, 1).to(u.dtype)
