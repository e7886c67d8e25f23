"""From a result file to its table and its picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from compressm_lab.reports.bench_tables import (
    cut_grids,
    growth_grids,
    peer_grids,
    reduction_grids,
    regulariser_grids,
    scan_grids,
    selective_grids,
    speedup_grids,
    step_grids,
)
from compressm_lab.reports.grid import Grid
from compressm_lab.reports.measurement_charts import (
    draw_growth,
    draw_loss_curves,
    draw_reduction_cost,
    draw_results,
    draw_speedup,
    draw_strips,
)
from compressm_lab.reports.study_tables import (
    RESULTS,
    demo_grids,
    hidden_system_grids,
    imdb_mamba_grids,
    loss_continuity_grids,
    one_shot_grids,
    result_grids,
    selective_cuts_grids,
    setting_grids,
)
from compressm_lab.runs.measurement import Measurement, MeasurementError

_GRIDS: dict[str, Callable[[Measurement], list[Grid]]] = {
    "reduction": reduction_grids,
    "cut": cut_grids,
    "regulariser": regulariser_grids,
    "step": step_grids,
    "growth": growth_grids,
    "speedup": speedup_grids,
    "scan": scan_grids,
    "peers": peer_grids,
    "selective": selective_grids,
    "one_shot": one_shot_grids,
    "hidden_system": hidden_system_grids,
    "loss_continuity": loss_continuity_grids,
    "demo": demo_grids,
    "smnist_settings": setting_grids,
    "imdb_mamba": imdb_mamba_grids,
    "selective_cuts": selective_cuts_grids,
    **dict.fromkeys(RESULTS, result_grids),
}


def grids(measurement: Measurement) -> list[Grid]:
    """The tables of a result of any benchmark or study."""
    if measurement.name not in _GRIDS:
        raise MeasurementError(f"no table for results named {measurement.name!r}, only for {', '.join(_GRIDS)}")
    return _GRIDS[measurement.name](measurement)


def markdown(measurement: Measurement) -> str:
    """One table as it is, several with their titles."""
    tables = grids(measurement)
    if len(tables) == 1:
        return tables[0].markdown()
    return "\n\n".join(f"{table.title} ({table.caption}):\n\n{table.markdown()}" for table in tables)


_PICTURES: dict[str, Callable[[Measurement, Path], Path]] = {
    "reduction": draw_reduction_cost,
    "growth": draw_growth,
    "loss_continuity": draw_loss_curves,
    "speedup": draw_speedup,
    **dict.fromkeys(RESULTS, draw_results),
    "results-smnist-choices": draw_strips,
    "results-smnist-selection": draw_strips,
}


def draw(measurement: Measurement, path: Path) -> Path:
    """The picture of a result, where its kind has one."""
    if measurement.name not in _PICTURES:
        raise MeasurementError(f"no picture for results named {measurement.name!r}, only for {', '.join(_PICTURES)}")
    return _PICTURES[measurement.name](measurement, path)
