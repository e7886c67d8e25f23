"""Nested containers of tensors and numbers: all that a checkpoint may hold, so that reading it runs no code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressm.errors import SavingError

_LEAVES = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)
_ALLOWED = "tensors, numbers, text, None, and dicts, lists, tuples and sets of them"


def plain(value: Any, where: str) -> Any:
    """The same value in types that torch.load(weights_only=True) reads; anything else is refused by its place."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if isinstance(value, Tensor):
        return _stored(value, where)
    if isinstance(value, dict):
        items = [(plain(key, f"a key of {where}"), plain(item, f"{where}[{key!r}]")) for key, item in value.items()]
        # A MultiStepLR asks its milestones for what only a Counter has.
        return kind(dict(items)) if kind in (Counter, OrderedDict) else dict(items)
    if kind in (list, tuple, set):
        return kind(plain(item, f"{where}[{k}]") for k, item in enumerate(value))
    if isinstance(value, np.generic):
        return plain(value.item(), where)
    for leaf in (int, float, str):
        if isinstance(value, leaf) and not isinstance(value, Enum):
            return leaf(value)
    raise SavingError(f"{where} is a {kind.__module__}.{kind.__qualname__}, expected {_ALLOWED}")


def _stored(value: Tensor, where: str) -> Tensor:
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise SavingError(f"{where} is a {type(value).__name__}, expected a plain tensor: gather what is sharded")
    detached = value.detach()
    # The whole memory behind a tensor is written, also that of the states a slice left out.
    return detached.clone() if detached.untyped_storage().nbytes() > detached.nbytes else detached
