"""The loss around a cut in several ways, and how far each is from the same training without it."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev

from compressm_lab.reports.panels import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, picture, where_measured
from compressm_lab.reports.study_tables import WINDOW, require_curves, rows_of, ways
from compressm_lab.runs.measurement import Measurement

# Colour and line of the ways that have one of their own.
_LOOK = {
    "uncut": (GREY, "-"),
    "paper": (RED, "-"),
    "restart": (ORANGE, "--"),
    "transport": (BLUE, "-"),
    "measured": (GREEN, "-."),
}


def draw_loss_curves(measurement: Measurement, path: Path | str) -> Path:
    """Left running means with two standard deviations of the uncut runs, right step by step the difference to those."""
    require_curves(measurement)
    steps = sorted(int(column) for column in measurement.rows[0] if column[0] in "+-")
    curves = {way: _values(measurement, way, steps) for way in ways(measurement)}
    with picture(path, columns=2, size=(5.6, 3.8)) as figure:
        left, right = figure.axes
        _losses(left, steps[WINDOW - 1 :], {way: _running(curve) for way, curve in curves.items()})
        _differences(right, [step for step in steps if step >= 0], curves, steps.index(0))
        for axes in (left, right):
            axes.axvline(0.5, color=GREY, lw=1, ls=":")
            axes.set(xlabel="step, counted from the cut")
            axes.legend(fontsize=8)
        figure.supxlabel(where_measured(measurement), x=0.01, ha="left", fontsize=7, color=GREY)
    return Path(path)


def _values(measurement: Measurement, way: str, steps: list[int]) -> list[list[float]]:
    """(steps, seeds)."""
    return [[float(row[f"{step:+d}"]) for row in rows_of(measurement, way)] for step in steps]


def _running(curve: list[list[float]]) -> list[list[float]]:
    """Of each seed, the mean of the last `WINDOW` steps."""
    ends = range(WINDOW, len(curve) + 1)
    return [[mean(losses) for losses in zip(*curve[end - WINDOW : end], strict=True)] for end in ends]


def _losses(axes, steps: list[int], curves: dict[str, list[list[float]]]) -> None:
    centre = [mean(losses) for losses in curves["uncut"]]
    width = [2 * stdev(losses) for losses in curves["uncut"]]
    low, high = ([c + sign * w for c, w in zip(centre, width, strict=True)] for sign in (-1, 1))
    axes.fill_between(steps, low, high, color=GREY, alpha=0.2, lw=0, label="uncut, 2 standard deviations")
    for way, curve in curves.items():
        colour, line = _LOOK.get(way, (PURPLE, "-"))
        axes.plot(steps, [mean(losses) for losses in curve], line, color=colour, lw=1.3, label=way)
    axes.set(ylabel=f"training loss, mean of the last {WINDOW} steps", title="Mean over the seeds")


def _differences(axes, steps: list[int], curves: dict[str, list[list[float]]], first: int) -> None:
    for way, curve in curves.items():
        colour, line = _LOOK.get(way, (PURPLE, "-"))
        pairs = zip(curve[first:], curves["uncut"][first:], strict=True)
        apart = [mean(a - b for a, b in zip(*pair, strict=True)) for pair in pairs]
        axes.plot(steps, apart, line, color=colour, lw=1.3, label=way)
    axes.set(ylabel="loss − loss uncut", title="On the same batches, step by step")
