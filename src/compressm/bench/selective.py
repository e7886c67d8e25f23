"""The selective scan at many orders, forward and with gradients, beside the least that a GPU could need.

The least is the longer of two times. *Exponentials*: B·L·H·N forward, one a state, channel and step, and as many more
for the backward pass, which computes the states again and could keep exp(Δ a) for its way back; over what the special
function units give, 16 results a clock and multiprocessor (CUDA C++ Programming Guide, throughput of native arithmetic,
compute capability 9.0). *Bytes*: u, Δ, B, C read and y written once; with gradients dy read, u, Δ, B and C read again,
and du, dΔ, dB, dC written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from compressm.bench.ceilings import copy_rate
from compressm.bench.timing import median_seconds, threads_for
from compressm.ops.selective import selective_scan
from compressm.runs.measurement import Measurement, Row

_EXPONENTIALS_A_CLOCK = 16
_ORDERS = (128, 64, 32, 16, 12, 8)


class Sizes(NamedTuple):
    """Of a layer, and how its activations are stored."""

    batch: int
    length: int
    channels: int
    dtype: torch.dtype


# The one that other people's kernels were measured at, and one that a core can do.
SIZES = {"cuda": Sizes(32, 4096, 512, torch.bfloat16), "cpu": Sizes(4, 512, 64, torch.float32)}


def measure_selective(
    orders: Iterable[int] = _ORDERS,
    *,
    device: str = "cpu",
    sizes: Sizes | None = None,
    repeats: int = 9,
    progress: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """With softplus and D inside, as other people's kernels have them; on the CPU with one thread."""
    where = torch.device(device)
    chosen = sizes or SIZES[where.type]
    rows: list[Row] = []
    with threads_for(where):
        bytes_a_second = copy_rate(where, repeats)
        for n in orders:
            progress(f"n = {n}")
            rows.append(_row(n, chosen, where, repeats, bytes_a_second))
        return Measurement("selective", "A selective scan, forward and with gradients", repeats, rows)


def _row(n: int, sizes: Sizes, device: torch.device, repeats: int, bytes_a_second: float) -> Row:
    inputs, bias, dy = _inputs(n, sizes, device)
    u, delta, A, B, C, D = inputs

    def forward() -> Tensor:
        return selective_scan(u, delta, A, B, C, D, delta_bias=bias, softplus=True, keep_state=False)[0]

    def both() -> None:
        torch.autograd.grad(forward(), [*inputs, bias], dy)

    with torch.no_grad():
        forward_s = median_seconds(forward, repeats=repeats, device=device)
    both_s = median_seconds(both, repeats=repeats, device=device)
    names = {"batch": sizes.batch, "length": sizes.length, "channels": sizes.channels}
    row: Row = {**names, "order": n, "precision": str(sizes.dtype).removeprefix("torch."), "device": device.type}
    row |= {"forward_s": forward_s, "both_s": both_s}
    if device.type == "cuda":
        one, two = floors(n, sizes, device, bytes_a_second)
        row |= {"floor_forward_s": one, "floor_both_s": two}
    return row


def _inputs(n: int, sizes: Sizes, device: torch.device) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    batch, length, channels, dtype = sizes
    A = -torch.arange(1.0, n + 1, device=device).repeat(channels, 1) * torch.exp(0.1 * normal(channels, n))
    u, delta, dy = (normal(batch, length, channels).to(dtype) for _ in range(3))
    B, C = (normal(batch, length, n).to(dtype) for _ in range(2))
    inputs = [u, delta, A, B, C, normal(channels)]
    bias = normal(channels) - 4
    return [tensor.requires_grad_() for tensor in inputs], bias.requires_grad_(), dy


def floors(n: int, sizes: Sizes, device: torch.device, bytes_a_second: float) -> tuple[float, float]:
    """Seconds forward and in all."""
    found = torch.cuda.get_device_properties(device)
    clock = getattr(found, "clock_rate", 1_980_000) * 1e3  # of the device, in kHz
    exponentials_a_second = _EXPONENTIALS_A_CLOCK * found.multi_processor_count * clock
    steps, element = sizes.batch * sizes.length, sizes.dtype.itemsize
    exponentials = steps * sizes.channels * n
    wide, narrow = steps * sizes.channels * element, 2 * steps * n * element
    forward = max(exponentials / exponentials_a_second, (3 * wide + narrow) / bytes_a_second)
    both = max(2 * exponentials / exponentials_a_second, (8 * wide + 3 * narrow) / bytes_a_second)
    return forward, both
