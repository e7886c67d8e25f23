"""How exactly a model computes: a dtype of the activations, and whether products may round to TF32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Within it, float32 products run in TF32 if that is what `precision` says, and exactly otherwise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
