"""Mamba with states of its own in every channel: what such a layer holds beside its parameters, and in which shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from compressm.ops import SequenceError

# What only a layer with maps has; A_imag where its rates are complex.
OF_MAPS = ("B_map", "C_map", "orders", "A_imag")


class Form(NamedTuple):
    """Maps from how many entries of B and C, None where there are no maps; and whether rates are complex."""

    projected: int | None = None
    complex: bool = False

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]]) -> Form:
        """That of a layer whose tensors have these shapes."""
        B_map = shapes.get("B_map")
        return cls() if B_map is None or len(B_map) < 3 else cls(B_map[-1], len(B_map) == 4)

    def shapes(self, *, inner: int, dt_rank: int, order: int) -> dict[str, tuple[int, ...]]:
        """Of all tensors that depend on order and form."""
        shapes: dict[str, tuple[int, ...]] = {"A_log": (inner, order)}
        rows = order if self.projected is None else self.projected
        shapes["x_proj.weight"] = (dt_rank + 2 * rows, inner)
        if self.projected is None:
            return shapes
        pair = (2,) if self.complex else ()
        shapes["B_map"] = (inner, *pair, order, self.projected)
        shapes["C_map"] = (inner, *pair, self.projected, order)
        shapes["orders"] = (inner,)
        return shapes | {"A_imag": (inner, order)} if self.complex else shapes


def require_maps(given: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Finite tensors of these shapes, and orders of which there are so many states."""
    for name, value in given.items():
        if not isinstance(value, Tensor) or tuple(value.shape) != wanted[name]:
            got = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise SequenceError(f"{name} is {got}, expected a tensor of shape {wanted[name]}")
        if value.is_complex() or not bool(torch.isfinite(value).all()):
            raise SequenceError(
                f"{name} is {value.dtype} with entries that are complex or not finite, expected numbers"
            )
    require_channel_orders(given["orders"], *wanted["A_log"])


def require_channel_orders(orders: Tensor, inner: int, most: int) -> None:
    """One for each of so many channels, none above the states that there are; a channel may have none."""
    if tuple(orders.shape) != (inner,):
        raise SequenceError(f"orders have shape {tuple(orders.shape)}, expected ({inner},), one a channel")
    if orders.dtype not in (torch.int32, torch.int64):
        raise SequenceError(f"orders are {orders.dtype}, expected torch.int64 or torch.int32")
    low, high = torch.stack(orders.aminmax()).tolist()
    if low < 0 or high > most:
        raise SequenceError(f"orders run from {low} to {high}, expected 0 to {most}")


def mapped(rows: Tensor, x: Tensor) -> Tensor:
    """M x for M of shape (channels, …, n) and x of shape (batch, length, n): (batch, length, channels, …).

    In float32 at least, whatever autocast says: entries of a hundred may nearly cancel, of which bfloat16 leaves
    nothing.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        product = linear(x.to(wide), rows.flatten(0, -2).to(wide))
    return product.unflatten(-1, rows.shape[:-1]).to(x.dtype)
