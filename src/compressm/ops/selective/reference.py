"""The selective scan by definition, h[t] = exp(Δ[t] a) h[t−1] + Δ[t] B[t] u[t], as a loop; and its arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compressm.ops.dispatch import SequenceError
from compressm.ops.selective.conv_and_gate import plain_gate, plain_steps


class Selective(NamedTuple):
    """The arguments of `selective_scan` by name; there are no pairs if the rates are real."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    delta_bias: Tensor | None = None
    softplus: bool = False

    @property
    def complex(self) -> bool:
        """True if rates, B, C and states are pairs (Re, Im)."""
        return self.A.ndim == 3

    @property
    def own(self) -> bool:
        """True if every channel has its own B and C."""
        return self.B.ndim == 4 + self.complex

    @property
    def order(self) -> int:
        return self.A.shape[-1]

    @property
    def channels(self) -> int:
        return self.u.shape[2]

    def state_shape(self) -> tuple[int, ...]:
        """(batch, channels, n), or (batch, 2, channels, n) for pairs."""
        pair = (2,) if self.complex else ()
        return (self.u.shape[0], *pair, self.channels, self.order)


def check(given: Selective, state: Tensor | None, lengths: Tensor | None, orders: Tensor | None) -> None:
    """Refuse, by name, an argument that does not fit the others."""
    if not isinstance(given.u, Tensor) or given.u.ndim != 3 or 0 in given.u.shape:
        got = tuple(given.u.shape) if isinstance(given.u, Tensor) else type(given.u).__name__
        raise SequenceError(f"u is {got}, expected (batch, length, channels), each at least 1")
    batch, length, channels = given.u.shape
    if given.A.ndim not in (2, 3) or (given.complex and given.A.shape[0] != 2) or given.A.shape[-2] != channels:
        raise SequenceError(
            f"A has shape {tuple(given.A.shape)}, expected ({channels}, n), or (2, {channels}, n) for complex rates"
        )
    for name, value in (("delta", given.delta), ("z", given.z)):
        if value is not None:
            _require_shape(name, value, (batch, length, channels))
    pair = (2,) if given.complex else ()
    own = (channels,) if given.own else ()
    for name, value in (("B", given.B), ("C", given.C)):
        _require_shape(name, value, (batch, length, *own, *pair, given.order))
    for name, value in (("D", given.D), ("delta_bias", given.delta_bias), ("orders", orders)):
        if value is not None:
            _require_shape(name, value, (channels,))
    if state is not None:
        _require_shape("state", state, given.state_shape())
    if lengths is not None:
        _require_shape("lengths", lengths, (batch,))
    if orders is not None and orders.dtype not in (torch.int32, torch.int64):
        raise SequenceError(f"orders are {orders.dtype}, expected integers, torch.int32 or torch.int64")


def _require_shape(name: str, value: object, expected: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor) or tuple(value.shape) != expected:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise SequenceError(f"{name} is {got}, expected {expected}")


def loop_scan(
    given: Selective, state: Tensor | None, lengths: Tensor | None, orders: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the scan in a loop: y in the dtype of u, and the last state in float32 or better."""
    wide = torch.promote_types(given.u.dtype, torch.float32)
    u = given.u.to(wide)
    step = plain_steps(given.delta, given.delta_bias, lengths, soft=given.softplus)
    A, B, C = masked(given, orders)
    h = u.new_zeros(given.state_shape()) if state is None else state.to(wide)
    h = pair_to_complex(h, 1) if given.complex else h
    h = h if orders is None else torch.where(there(given, orders), h, 0)
    outputs = []
    for t in range(u.shape[1]):
        h = torch.exp(step[:, t, :, None] * A) * h + (step[:, t] * u[:, t])[..., None] * B[:, t]
        outputs.append((C[:, t] * h).sum(-1))
    y = torch.stack(outputs, dim=1)
    y = finish(y.real if given.complex else y, given)
    return y.to(given.u.dtype), torch.stack([h.real, h.imag], dim=1) if given.complex else h


def masked(given: Selective, orders: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """A (channels, n), B and C (batch, length, channels or 1, n), real or complex.

    States at and above a channel's order are 0: B does not drive them, and C does not read them.
    """
    wide = torch.promote_types(given.u.dtype, torch.float32)
    A, B, C = (M.to(wide) for M in (given.A, given.B, given.C))
    if given.complex:
        A, B, C = pair_to_complex(A, 0), pair_to_complex(B, -2), pair_to_complex(C, -2)
    if not given.own:
        B, C = B[:, :, None], C[:, :, None]
    if orders is None:
        return A, B, C
    present = there(given, orders)
    return A, torch.where(present, B, 0), torch.where(present, C, 0)


def there(given: Selective, orders: Tensor) -> Tensor:
    """A mask of the states that each channel has: (channels, n)."""
    return torch.arange(given.order, device=given.u.device) < orders.to(given.u.device)[:, None]


def finish(y: Tensor, given: Selective) -> Tensor:
    """Add the skip D·u and multiply by the gate silu(z)."""
    if given.D is not None:
        y = y + given.D.to(y.dtype) * given.u.to(y.dtype)
    return y if given.z is None else plain_gate(y, given.z)


def pair_to_complex(pairs: Tensor, axis: int) -> Tensor:
    """Join (Re, Im) on an axis of size two into complex numbers."""
    re, im = pairs.unbind(axis)
    return torch.complex(re.contiguous(), im.contiguous())
