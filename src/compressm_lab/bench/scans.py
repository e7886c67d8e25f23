"""Time one layer by every path of `lti_layer`, and the scan of Mamba layers, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from compressm.ops import Path, lti_layer
from compressm.ops.lti.cost import cheapest_path
from compressm.ops.selective import selective_scan
from compressm_lab.bench.timing import Progress, copy_rate, measure_each, median_seconds, silent, threads_for
from compressm_lab.runs.measurement import Measurement, Row

# (batch, length, n, channels): the paper's sMNIST layer at three orders, then narrow, square and wide ones.
SHAPES = (
    *((50, 784, 256, 8), (50, 784, 28, 8), (50, 784, 13, 8), (16, 512, 128, 4)),
    *((32, 64, 64, 16), (32, 64, 64, 64), (8, 256, 16, 64), (4, 1024, 128, 128)),
)
PATHS = (Path.SCAN, Path.CHUNKED, Path.CONVOLUTION)
_WIDEST_CONVOLUTION = 64  # beyond, its matrices of p q responses fill gigabytes


def measure_paths(
    shapes: Iterable[tuple[int, int, int, int]] = SHAPES,
    *,
    device: str = "cpu",
    repeats: int = 9,
    progress: Progress = silent,
) -> Measurement:
    """Time each path at each shape, beside the path that the cost rule picks; on the CPU with one thread."""

    def label(shape: tuple[int, ...]) -> str:
        return "batch {}, length {}, n = {}, {} channels".format(*shape)

    title = "One layer forward and backward, by every path"
    return measure_each("scan", title, shapes, _path_row, device, repeats, progress, label)


def _path_row(shape: tuple[int, int, int, int], device: torch.device, repeats: int) -> Row:
    batch, length, n, width = shape
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand(2, n, generator=generator)
    log_poles = torch.stack([-1e-3 - 0.1 * draw[0], 6.28 * draw[1]])
    shapes = ((batch, length, width), (2, n, width), (2, width, n))
    u, B, C = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [tensor.to(device).requires_grad_() for tensor in (u, log_poles, B, C)]

    def work(path: Path) -> None:
        y, _ = lti_layer(*inputs, keep_state=False, path=path)
        torch.autograd.grad(y.sum(), inputs)

    row: Row = {"batch": batch, "length": length, "order": n, "width": width}
    for path in PATHS:
        if path is not Path.CONVOLUTION or width <= _WIDEST_CONVOLUTION:
            seconds = median_seconds(lambda path=path: work(path), repeats=repeats, device=device)  # type: ignore[misc]
            row[f"{path.name.lower()}_s"] = seconds
    chosen = cheapest_path(batch, length, n, width, width, gpu=device.type == "cuda")
    return row | {"chosen": chosen.name, "device": device.type}


_EXPONENTIALS_A_CLOCK = 16
_ORDERS = (128, 64, 32, 16, 12, 8)


class Sizes(NamedTuple):
    """The sizes of a Mamba layer, and the type of its activations."""

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
    progress: Progress = silent,
) -> Measurement:
    """Time a scan with softplus and D inside, as other people's kernels have them; on the CPU with one thread."""
    where = torch.device(device)
    with threads_for(where):
        bytes_a_second = copy_rate(where, repeats)
    row = partial(_selective_row, sizes=sizes or SIZES[where.type], bytes_a_second=bytes_a_second)
    title = "A selective scan, forward and with gradients"
    return measure_each("selective", title, orders, row, device, repeats, progress, "n = {}".format)


def _selective_row(n: int, device: torch.device, repeats: int, sizes: Sizes, bytes_a_second: float) -> Row:
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
    """The least seconds that a scan could take, forward and with gradients: by its exponentials or its bytes."""
    found = torch.cuda.get_device_properties(device)
    clock = getattr(found, "clock_rate", 1_980_000) * 1e3  # of the device, in kHz
    exponentials_a_second = _EXPONENTIALS_A_CLOCK * found.multi_processor_count * clock
    steps, element = sizes.batch * sizes.length, sizes.dtype.itemsize
    exponentials = steps * sizes.channels * n
    wide, narrow = steps * sizes.channels * element, 2 * steps * n * element
    forward = max(exponentials / exponentials_a_second, (3 * wide + narrow) / bytes_a_second)
    both = max(2 * exponentials / exponentials_a_second, (8 * wide + 3 * narrow) / bytes_a_second)
    return forward, both
