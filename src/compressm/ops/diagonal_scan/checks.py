"""Refuse what the op cannot mean, before any work."""

from __future__ import annotations

import torch
from torch import Tensor

from compressm.ops.errors import SequenceError

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def require_shapes(**given: tuple[Tensor | None, tuple[str | int, ...]]) -> dict[str, int]:
    """Each tensor against its named axes; a name must mean one size everywhere. Returns the sizes."""
    sizes: dict[str, int] = {}
    for name, (tensor, axes) in given.items():
        if tensor is None:
            continue
        shape = ", ".join(str(axis) for axis in axes)
        if not isinstance(tensor, Tensor) or tensor.ndim != len(axes):
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise SequenceError(f"{name} is {got}, expected a tensor of shape ({shape})")
        for axis, size in zip(axes, tensor.shape, strict=True):
            expected = axis if isinstance(axis, int) else sizes.setdefault(axis, size)
            if size != expected:
                raise SequenceError(
                    f"{name} has shape {tuple(tensor.shape)}, expected ({shape}) with {axis} = {expected}"
                )
            if size == 0:
                raise SequenceError(f"{name} has shape {tuple(tensor.shape)}: {axis} is 0, expected at least 1")
    return sizes


def require_floats_on_one_device(**given: Tensor | None) -> None:
    """Real floating point, all on the device of the first."""
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    first = next(iter(tensors))
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise SequenceError(f"{name} has dtype {tensor.dtype}, expected one of {', '.join(map(str, _FLOATS))}")
        if tensor.device != tensors[first].device:
            raise SequenceError(f"{name} is on {tensor.device}, {first} on {tensors[first].device}")


def require_lengths(lengths: Tensor | None, batch: int, length: int) -> None:
    """One integer from 1 to `length` for each sequence."""
    if lengths is None:
        return
    if not isinstance(lengths, Tensor) or lengths.shape != (batch,) or lengths.dtype not in (torch.int32, torch.int64):
        got = f"{lengths.dtype} {tuple(lengths.shape)}" if isinstance(lengths, Tensor) else repr(lengths)
        raise SequenceError(f"lengths are {got}, expected an integer tensor of shape ({batch},)")
    if lengths.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # a graph that is being recorded cannot be asked for values
    low, high = torch.stack(lengths.aminmax()).tolist()
    if low < 1 or high > length:
        raise SequenceError(f"lengths run from {low} to {high}, expected 1 to {length}")
