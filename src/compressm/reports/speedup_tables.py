"""What steps, evaluations and cuts cost, and the speed-up that they predict beside the one that came."""

from __future__ import annotations

from compressm.reports.grid import Grid, duration
from compressm.reports.wording import NOTHING
from compressm.runs.measurement import Measurement, MeasurementError, Row

_WORDS = ("what", "recipe", "device", "orders")
PARTS = {"training": "steps", "evaluation": "evaluations", "cuts": "cuts", "recaptures": "recordings"}
_COSTS = ("order", "train_s", "evaluate_s", "cut_s", "recapture_s")
_PREDICTED = ("steps", "orders", "whole_s", "speedup", *(f"{part}_s" for part in PARTS))


def require_speedup(measurement: Measurement) -> None:
    """A result of `compressm bench speedup`, with costs in it."""
    measurement.require("speedup", needed=("what", "recipe", "device"), words=_WORDS)
    for k, row in enumerate(measurement.rows):
        needed = _COSTS if row["what"] == "costs" else _PREDICTED
        if missing := [column for column in needed if column not in row]:
            raise MeasurementError(f"not a result of `compressm bench speedup`: row {k} lacks {', '.join(missing)}")
    if not cost_rows(measurement):
        raise MeasurementError("not a result of `compressm bench speedup`: no row has costs")


def cost_rows(measurement: Measurement) -> list[Row]:
    """By order, rising."""
    return sorted((row for row in measurement.rows if row["what"] == "costs"), key=lambda row: float(row["order"]))


def schedule_rows(measurement: Measurement) -> list[Row]:
    """Those that were predicted, the last of them checked."""
    return [row for row in measurement.rows if row["what"] == "schedule"]


def speedup_grids(measurement: Measurement) -> list[Grid]:
    """One table of costs, one of schedules."""
    require_speedup(measurement)
    heads = ("n", "gradient step", "evaluation", "cut from n", "recording anew")
    rows = tuple(
        (f"{float(row['order']):g}", *(duration(float(row[column])) for column in _COSTS[1:]))
        for row in cost_rows(measurement)
    )
    recipe = str(measurement.rows[0]["recipe"])
    costs = Grid(f"{recipe}: costs by order", heads, rows, "medians; an evaluation is of validation and test")
    return [costs, *(_schedule(row, recipe) for row in schedule_rows(measurement))]


def _schedule(row: Row, recipe: str) -> Grid:
    """A row a part of the training: as predicted and, where it was checked, as measured."""
    measured = _times(row, "measured_") if "measured_speedup" in row else [NOTHING] * (3 + len(PARTS))
    parts = ("never cut", "cut", *(f"of it {name}" for name in PARTS.values()), "speed-up")
    rows = tuple(zip(parts, _times(row, ""), measured, strict=True))
    caption = "whole trainings, checkpoints left out; predicted by the formula of app:time"
    return Grid(f"{recipe}, {row['steps']} steps, n = {row['orders']}", ("", "predicted", "measured"), rows, caption)


def _times(row: Row, prefix: str) -> list[str]:
    parts = [float(row[f"{prefix}{part}_s"]) for part in PARTS]
    times = [float(row[f"{prefix}whole_s"]), sum(parts), *parts]
    return [*map(duration, times), f"{float(row[f'{prefix}speedup']):.2f} ×"]
