"""Other data, of whatever shape, in the same parameter."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def replace_data(parameter: nn.Parameter, data: Tensor) -> None:
    """The parameter stays the same object with its hooks and attributes; its gradient, of the old data, is dropped."""
    parameter.grad = None
    # A loss of before that is still referenced holds a gradient accumulator of the old shape, with which the next
    # backward fails ("invalid gradient ... expected shape"); a change of dtype makes torch forget it.
    other = torch.float16 if parameter.dtype != torch.float16 else torch.float32
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = data
