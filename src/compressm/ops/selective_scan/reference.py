"""The definition: a loop over time."""

from __future__ import annotations

import torch
from torch import Tensor

from compressm.ops.around_scan.reference import plain_gate, plain_steps
from compressm.ops.selective_scan.arguments import Selective


def scan(
    given: Selective, state: Tensor | None, lengths: Tensor | None, orders: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y in the dtype of u, and the last state, in float32 or better."""
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

    States at and above a channel's order are neither driven nor heard; they are 0.
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
    """Which states each channel has: (channels, n)."""
    return torch.arange(given.order, device=given.u.device) < orders.to(given.u.device)[:, None]


def finish(y: Tensor, given: Selective) -> Tensor:
    """The skip D·u and the gate silu(z)."""
    if given.D is not None:
        y = y + given.D.to(y.dtype) * given.u.to(y.dtype)
    return y if given.z is None else plain_gate(y, given.z)


def pair_to_complex(pairs: Tensor, axis: int) -> Tensor:
    """(Re, Im) on an axis of size two as complex numbers."""
    re, im = pairs.unbind(axis)
    return torch.complex(re.contiguous(), im.contiguous())
