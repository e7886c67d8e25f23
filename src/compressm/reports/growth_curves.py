"""A training step against the order, the length and the width, on log-log axes with a guide of slope 1."""

from __future__ import annotations

from pathlib import Path

from compressm.reports.canvas import BLUE, GREEN, GREY, ORANGE, picture, where_measured
from compressm.reports.step_tables import AXES, growth_rows, middle_point, require_growth
from compressm.runs.measurement import Measurement, Row

_COLOURS = {"float32": BLUE, "bfloat16": ORANGE}


def draw_growth(measurement: Measurement, path: Path | str) -> Path:
    """One panel an axis, one curve a precision, its floor dotted below."""
    require_growth(measurement)
    axes_here = [axis for axis in AXES if any(row["axis"] == axis for row in measurement.rows)]
    with picture(path, columns=len(axes_here), size=(4.6, 4.0)) as figure:
        for panel, axis in zip(figure.axes, axes_here, strict=True):
            _panel(panel, measurement, axis)
        figure.supxlabel(where_measured(measurement), x=0.01, ha="left", fontsize=7, color=GREY)
    return Path(path)


def _panel(panel, measurement: Measurement, axis: str) -> None:
    rows = growth_rows(measurement, axis)
    for precision, found in rows.items():
        sizes, colour = sorted(found), _COLOURS.get(precision, GREEN)
        panel.plot(sizes, _milliseconds(found, "step_s"), color=colour, marker="o", ms=3, label=precision)
        panel.plot(sizes, _milliseconds(found, "floor_s"), color=colour, ls=":", label=f"{precision}, floor")
    sizes = sorted({size for found in rows.values() for size in found})
    _guide(panel, sizes, max(1e3 * float(row["step_s"]) for found in rows.values() for row in found.values()), axis)
    panel.set(xscale="log", yscale="log", xlabel=f"{axis} {AXES[axis]}", ylabel="milliseconds a step")
    panel.set_title(middle_point(measurement, axis), fontsize=8)
    panel.set_xticks(sizes, [f"{size:g}" for size in sizes], fontsize=7)
    panel.minorticks_off()
    panel.legend(fontsize=7)


def _milliseconds(found: dict[int, Row], column: str) -> list[float]:
    return [1e3 * float(found[size][column]) for size in sorted(found)]


def _guide(panel, sizes: list[int], top: float, axis: str) -> None:
    """Slope 1 above the largest sizes: twice the size, twice the time."""
    ends = [sizes[-1] / 8, sizes[-1]]
    line = [2 * top / 8, 2 * top]
    panel.plot(ends, line, color=GREY, lw=1, ls="--")
    middle = (sum(ends) / 3, sum(line) / 3)  # nearly (ends[0] ends[1])^½ for ends 8 apart
    panel.annotate(f"∝ {AXES[axis]}", middle, color=GREY, ha="right", va="bottom")
