"""Every path of `lti_layer` beside the one the cost rule picks: forward and backward of one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from compressm.bench.timing import median_seconds, threads_for
from compressm.ops import Path, lti_layer
from compressm.ops.lti.cost import cheapest_path
from compressm.runs.measurement import Measurement

# (batch, length, n, channels): the paper's sMNIST layer at three orders, then narrow, square and wide ones.
SHAPES = (
    (50, 784, 256, 8),
    (50, 784, 28, 8),
    (50, 784, 13, 8),
    (16, 512, 128, 4),
    (32, 64, 64, 16),
    (32, 64, 64, 64),
    (8, 256, 16, 64),
    (4, 1024, 128, 128),
)
PATHS = (Path.SCAN, Path.CHUNKED, Path.CONVOLUTION)
_WIDEST_CONVOLUTION = 64  # beyond, its matrices of p q responses fill gigabytes


def measure_paths(
    shapes: Iterable[tuple[int, int, int, int]] = SHAPES,
    *,
    device: str = "cpu",
    repeats: int = 9,
    progress: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Time each path at each shape; on the CPU with one thread."""
    where = torch.device(device)
    rows: list[dict[str, float | int | str]] = []
    with threads_for(where):
        for shape in shapes:
            progress("batch {}, length {}, n = {}, {} channels".format(*shape))
            rows.append(_row(*shape, where, repeats))
        return Measurement("scan", "One layer forward and backward, by every path", repeats, rows)


def _row(
    batch: int, length: int, n: int, width: int, device: torch.device, repeats: int
) -> dict[str, float | int | str]:
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand(2, n, generator=generator)
    log_poles = torch.stack([-1e-3 - 0.1 * draw[0], 6.28 * draw[1]])
    shapes = ((batch, length, width), (2, n, width), (2, width, n))
    u, B, C = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [tensor.to(device).requires_grad_() for tensor in (u, log_poles, B, C)]

    def work(path: Path) -> None:
        y, _ = lti_layer(*inputs, keep_state=False, path=path)
        torch.autograd.grad(y.sum(), inputs)

    row: dict[str, float | int | str] = {"batch": batch, "length": length, "order": n, "width": width}
    for path in PATHS:
        if path is not Path.CONVOLUTION or width <= _WIDEST_CONVOLUTION:
            seconds = median_seconds(lambda path=path: work(path), repeats=repeats, device=device)  # type: ignore[misc]
            row[f"{path.name.lower()}_s"] = seconds
    chosen = cheapest_path(batch, length, n, width, width, gpu=device.type == "cuda")
    return row | {"chosen": chosen.name, "device": device.type}
