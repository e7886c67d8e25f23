"""Measurements as pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from compressm.reports.growth_curves import draw_growth
from compressm.reports.loss_curves import draw_loss_curves
from compressm.reports.reduction_cost import draw_reduction_cost
from compressm.reports.result_charts import draw_results
from compressm.reports.result_strips import draw_strips
from compressm.reports.result_tables import TASKS
from compressm.reports.speedup_curves import draw_speedup
from compressm.runs.measurement import Measurement, MeasurementError

_PICTURES: dict[str, Callable[[Measurement, Path], Path]] = {
    "reduction": draw_reduction_cost,
    "growth": draw_growth,
    "loss_continuity": draw_loss_curves,
    "speedup": draw_speedup,
    **dict.fromkeys(TASKS, draw_results),
    "results-smnist-choices": draw_strips,
    "results-smnist-selection": draw_strips,
}


def draw(measurement: Measurement, path: Path) -> Path:
    """The picture of a result, where its kind has one."""
    if measurement.name not in _PICTURES:
        raise MeasurementError(f"no picture for results named {measurement.name!r}, only for {', '.join(_PICTURES)}")
    return _PICTURES[measurement.name](measurement, path)
