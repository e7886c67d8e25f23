"""Tables of `python -m compressm.experiments.results`."""

from __future__ import annotations

from statistics import fmean, stdev

from compressm.reports.grid import Grid, duration
from compressm.runs.measurement import Measurement, Row

_COMMAND = "python -m compressm.experiments.results"
# Test accuracies of the paper (tab:results) where a variant stands beside one.
_PAPER = {
    "smnist": {
        "256 states": "97.3",
        "28 states": "96.0",
        "13 states": "92.6",
        "τ = 0.02": "96.9",
        "τ = 0.04": "95.9",
        "τ = 0.02, paper's way": "96.9",
        "τ = 0.04, paper's way": "95.9",
        "gently to 28": "96.9",
        "gently to 13": "95.9",
        "Σσ penalty, then cut to 28": "95.8",
    },
    "scifar": {"384 states": "86.5", "57 states": "78.2", "four cuts to 57": "84.4"},
}


def result_grids(measurement: Measurement) -> list[Grid]:
    """One row a variant: accuracy with its spread over seeds, orders, and times in the mean."""
    needed = ("variant", "seed", "steps", "initial_order", "order", "best", "last", "steps_s", "seconds", "cuts_s")
    measurement.require(measurement.name, needed=(*needed, "step_s"), words=("variant",), command=_COMMAND)
    groups: dict[str, list[Row]] = {}
    for row in measurement.rows:
        groups.setdefault(str(row["variant"]), []).append(row)
    paper = _PAPER.get(measurement.name.removeprefix("results-"), {})
    heads = ("training", "n → r", "seeds", "test accuracy", "at the end", "the paper", "gradient steps", "whole run")
    lines = tuple((name, *_cells(rows), paper.get(name, ""), *_times(rows)) for name, rows in groups.items())
    caption = (
        f"test accuracy in percent where validation was best since the last cut; {measurement.rows[0]['steps']} steps; "
        f"{_together(measurement.rows)}"
    )
    return [Grid(measurement.title, heads, lines, caption)]


def _together(rows: list[Row]) -> str:
    """How far times can be compared."""
    counts = sorted({int(row.get("together", 1)) for row in rows})
    if counts == [1]:
        return "one training at a time"
    return f"up to {counts[-1]} trainings at a time on one device, which is what their times are of"


def _cells(rows: list[Row]) -> tuple[str, ...]:
    orders = [float(row["order"]) for row in rows]
    start = fmean(float(row["initial_order"]) for row in rows)
    return f"{start:.0f} → {_spread(orders)}", str(len(rows)), _values(rows, "best"), _values(rows, "last")


def _times(rows: list[Row]) -> tuple[str, ...]:
    return tuple(duration(fmean(float(row[column]) for row in rows)) for column in ("steps_s", "seconds"))


def _values(rows: list[Row], column: str) -> str:
    return _spread([float(row[column]) for row in rows], digits=1)


def _spread(values: list[float], digits: int = 0) -> str:
    """mean ± standard deviation, where seeds differ."""
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(set(values)) == 1 else f"{mean} ± {stdev(values):.1f}"
