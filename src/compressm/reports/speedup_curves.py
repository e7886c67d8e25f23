"""Costs against the order, and whole trainings as predicted beside as measured (fig:timer, app:time)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from compressm.reports.canvas import BLUE, GREEN, GREY, PURPLE, RED, picture, where_measured
from compressm.reports.speedup_tables import PARTS, cost_rows, require_speedup, schedule_rows
from compressm.runs.measurement import Measurement, Row

_CURVES = {
    "train_s": ("gradient step", BLUE),
    "evaluate_s": ("evaluation", GREEN),
    "cut_s": ("cut from n", RED),
    "recapture_s": ("recording anew", PURPLE),
}
_COLOURS = dict(zip(PARTS, (BLUE, GREEN, RED, PURPLE), strict=True))


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
    for column, (label, colour) in _CURVES.items():
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
                axes.barh(place, width, left=left, color=_COLOURS[part], height=0.55, label=None if prefix else label)
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
