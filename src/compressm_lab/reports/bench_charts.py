"""Pictures of what `compressm bench` measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from compressm_lab.reports.bench_tables import (
    AXES,
    PARTS,
    cost_rows,
    growth_rows,
    middle_point,
    require_growth,
    require_reduction,
    require_speedup,
    schedule_rows,
)
from compressm_lab.reports.panels import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, picture, where_measured
from compressm_lab.runs.measurement import Measurement, MeasurementError, Row

_GROWTH_COLOURS = {"float32": BLUE, "bfloat16": ORANGE}


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
        sizes, colour = sorted(found), _GROWTH_COLOURS.get(precision, GREEN)
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


_REDUCTION_CURVES = (
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
        for column, label, colour, line in _REDUCTION_CURVES:
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


_SPEEDUP_CURVES = {
    "train_s": ("gradient step", BLUE),
    "evaluate_s": ("evaluation", GREEN),
    "cut_s": ("cut from n", RED),
    "recapture_s": ("recording anew", PURPLE),
}
_SPEEDUP_COLOURS = dict(zip(PARTS, (BLUE, GREEN, RED, PURPLE), strict=True))


def draw_speedup(measurement: Measurement, path: Path | str) -> Path:
    """One panel of costs, and one of bars where there is a schedule."""
    require_speedup(measurement)
    found = schedule_rows(measurement)
    with picture(path, columns=2 if found else 1, size=(5.4, 4.0)) as figure:
        _costs(figure.axes[0], cost_rows(measurement))
        if found:
            _bars(figure.axes[1], found[-1])
        small: dict[str, Any] = {"fontsize": 7, "color": GREY, "transform": figure.axes[0].transAxes}
        figure.axes[0].text(0, -0.17, where_measured(measurement), ha="left", va="top", **small)
    return Path(path)


def _costs(axes: Axes, rows: list[Row]) -> None:
    orders = [float(row["order"]) for row in rows]
    for column, (label, colour) in _SPEEDUP_CURVES.items():
        times = [1e3 * float(row[column]) for row in rows]
        if any(times):
            axes.plot(orders, times, color=colour, marker="o", ms=4, label=label)
    axes.set(xscale="log", yscale="log", xlabel="order n", ylabel="milliseconds")
    axes.set(title=f"{rows[0]['recipe']}: what things cost")
    axes.set_xticks(orders, [f"{order:g}" for order in orders])
    axes.minorticks_off()
    # Half a decade of room, so that the legend covers no line.
    axes.set_ylim(top=axes.get_ylim()[1] * 4)
    axes.legend(fontsize=8, ncols=2, loc="upper left")


def _bars(axes: Axes, row: Row) -> None:
    """What was predicted and, where it was checked, what came: of the training that is never cut, then of the other."""
    ways = {"predicted": "", **({"measured": "measured_"} if "measured_speedup" in row else {})}
    for place, prefix in enumerate(ways.values()):
        whole = float(row[f"{prefix}whole_s"])
        axes.barh(place, whole, color=GREY, height=0.55)
        axes.text(whole, place, f" {whole:.3g} s", va="center", fontsize=8)
    for place, prefix in enumerate(ways.values(), start=len(ways)):
        left = 0.0
        for part, label in PARTS.items():
            width = float(row[f"{prefix}{part}_s"])
            if width:
                axes.barh(
                    place, width, left=left, color=_SPEEDUP_COLOURS[part], height=0.55, label=None if prefix else label
                )
            left += width
        axes.text(left, place, f" {left:.3g} s, {float(row[f'{prefix}speedup']):.2f} ×", va="center", fontsize=8)
    names = [f"{what},\n{way}" for what in ("never cut", "cut") for way in ways]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="seconds", title=f"{row['steps']} steps, n = {row['orders']}")
    axes.title.set_fontsize(9)
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))


@dataclass(frozen=True)
class ReductionCurve:
    """Of one system: σ of all states, and for some orders the bound and the true H∞ error, all over ‖G‖∞."""

    title: str
    sigma: list[float]
    orders: list[int]
    bounds: list[float]
    errors: list[float]


def draw_reduction_error(curves: list[ReductionCurve], path: Path | str) -> Path:
    """One panel a system."""
    with picture(path, columns=len(curves), size=(5.2, 4.0)) as figure:
        for axes, curve in zip(figure.axes, curves, strict=True):
            axes.semilogy(
                range(1, len(curve.sigma) + 1), curve.sigma, color=GREY, lw=2, label="Hankel singular value $\\sigma_r$"
            )
            axes.semilogy(curve.orders, curve.bounds, color=ORANGE, label="bound  $2\\,\\Sigma_{i>r}\\,\\sigma_i$")
            axes.semilogy(curve.orders, curve.errors, "o", color=BLUE, ms=4, label="true error  $\\|G-G_r\\|_\\infty$")
            axes.axhline(1, color=RED, lw=0.8, ls=":", label="as large as the system")
            axes.set(title=curve.title, xlabel="states kept, r", ylabel="relative to $\\|G\\|_\\infty$")
            axes.legend(fontsize=8, loc="lower left")
    return Path(path)
