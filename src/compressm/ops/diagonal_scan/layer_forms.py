"""A whole layer y = Re(C h) through its states or as a convolution, and its last state alone."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from compressm.ops.diagonal_scan.convolution import MatrixConvolution
from compressm.ops.diagonal_scan.cost import best_chunk, walks_pairs
from compressm.ops.diagonal_scan.pair_recurrence import pair_recurrence
from compressm.ops.diagonal_scan.pairs import complex_dtype, from_interleaved, interleaved, powers, to_complex, to_pair
from compressm.ops.diagonal_scan.responses import free_response, impulse_response
from compressm.ops.diagonal_scan.two_level import recurrence


def through_states(
    u: Float[Tensor, "batch length p"],
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    C: Float[Tensor, "2 q n"],
    state: Float[Tensor, "batch 2 n"] | None,
) -> tuple[Float[Tensor, "batch length q"], Float[Tensor, "batch 2 n"]]:
    """Drive, scan, read: best where n is not much larger than the channels."""
    if not u.is_cuda and walks_pairs(len(u), u.shape[1], B.shape[1], driven=True):
        driven = (u @ B.flatten(0, 1).mT).unflatten(-1, (2, -1))
        pairs, last = pair_recurrence(driven, log_poles, state)
        return pairs.flatten(-2) @ torch.cat([C[0], -C[1]], dim=1).mT, last
    x = from_interleaved(u @ interleaved(to_complex(B, 0).mT))
    h = recurrence(x, log_poles, None if state is None else to_complex(state, 1))
    # Re(C h) is the product of [re, −im] of C with [re, im] of h.
    return interleaved(h) @ interleaved(to_complex(C, 0).conj()).mT, to_pair(h[:, -1], 1)


def padded_order(
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    C: Float[Tensor, "2 q n"],
    state: Float[Tensor, "batch 2 n"] | None,
    *,
    multiple: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Idle modes up to the next multiple: matrices of odd sizes miss the fast kernels of a GPU."""
    missing = -B.shape[1] % multiple
    if missing == 0:
        return log_poles, B, C, state
    idle = None if state is None else pad(state, (0, missing))
    return pad(log_poles, (0, missing), value=-1.0), pad(B, (0, 0, 0, missing)), pad(C, (0, missing)), idle


def convolution(
    u: Float[Tensor, "batch length p"],
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    C: Float[Tensor, "2 q n"],
    state: Float[Tensor, "batch 2 n"] | None,
    D: Float[Tensor, " q"] | None,
) -> Float[Tensor, "batch length q"]:
    """The impulse response once, then FFTs: n enters only the response, so that it is best for few channels."""
    length = u.shape[1]
    kernel = impulse_response(log_poles, B, C, length)
    if D is not None:
        kernel[..., 0].diagonal().add_(D)
    y: Tensor = MatrixConvolution.apply(u, kernel)
    return y if state is None else y + free_response(log_poles, C, state, length)


def final_state(
    u: Float[Tensor, "batch length p"],
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    state: Float[Tensor, "batch 2 n"] | None,
    lengths: Int[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch 2 n"]:
    """h at the end of each sequence, Σⱼ λʲ B u[end − j], in blocks of j: no state in between is formed."""
    batch, length, p = u.shape
    dtype, chunk = complex_dtype(u.dtype), best_chunk(length)
    count = -(-length // chunk)
    collect = interleaved(powers(log_poles, chunk, dtype=dtype)[:, None] * to_complex(B, 0).mT).flatten(0, 1)
    blocks = pad(backwards(u, lengths), (0, 0, 0, count * chunk - length)).reshape(batch, count, chunk * p)
    last = (from_interleaved(blocks @ collect) * powers(log_poles.to(torch.float64) * chunk, count, dtype=dtype)).sum(1)
    if state is not None:
        last = last + after(log_poles, lengths, length, dtype) * to_complex(state, 1).to(dtype)
    return to_pair(last, 1).to(u.dtype)


def after(log_poles: Tensor, lengths: Tensor | None, length: int, dtype: torch.dtype) -> Tensor:
    """λ^length, or of each sequence its own."""
    if lengths is None:
        return powers(log_poles, 1, first=length, dtype=dtype)
    logs = torch.complex(*log_poles.to(torch.float64).unbind(0))
    return torch.exp(lengths.reshape(-1, *([1] * logs.ndim)) * logs).to(dtype)


def backwards(
    u: Float[Tensor, "batch length p"], lengths: Int[Tensor, " batch"] | None
) -> Float[Tensor, "batch length p"]:
    """Each sequence from its own end to its beginning, then zeros."""
    if lengths is None:
        return u.flip(1)
    position = lengths[:, None] - 1 - torch.arange(u.shape[1], device=u.device)
    read = u.gather(1, position.clamp_min(0)[..., None].expand_as(u))
    return torch.where((position >= 0)[..., None], read, 0)
