"""What a selective scan is given, checked once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compressm.ops.errors import SequenceError


class Selective(NamedTuple):
    """The arguments of `selective_scan` by name; without pairs where the rates are real."""

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
        """Whether rates, B, C and states are pairs (Re, Im)."""
        return self.A.ndim == 3

    @property
    def own(self) -> bool:
        """Whether every channel has a B and a C of its own."""
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
    """Refuse by name what does not fit the rest."""
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
        raise SequenceError(f"orders are {orders.dtype}, expected integers")


def _require_shape(name: str, value: object, expected: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor) or tuple(value.shape) != expected:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise SequenceError(f"{name} is {got}, expected {expected}")
