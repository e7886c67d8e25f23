"""How fast this device can multiply, move and launch: measured, not read off a data sheet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compressm.bench.capture import capture
from compressm.bench.timing import best_seconds
from compressm.training.precision import DTYPES, products_in

# Large enough that neither grows when doubled; on a CPU still some 20 ms each on one thread.
_PRODUCT = {"cpu": 1024, "cuda": 8192}
_COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
_LAUNCHES = 500


@dataclass(frozen=True)
class Ceilings:
    """Flop and bytes a second, and seconds a launch inside a CUDA graph (0 on a CPU, which launches nothing)."""

    flops: float
    bytes: float
    launch: float


def measure_ceilings(device: torch.device, precision: str, *, repeats: int = 9) -> Ceilings:
    """Of a large square product in `precision`, a large copy, and a row of tiny kernels; the best of `repeats`.

    On a CPU those of the threads torch has now. What fits in a cache can move faster than the copy.
    """
    return Ceilings(_product_rate(device, precision, repeats), copy_rate(device, repeats), _launch_seconds(device))


def _product_rate(device: torch.device, precision: str, repeats: int) -> float:
    size = _PRODUCT[device.type]
    matrix = torch.randn(size, size, device=device, dtype=DTYPES[precision])
    with products_in(precision):
        return 2 * size**3 / best_seconds(lambda: matrix @ matrix, repeats=repeats, device=device)


def copy_rate(device: torch.device, repeats: int) -> float:
    """Every byte is read and written."""
    source = torch.zeros(_COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source), repeats=repeats, device=device)


def _launch_seconds(device: torch.device) -> float:
    if device.type == "cpu":
        return 0.0
    counter = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            counter.add_(1)

    return best_seconds(capture(launches), repeats=5, device=device) / _LAUNCHES
