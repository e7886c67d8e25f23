"""The random numbers to come: of Python, NumPy, torch on the CPU and on every CUDA device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """All of it, in types that `plain` takes."""
    # Asking would start every device of a process that so far uses none.
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        # The global generator, which data sets and augmentations of others draw from.
        "numpy": _with_tensors(np.random.get_state(legacy=False)),  # noqa: NPY002
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if started else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse; devices that are not here are left out."""
    random.setstate(state["python"])
    np.random.set_state(_with_arrays(state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, stored in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(stored, device)


def _with_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_tensors(item) for name, item in value.items()}
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def _with_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_arrays(item) for name, item in value.items()}
    return value.numpy() if isinstance(value, Tensor) else value
