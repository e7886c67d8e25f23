"""The cost of a reduction, `compressm bench reduction`."""

from __future__ import annotations

from compressm.reports.grid import Grid, duration
from compressm.runs.measurement import Measurement, MeasurementError

_NEEDED = ("order", "rank", "width", "members", "system", "device", "hankel_s", "reduction_s")
_COMPARED = ("plain_hankel_s", "plain_reduction_s", "speedup")


def require_reduction(measurement: Measurement) -> None:
    """The columns that tables and pictures of a reduction read; more where it was compared with the plain formulas."""
    measurement.require("reduction", needed=_NEEDED, words=("system", "device"))
    for k, row in enumerate(measurement.rows):
        missing = [column for column in _COMPARED if column not in row]
        if missing and "plain_reduction_s" in row:
            raise MeasurementError(f"not a result of `compressm bench reduction`: row {k} lacks {', '.join(missing)}")


def reduction_grids(measurement: Measurement) -> list[Grid]:
    """One row a size."""
    require_reduction(measurement)
    compared = all("plain_reduction_s" in row for row in measurement.rows)
    heads = ["n → r", "channels", "system", "σ alone", "whole reduction"]
    heads += ["σ, plain formulas", "whole, plain formulas", "ratio"] if compared else []
    columns = ["hankel_s", "reduction_s", *(["plain_hankel_s", "plain_reduction_s"] if compared else [])]
    rows = []
    for row in measurement.rows:
        several = f"{row['members']} × " if row["members"] != 1 else ""
        cells = [f"{several}{row['order']} → {row['rank']}", str(row["width"]), str(row["system"])]
        cells += [duration(float(row[column])) for column in columns]
        rows.append((*cells, _ratio(float(row["speedup"]))) if compared else tuple(cells))
    return [Grid("One reduction", tuple(heads), tuple(rows), "median")]


def _ratio(value: float) -> str:
    """One digit after the point, or two that say how small it is."""
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"
