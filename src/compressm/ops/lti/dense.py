"""A bank of systems with full state matrices, one for each channel, in chunks of time that are products of matrices."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from compressm.ops.dispatch import (
    full_precision,
    is_transformed,
    require_floats_on_one_device,
    require_given,
    require_lengths,
    require_shapes,
)
from compressm.ops.lti.states import raised
from compressm.ops.opaque import define_recomputed, recomputed

# A chunk's products grow with its length, and states are carried from one to the next one after the other.
_CHUNK = 64


def dense_bank(
    u: Float[Tensor, "batch length width"],
    A: Float[Tensor, "width n n"],
    B: Float[Tensor, "width n"],
    C: Float[Tensor, "width q n"],
    state: Float[Tensor, "batch width n"] | None = None,
    lengths: Int[Tensor, " batch"] | None = None,
    *,
    keep_state: bool = True,
) -> tuple[Float[Tensor, "batch length width q"], Float[Tensor, "batch width n"] | None]:
    """y[t] = C h[t], h[t] = A h[t−1] + B u[t] in every channel, and the last h; padding after `lengths` is skipped."""
    require_given(u=u, A=A, B=B, C=C)
    sizes = require_shapes(
        u=(u, ("batch", "length", "width")),
        A=(A, ("width", "n", "n")),
        B=(B, ("width", "n")),
        C=(C, ("width", "q", "n")),
        state=(state, ("batch", "width", "n")),
    )
    require_floats_on_one_device(u=u, A=A, B=B, C=C, state=state)
    require_lengths(lengths, sizes["batch"], sizes["length"])
    if torch.compiler.is_compiling() and not is_transformed():
        y, last = recomputed("dense_bank", (u, A, B, C, state, lengths), keep_state)
        return y, last if keep_state else None
    return _any(u, A, B, C, state, lengths, keep_state)


def _any(
    u: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None, lengths: Tensor | None, keep_state: bool
) -> tuple[Tensor, Tensor | None]:
    with full_precision(u):
        work, counts = raised(u), None
        if lengths is not None:
            counts = torch.arange(u.shape[1], device=u.device) < lengths[:, None]
            work = torch.where(counts[..., None], work, 0)
        y, before, step = _chunks(work, A, B, C, state)
        last = _at_ends(work, before, step, lengths) if keep_state else None
        if counts is not None:
            y = torch.where(counts[..., None, None], y, 0)
        return y.to(u.dtype), last


def _chunks(
    u: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None
) -> tuple[
    Float[Tensor, "batch length width q"],
    Float[Tensor, "width n batch chunks"],
    tuple[Float[Tensor, "width n n"], Float[Tensor, "width n"]],
]:
    """All outputs, the states before chunks, and (A, B) in the dtype of u."""
    (batch, length, width), (q, n), dtype = u.shape, C.shape[1:], u.dtype
    size, longest = 1, _chunk_of(length)
    # Powers are formed in float64: A is close to the identity where steps are short.
    power, columns, rows = A.double(), B.double()[..., None], C.double()[:, None]
    while size < longest:
        columns = torch.cat([columns, power @ columns], -1)  # Aʲ B
        rows = torch.cat([rows, rows @ power[:, None]], 1)  # C Aʲ
        power, size = power @ power, 2 * size
    count = -(-length // size)
    x = pad(u, (0, 0, 0, count * size - length)).reshape(batch, count, size, width).permute(3, 2, 0, 1).flatten(2)
    lag = torch.arange(size, device=u.device)[:, None] - torch.arange(size, device=u.device)
    kernel = (rows @ B.double()[:, None, :, None])[..., 0]  # (width, size, q)
    toeplitz = (kernel[:, lag.clamp_min(0)] * (lag >= 0)[..., None]).permute(0, 1, 3, 2).flatten(1, 2)
    y = toeplitz.to(dtype) @ x
    ends = (columns.flip(-1).to(dtype) @ x).unflatten(-1, (batch, count))
    h = x.new_zeros(width, n, batch) if state is None else state.to(dtype).permute(1, 2, 0)
    carried, power = [h], power.to(dtype)
    for k in range(count - 1):
        h = power @ h + ends[..., k]
        carried.append(h)
    before = torch.stack(carried, -1)
    y = y + (rows @ A.double()[:, None]).flatten(1, 2).to(dtype) @ before.flatten(2)
    y = y.reshape(width, size, q, batch, count).permute(3, 4, 1, 0, 2).flatten(1, 2)[:, :length]
    return y, before, (A.to(dtype), B.to(dtype))


def _at_ends(
    u: Tensor, before: Float[Tensor, "width n batch chunks"], step: tuple[Tensor, Tensor], lengths: Tensor | None
) -> Float[Tensor, "batch width n"]:
    """The state at each sequence's end: from the one before its last chunk, the steps that are left."""
    (batch, length, _), (A, B) = u.shape, step
    size = _chunk_of(length)
    ends = torch.full((batch,), length, device=u.device) if lengths is None else lengths.to(u.device)
    chunk = (ends - 1) // size
    h = before.permute(2, 3, 0, 1).gather(1, chunk[:, None, None, None].expand(-1, 1, *before.shape[:2]))[:, 0]
    for k in range(min(size, length)):
        place = chunk * size + k
        now = u.gather(1, place.clamp_max(length - 1)[:, None, None].expand(-1, 1, u.shape[2]))[:, 0]
        moved = (A @ h[..., None])[..., 0] + B * now[..., None]
        h = torch.where((place < ends)[:, None, None], moved, h)
    return h


def _chunk_of(length: int) -> int:
    size = 1
    while size < min(length, _CHUNK):
        size *= 2
    return size


def _fake(
    u: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None, lengths: Tensor | None, keep_state: bool
) -> tuple[Tensor, Tensor | None]:
    y = u.new_empty(*u.shape, C.shape[1])
    return y, u.new_empty(u.shape[0], *B.shape, dtype=raised(u).dtype) if keep_state else None


define_recomputed(
    "dense_bank", "Tensor u, Tensor A, Tensor B, Tensor C, Tensor? state, Tensor? lengths, bool keep_state", _any, _fake
)
