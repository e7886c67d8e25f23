"""One function for every way to compute a selective scan."""

from __future__ import annotations

from enum import Enum

from jaxtyping import Float, Int
from torch import Tensor

from compressm.ops.errors import SequenceError
from compressm.ops.kernels import kernels_serve
from compressm.ops.selective_scan import reference
from compressm.ops.selective_scan.arguments import Selective, check


class ScanPath(Enum):
    """How a selective scan is computed; None lets the op choose."""

    LOOP = "loop"
    TRITON = "triton"


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

    Real rates A (channels, n) go with B and C of shape (batch, length, n), or (batch, length, channels, n) where each
    channel has its own; complex ones are pairs, (2, channels, n), and so are B and C, (…, 2, n), and the
    state (batch, 2, channels, n). States are float32 at least. Steps at and after `lengths` leave the state as
    it is. `orders` says how many states each channel has where they differ; the rest is not computed.
    """
    given = Selective(u, delta, A, B, C, D, z, delta_bias, softplus)
    check(given, state, lengths, orders)
    if path is not None and not isinstance(path, ScanPath):
        raise SequenceError(f"path is {path!r}, expected one of {', '.join(map(str, ScanPath))} or None")
    if path is ScanPath.TRITON or (path is None and kernels_serve(u)):
        from compressm.ops.selective_scan import on_gpu  # where Triton is

        y, last = on_gpu.scan(given, state, lengths, orders, keep_state)
    else:
        y, last = reference.scan(given, state, lengths, orders)
    return y, last if keep_state else None


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
    """One step of the same recurrence, in plain torch."""
    sequence = (None if value is None else value[:, None] for value in (u, delta, B, C, z))
    u, delta, B, C, z = sequence  # type: ignore[assignment]
    given = Selective(u, delta, A, B, C, D, z, delta_bias, softplus)
    check(given, state, None, orders)
    y, last = reference.scan(given, state, None, orders)
    return y[:, 0], last
