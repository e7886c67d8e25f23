"""Time a training step against the order n, the length L and the width H, each around one middle point."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from compressm_lab.bench.timing import Progress, columns, silent, threads_for
from compressm_lab.bench.train_step import StepCase, ceilings_here, measure_step
from compressm_lab.runs.measurement import Measurement, Row

RANGES = {
    "order": tuple(2**k for k in range(3, 11)),
    "length": tuple(4**k for k in range(4, 9)),
    "width": tuple(2**k for k in range(3, 11)),
}
MIDDLE = StepCase(task="growth", depth=2, width=64, order=64, batch=16, length=1024, inputs=1, classes=10)
# The batch stays the same along every axis. 16 sequences of 65536 steps need some 10 GB, and a GPU is still busy at the
# small end; one thread of a CPU would take minutes at the large one, so it gets 2.
BATCH = {"cpu": 2, "cuda": 16}
_LONGEST_S = 10.0  # for one point, after one repeat


def measure_growth(
    axes: Iterable[str] | None = None,
    *,
    device: str = "cpu",
    precisions: Iterable[str] | None = None,
    repeats: int = 9,
    compiled: bool = False,
    progress: Progress = silent,
) -> Measurement:
    """Time a step at every point of every axis; on the CPU with one thread, in float32, on a GPU in bfloat16 too."""
    where = torch.device(device)
    chosen = tuple(precisions or (("float32",) if where.type == "cpu" else ("float32", "bfloat16")))
    rows: list[Row] = []
    measured: dict[StepCase, Row] = {}
    with threads_for(where):
        ceilings = ceilings_here(where, progress)
        for axis, case in growth_cases(axes or RANGES, where.type, chosen, compiled):
            if case not in measured:  # the middle point is on every axis
                progress(f"{axis}: n = {case.order}, L = {case.length}, H = {case.width}, {case.precision}")
                measured[case] = measure_step(case, where, repeats, ceilings(case.precision), within=_LONGEST_S)
            sizes = columns(case, "order", "length", "width", "depth", "batch", "precision", "compiled")
            rows.append({"axis": axis, **sizes, "device": where.type, **measured[case]})
        return Measurement("growth", "One training step against n, L and H", repeats, rows)


def growth_cases(
    axes: Iterable[str], device: str, precisions: Iterable[str], compiled: bool = False
) -> list[tuple[str, StepCase]]:
    """Every point of every axis in every precision."""
    middle = replace(MIDDLE, batch=BATCH[device], compiled=compiled)
    return [
        (axis, replace(middle, precision=precision, **{axis: size}))
        for precision in precisions
        for axis in axes
        for size in RANGES[axis]
    ]
