"""The cost of a reduction against the order, on log-log axes with n² and n³ guides (fig:reduction-complexity)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressm.reports.canvas import BLUE, GREEN, GREY, ORANGE, picture, where_measured
from compressm.reports.reduction_tables import require_reduction
from compressm.runs.measurement import Measurement, MeasurementError, Row

_CURVES = (
    ("gramians_s", "Gramians", GREEN, "-"),
    ("hankel_s", "Hankel singular values", ORANGE, "-"),
    ("reduction_s", "whole reduction", BLUE, "-"),
    ("plain_gramians_s", "Gramians, plain formulas", GREEN, ":"),
    ("plain_hankel_s", "Hankel singular values, plain formulas", ORANGE, ":"),
    ("plain_reduction_s", "whole reduction, plain formulas", BLUE, ":"),
)


def draw_reduction_cost(measurement: Measurement, path: Path | str) -> Path:
    """One curve a stage; the systems are LRU layers at initialisation with 8 channels, reduced to a quarter."""
    require_reduction(measurement)
    rows = _single_layers(measurement)
    orders = [float(row["order"]) for row in rows]
    with picture(path, size=(7.0, 4.6)) as figure:
        (axes,) = figure.axes
        for column, label, colour, line in _CURVES:
            if all(column in row for row in rows):
                times = [1e3 * float(row[column]) for row in rows]
                axes.plot(orders, times, line, color=colour, label=label, marker="o", ms=3)
        _guides(axes, orders, 1e3 * float(rows[-1]["reduction_s"]))
        axes.set(xscale="log", yscale="log", xlabel="order n", ylabel="milliseconds")
        axes.set(title="Cost of one reduction, n → n/4, of an LRU layer with 8 channels")
        axes.set_xticks(orders, [f"{order:g}" for order in orders])
        axes.minorticks_off()
        axes.legend(fontsize=8)
        small: dict[str, Any] = {"fontsize": 7, "color": GREY, "transform": axes.transAxes}
        axes.text(0, -0.16, where_measured(measurement), ha="left", va="top", **small)
    return Path(path)


def _single_layers(measurement: Measurement) -> list[Row]:
    wanted = ("initial", 8, 1)
    rows = [row for row in measurement.rows if (row.get("system"), row.get("width"), row.get("members")) == wanted]
    if len(rows) < 2:
        raise MeasurementError(f"{measurement.name}: {len(rows)} rows of one LRU layer, H = 8; a curve needs 2")
    return sorted(rows, key=lambda row: float(row["order"]))


def _guides(axes, orders: list[float], top: float) -> None:
    """Slopes n² and n³ below the largest orders, named at their right ends, where no curve goes on."""
    ends = [orders[-1] / 4, orders[-1]]
    for power, height in ((2, 0.01), (3, 0.3)):
        line = [height * top * (order / ends[-1]) ** power for order in ends]
        axes.plot(ends, line, color=GREY, lw=1, ls="--")
        name, beside = "n²" if power == 2 else "n³", {"xytext": (5, 0), "textcoords": "offset points"}
        axes.annotate(name, (ends[-1], line[-1]), **beside, color=GREY, va="center", annotation_clip=False)
