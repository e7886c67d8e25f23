"""A cut, stage by stage, `compressm bench cut`."""

from __future__ import annotations

from compressm.reports.grid import Grid, duration
from compressm.runs.measurement import Measurement, Row

# Head, and the columns of which it is the sum.
_STAGES = {
    "read": ("read_s",),
    "calibrate": ("calibrate_s",),
    "spectrum": ("spectra_s",),
    "balance, cut": ("reduce_s",),
    "encode, write": ("encode_s", "write_s"),
    "moments": ("optimizer_s",),
    "first step": ("first_step_s",),
    "all": ("total_s",),
}
_COLUMNS = tuple(column for columns in _STAGES.values() for column in columns)
_WORDS = ("task", "precision", "gramian", "moments", "ranks", "device", "run")
_MODEL = ("layers", "order", "rank", "width")
_CAPTION = "medians of warm cuts, in brackets the first cut of a process; on a GPU the first step is recorded anew"


def cut_grids(measurement: Measurement) -> list[Grid]:
    """One table a model: a row a stage, a column for every choice of P and moments."""
    measurement.require("cut", needed=(*_MODEL, *_WORDS, *_COLUMNS), words=_WORDS)
    models: dict[tuple[object, ...], list[Row]] = {}
    for row in measurement.rows:
        models.setdefault(tuple(row[name] for name in _MODEL), []).append(row)
    return [_grid(rows) for rows in models.values()]


def _grid(rows: list[Row]) -> Grid:
    variants: dict[str, dict[str, Row]] = {}
    for row in rows:
        name = str(row["moments"]) + (", measured P" if row["gramian"] == "measured" else "")
        name += ", unequal" if row["ranks"] == "unequal" else ""
        variants.setdefault(name, {})[str(row["run"])] = row
    used = [stage for stage, names in _STAGES.items() if any(float(row[name]) > 0 for row in rows for name in names)]
    cells = tuple((stage, *(_cell(stage, runs) for runs in variants.values())) for stage in used)
    layers, order, rank, width = (rows[0][name] for name in _MODEL)
    title = f"One cut: {layers} layer(s) of {width} channels, {order} → {rank} states"
    return Grid(title, ("stage", *variants), cells, _CAPTION)


def _cell(stage: str, runs: dict[str, Row]) -> str:
    times = {run: sum(float(row[name]) for name in _STAGES[stage]) for run, row in runs.items()}
    if not any(times.values()):
        return ""
    cold = f" ({duration(times['cold'])})" if "cold" in times else ""
    return (duration(times["warm"]) if "warm" in times else "") + cold
