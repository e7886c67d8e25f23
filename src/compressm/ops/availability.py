"""What can be compiled here."""

from __future__ import annotations

import importlib.util
from functools import cache


@cache
def has_triton() -> bool:
    """Whether the GPU kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None
