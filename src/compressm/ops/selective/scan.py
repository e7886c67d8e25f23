"""The selective scan and one step of it; the scan chooses among a loop, tiles on the CPU and kernels on the GPU."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressm.ops.dispatch import (
    SequenceError,
    is_transformed,
    kernels_serve,
    require_floats_on_one_device,
    require_path,
)
from compressm.ops.opaque import define_recomputed, recomputed
from compressm.ops.selective import cpu as blocked
from compressm.ops.selective.conv_and_gate import plain_gate
from compressm.ops.selective.reference import Selective, check, loop_scan

# Steps up to which the loop is faster than tiles on one core: 8, or 24 if each step has many states.
_SHORT, _SHORT_OF_MANY = 8, 24
_MANY = 2**14


class ScanPath(Enum):
    """Ways to compute a selective scan; None lets the op choose."""

    LOOP = "loop"
    BLOCKED = "blocked"
    TRITON = "triton"


_PATHS = tuple(ScanPath)  # torch.compile of torch 2.11 cannot unpack an Enum


def selective_scan(
    u: Float[Tensor, "batch length channels"],
    delta: Float[Tensor, "batch length channels"],
    A: Float[Tensor, "*pair channels n"],
    B: Float[Tensor, "batch length *rest n"],
    C: Float[Tensor, "batch length *rest n"],
    D: Float[Tensor, " channels"] | None = None,
    z: Float[Tensor, "batch length channels"] | None = None,
    state: Float[Tensor, "batch *pair channels n"] | None = None,
    lengths: Int[Tensor, " batch"] | None = None,
    *,
    delta_bias: Float[Tensor, " channels"] | None = None,
    softplus: bool = False,
    orders: Int[Tensor, " channels"] | None = None,
    keep_state: bool = True,
    path: ScanPath | None = None,
) -> tuple[Float[Tensor, "batch length channels"], Tensor | None]:
    """(Re(C h) + D u) silu(z) for h[t] = exp(Δ a) h[t−1] + Δ B u with Δ = delta, or softplus(delta + delta_bias).

    Real rates A (channels, n) go with B and C of shape (batch, length, n), or (batch, length, channels, n) if each
    channel has its own. Complex rates are pairs (2, channels, n), as are B and C (…, 2, n) and the state
    (batch, 2, channels, n). States are float32 at least. Steps at and after `lengths` do not change the state. `orders`
    gives the number of states of each channel if they differ; the other states are 0.
    """
    given = Selective(u, delta, A, B, C, D, z, delta_bias, softplus)
    check(given, state, lengths, orders)
    require_floats_on_one_device(u=u, delta=delta, A=A, B=B, C=C, D=D, z=z, state=state, delta_bias=delta_bias)
    require_path(path, *_PATHS)
    if is_transformed() or not torch.compiler.is_compiling():
        y, last = _along(path or fastest_path(given), given, state, lengths, orders, keep_state)
        return y, last if keep_state else None
    tensors = (u, delta, A, B, C, D, state, lengths, delta_bias, orders)
    y, last = recomputed("selective_scan", tensors, softplus, keep_state, "" if path is None else path.name)
    return y if z is None else plain_gate(y, z).to(y.dtype), last if keep_state else None


def _opaque(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    lengths: Tensor | None,
    delta_bias: Tensor | None,
    orders: Tensor | None,
    softplus: bool,
    keep_state: bool,
    path: str,
) -> tuple[Tensor, Tensor | None]:
    given = Selective(u, delta, A, B, C, D, None, delta_bias, softplus)
    with torch.autocast(u.device.type, enabled=False):
        y, last = _along(ScanPath[path] if path else fastest_path(given), given, state, lengths, orders, keep_state)
    return y, last if keep_state else None


def _fake(u: Tensor, delta: Tensor, A: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
    wide = torch.promote_types(u.dtype, torch.float32)
    last = u.new_empty(u.shape[0], *A.shape, dtype=wide) if rest[-2] else None
    return u.new_empty(u.shape), last


define_recomputed(
    "selective_scan",
    "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? state, Tensor? lengths,"
    " Tensor? delta_bias, Tensor? orders, bool softplus, bool keep_state, str path",
    _opaque,
    _fake,
)


def _along(
    path: ScanPath,
    given: Selective,
    state: Tensor | None,
    lengths: Tensor | None,
    orders: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor | None]:
    if path is ScanPath.LOOP or is_transformed():
        return loop_scan(given, state, lengths, orders)
    if path is ScanPath.BLOCKED:
        return blocked.scan(given, state, lengths, orders)
    u = given.u
    if not kernels_serve(u):
        raise SequenceError(f"path is {path}, u is {u.dtype} on {u.device}, expected float32 or less on a GPU")
    from compressm.ops.selective import gpu as on_gpu  # needs Triton

    return on_gpu.scan(given, state, lengths, orders, keep_state)


def fastest_path(given: Selective) -> ScanPath:
    """TRITON if kernels serve; else BLOCKED, or LOOP for sequences so short that tiles cost more than they save."""
    if kernels_serve(given.u):
        return ScanPath.TRITON
    batch, length, channels = given.u.shape
    many = batch * channels * given.order >= _MANY
    return ScanPath.LOOP if length <= (_SHORT_OF_MANY if many else _SHORT) else ScanPath.BLOCKED


def selective_step(
    u: Float[Tensor, "batch channels"],
    delta: Float[Tensor, "batch channels"],
    A: Float[Tensor, "*pair channels n"],
    B: Float[Tensor, "batch *rest n"],
    C: Float[Tensor, "batch *rest n"],
    D: Float[Tensor, " channels"] | None = None,
    z: Float[Tensor, "batch channels"] | None = None,
    *,
    state: Float[Tensor, "batch *pair channels n"],
    delta_bias: Float[Tensor, " channels"] | None = None,
    softplus: bool = False,
    orders: Int[Tensor, " channels"] | None = None,
) -> tuple[Float[Tensor, "batch channels"], Tensor]:
    """Compute one step of `selective_scan`, in plain torch."""
    sequence = (None if value is None else value[:, None] for value in (u, delta, B, C, z))
    u, delta, B, C, z = sequence  # type: ignore[assignment]
    given = Selective(u, delta, A, B, C, D, z, delta_bias, softplus)
    check(given, state, None, orders)
    y, last = loop_scan(given, state, None, orders)
    return y[:, 0], last
