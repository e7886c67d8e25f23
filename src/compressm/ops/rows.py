"""Sequences as kernels read them: one piece of memory a step, all steps one distance apart."""

from __future__ import annotations

import torch
from torch import Tensor


def rows(x: Tensor) -> tuple[Tensor, int]:
    """x (batch, length, …) as it is where it lies so, as half of a projection does, else a copy; and the distance."""
    dense = torch.empty(x.shape[2:], device="meta").stride()
    if x.stride()[2:] != dense or (x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1)):
        x = x.contiguous()
    return x, x.stride(1)
