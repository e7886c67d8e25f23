"""A whole layer y = Re(C h) as matrix products: through the states, in chunks, or as a convolution.

B and C enter as real matrices on pairs: Bu is u [B_re; B_im]ᵀ, and Re(C h) is [h_re, h_im] [C_re, −C_im]ᵀ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from compressm.ops.diagonal_scan.cost import best_chunk, fast_length
from compressm.ops.diagonal_scan.pairs import complex_dtype, powers, to_complex, to_pair

Recurrence = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def through_states(
    u: Float[Tensor, "batch length p"],
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    C: Float[Tensor, "2 q n"],
    state: Float[Tensor, "batch 2 n"] | None,
    recurrence: Recurrence,
) -> tuple[Float[Tensor, "batch length q"], Float[Tensor, "batch 2 n"]]:
    """Drive, scan, read: best where n is not much larger than the channels."""
    n = B.shape[1]
    x = (u @ B.flatten(0, 1).mT).reshape(*u.shape[:2], 2, n)
    h, last = recurrence(x, log_poles, state)
    return h.flatten(-2) @ _reading(C).mT, last


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


def chunked(
    u: Float[Tensor, "batch length p"],
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    C: Float[Tensor, "2 q n"],
    state: Float[Tensor, "batch 2 n"] | None,
    recurrence: Recurrence,
    chunk: int,
) -> Float[Tensor, "batch length q"]:
    """Three products a chunk of T steps: its own Toeplitz block, its last state, and what the carried state adds."""
    batch, length, p = u.shape
    n, q = B.shape[1], C.shape[1]
    count = -(-length // chunk)
    blocks = pad(u, (0, 0, 0, count * chunk - length)).reshape(batch, count, chunk * p)
    table = powers(log_poles, chunk + 1, dtype=complex_dtype(u.dtype))
    collect = to_pair(table[:chunk].flip(0)[:, None] * to_complex(B, 0).mT, 2).reshape(chunk * p, 2 * n)
    emit = _reading(to_pair(to_complex(C, 0) * table[1:, None], 0)).reshape(chunk * q, 2 * n)
    ends = (blocks @ collect).reshape(batch, count, 2, n)
    carried, _ = recurrence(ends, log_poles.to(torch.float64) * chunk, state)
    start = ends.new_zeros(batch, 1, 2, n) if state is None else state[:, None].to(ends.dtype)
    before = torch.cat([start, carried[:, :-1]], dim=1).flatten(-2)
    own = _toeplitz(_kernel(table[:chunk], B, C)).flatten(2, 3).flatten(0, 1)
    y = blocks @ own.mT + before @ emit.mT
    return y.reshape(batch, count * chunk, q)[:, :length]


def convolution(
    u: Float[Tensor, "batch length p"],
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    C: Float[Tensor, "2 q n"],
    state: Float[Tensor, "batch 2 n"] | None,
) -> Float[Tensor, "batch length q"]:
    """The impulse response once, then FFTs: n enters only the response, so that it is best for few channels."""
    length = u.shape[1]
    size = fast_length(2 * length - 1)
    table = powers(log_poles, length + 1, dtype=complex_dtype(u.dtype))
    # Transforms run along the last axis: along any other one they copy first.
    response = torch.fft.rfft(_kernel(table[:length], B, C).permute(1, 2, 0).contiguous(), n=size)
    spectrum = torch.fft.rfft(u.mT.contiguous(), n=size)
    y = torch.fft.irfft(_filtered(response, spectrum), n=size)[..., :length].mT.contiguous()
    return y if state is None else y + _free_response(table[1:], C, state)


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
    collect = to_pair(powers(log_poles, chunk, dtype=dtype)[:, None] * to_complex(B, 0).mT, 2).reshape(chunk * p, -1)
    blocks = pad(backwards(u, lengths), (0, 0, 0, count * chunk - length)).reshape(batch, count, chunk * p)
    ends = to_complex((blocks @ collect).reshape(batch, count, 2, -1), 2)
    last = (ends * powers(log_poles.to(torch.float64) * chunk, count, dtype=dtype)).sum(1)
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


def _filtered(response: Complex[Tensor, "q p f"], spectrum: Complex[Tensor, "b p f"]) -> Complex[Tensor, "b q f"]:
    """Σ_p R[q, p, f] U[b, p, f] as real products of pairs: batched complex ones fall back to a slow loop on the CPU."""
    q, p, f = response.shape
    rows = torch.view_as_real(torch.stack([response, 1j * response]))  # what a real and an imaginary input turn into
    matrices = rows.permute(3, 2, 0, 1, 4).reshape(f, 2 * p, 2 * q)
    signals = torch.view_as_real(spectrum).permute(2, 0, 1, 3).flatten(-2)
    product = (signals @ matrices).reshape(f, -1, q, 2)
    return torch.view_as_complex(product.permute(1, 2, 0, 3).contiguous())


def _reading(C: Float[Tensor, "2 *rest n"]) -> Float[Tensor, "*rest n2"]:
    """[C_re, −C_im], which reads Re(C h) off [h_re, h_im]."""
    return torch.cat([C[0], -C[1]], dim=-1)


def _kernel(table: Complex[Tensor, "length n"], B: Tensor, C: Tensor) -> Float[Tensor, "length q p"]:
    """K[t] = Re(C Λᵗ B)."""
    q, p = C.shape[1], B.shape[2]
    weights = (to_complex(C, 0)[:, None, :] * to_complex(B, 0).mT[None]).reshape(q * p, -1)
    flat = torch.cat([table.real, table.imag], dim=-1) @ torch.cat([weights.real, -weights.imag], dim=-1).mT
    return flat.reshape(-1, q, p)


def _toeplitz(kernel: Float[Tensor, "chunk q p"]) -> Float[Tensor, "chunk q chunk p"]:
    """block[t, :, s, :] = K[t − s], zero for s > t."""
    size = kernel.shape[0]
    steps = torch.arange(size, device=kernel.device)
    lag = steps[:, None] - steps[None, :]
    extended = torch.cat([kernel, torch.zeros_like(kernel[:1])])
    return extended[torch.where(lag >= 0, lag, size)].transpose(1, 2)


def _free_response(table: Complex[Tensor, "length n"], C: Tensor, state: Tensor) -> Float[Tensor, "batch length q"]:
    """Re(C Λᵗ h₀)."""
    free = table[None] * to_complex(state, 1).to(table.dtype)[:, None]
    return torch.cat([free.real, free.imag], dim=-1) @ _reading(C).mT.to(free.real.dtype)
