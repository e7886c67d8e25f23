"""Checks of a model's sizes, tensors and lengths, where they enter; and padding set to zero."""

from __future__ import annotations

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from compressm.layers import SequenceError
from compressm.layers.base import MOST, require_at_most
from compressm.ops.block.pooling import valid_rows
from compressm.ops.dispatch import can_read


def require_counts(*, at_least: int = 1, at_most: int = MOST, **given: int) -> None:
    """Require integers from `at_least` to `at_most`."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise SequenceError(f"{name} is {value!r:.100}, expected an integer of at least {at_least}")
        require_at_most(name, value, at_most)


def require_choice(name: str, value: object, kind: type, known: tuple[type, ...]) -> None:
    """Require an object of `kind`; for a name, a class or a module of torch, the error says what to write."""
    if isinstance(value, kind):
        return
    said = value if isinstance(value, str) else (value if isinstance(value, type) else type(value)).__name__
    near = [one.__name__ for one in known if said and said.lower() in one.__name__.lower()]
    advice = f": write {name}=compressm.models.{near[0]}()" if near else ""
    names = ", ".join(f"{one.__name__}()" for one in known)
    raise SequenceError(f"{name} is {value!r:.80}, expected one of {names}{advice}")


def require_tensor(name: str, tensor: Tensor, axes: tuple[str | int, ...], like: Tensor) -> None:
    """Require a tensor with these axes, none empty, on the device of `like`; a number in `axes` is a fixed size."""
    expected = f"({', '.join(map(str, axes))}{',' if len(axes) == 1 else ''})"
    if not isinstance(tensor, Tensor) or tensor.ndim != len(axes):
        got = f"of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise SequenceError(f"{name} is {got}, expected a tensor of shape {expected}")
    if tensor.layout is not torch.strided:
        raise SequenceError(f"{name} has the layout {tensor.layout}, expected a dense tensor: call to_dense()")
    for axis, size in zip(axes, tensor.shape, strict=True):
        if isinstance(axis, int) and size != axis:
            raise SequenceError(f"{name} is of shape {tuple(tensor.shape)}, expected {expected}")
        if size == 0:
            raise SequenceError(f"{name} is of shape {tuple(tensor.shape)}: {axis} is 0, expected at least 1")
    if tensor.device != like.device:
        raise SequenceError(f"{name} is on {tensor.device}, expected {like.device}, the device of the parameters")


def require_lengths(lengths: Tensor | None, x: Tensor, axes: tuple[str | int, ...]) -> None:
    """Require an integer from 1 to the length for each sequence of `x`; the last of `axes` is the length."""
    if lengths is None:
        return
    *sequences, length = x.shape[: len(axes)]
    require_tensor("lengths", lengths, tuple(sequences), x)
    if lengths.dtype not in (torch.int32, torch.int64):
        raise SequenceError(f"lengths are {lengths.dtype}, expected torch.int64 or torch.int32")
    require_within("lengths", lengths, 1, length)


def require_within(name: str, values: Tensor, low: int, high: int) -> None:
    """Require all values from `low` to `high`, where values can be read."""
    if not can_read(values):
        return
    least, most = torch.stack(torch.aminmax(values)).tolist()
    if least < low or most > high:
        raise SequenceError(f"{name} run from {least} to {most}, expected {low} to {high}")


def without_padding(
    x: Shaped[Tensor, "batch *rest"], lengths: Int[Tensor, " batch"] | None
) -> Shaped[Tensor, "batch *rest"]:
    """Set x to zero at and after `lengths`, if lengths are given."""
    return x if lengths is None else valid_rows(x, lengths)
