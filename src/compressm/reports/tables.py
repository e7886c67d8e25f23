"""Measurements as tables."""

from __future__ import annotations

from collections.abc import Callable

from compressm.reports.cut_tables import cut_grids
from compressm.reports.demo_tables import demo_grids
from compressm.reports.grid import Grid
from compressm.reports.mamba_tables import imdb_mamba_grids, selective_cuts_grids
from compressm.reports.reduction_tables import reduction_grids
from compressm.reports.regulariser_tables import regulariser_grids
from compressm.reports.result_tables import TASKS as RESULTS
from compressm.reports.result_tables import result_grids
from compressm.reports.scan_tables import peer_grids, scan_grids, selective_grids
from compressm.reports.setting_tables import setting_grids
from compressm.reports.speedup_tables import speedup_grids
from compressm.reports.step_tables import growth_grids, step_grids
from compressm.reports.study_tables import hidden_system_grids, loss_continuity_grids, one_shot_grids
from compressm.runs.measurement import Measurement, MeasurementError

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
