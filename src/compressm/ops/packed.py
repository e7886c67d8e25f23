"""Several steps of few channels side by side in one row, so that loops and products on a CPU run over longer rows."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

MANY = 4096  # steps from which a packed product, with its zeros, saves more than its weight takes to write


def steps_a_row(columns: int, width: int, steps: int) -> int:
    """As many as fit into `columns` and divide `steps`; at least one."""
    return math.gcd(max(columns // width, 1), steps)


def packed_weight(weight: Float[Tensor, "q p"], steps: int) -> Float[Tensor, "sq sp"]:
    """W for each of `steps` side by side: blocks on a diagonal."""
    if steps == 1:
        return weight
    blocks = torch.eye(steps, dtype=weight.dtype, device=weight.device)[:, None, :, None] * weight[:, None, :]
    return blocks.flatten(2).flatten(0, 1)


def packed_row(row: Float[Tensor, "*rest width"], steps: int) -> Float[Tensor, "*rest sw"]:
    """A row that counts for every step, `steps` times side by side."""
    return row[..., None, :].expand(*row.shape[:-1], steps, row.shape[-1]).flatten(-2)
