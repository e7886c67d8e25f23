"""Matrix products whose sums are kept as they are."""

from __future__ import annotations

import torch
from torch import Tensor


def product_in(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """a @ b in `dtype`: straight from the float32 sums where the device can."""
    if a.is_cuda and a.dtype != dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)
