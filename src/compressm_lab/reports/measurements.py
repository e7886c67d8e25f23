"""The table and the picture of a result file.

Pictures are of what `compressm bench` measured, of our own results, and of the loss around a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import Any

from matplotlib.axes import Axes

from compressm_lab.reports import automatic_tables, bench_tables, memory_tables, study_tables
from compressm_lab.reports.automatic_tables import AUTOMATIC
from compressm_lab.reports.bench_tables import AXES, COSTS, PARTS, growth_axes, require_reduction, speedup_rows
from compressm_lab.reports.grid import Grid
from compressm_lab.reports.palette import BLUE, BROWN, GREEN, GREY, ORANGE, PURPLE, RED, SKY
from compressm_lab.reports.panels import picture, where_measured
from compressm_lab.reports.study_tables import RESULTS, WINDOW, by_variant, here, in_paper, mean_of, require_curves
from compressm_lab.runs.groups import grouped
from compressm_lab.runs.measurement import Measurement, MeasurementError, Row

_GROWTH_COLOURS = {"float32": BLUE, "bfloat16": ORANGE}
_BELOW: dict[str, Any] = {"ha": "left", "va": "top", "fontsize": 7, "color": GREY}
_GUIDE: dict[str, Any] = {"color": GREY, "lw": 1, "ls": "--"}


def _milliseconds(rows: Sequence[Row], column: str) -> list[float]:
    return [1e3 * float(row[column]) for row in rows]


def _both_logarithmic(axes: Axes, sizes: Sequence[float], xlabel: str, ylabel: str, fontsize: float = 10) -> None:
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes], fontsize=fontsize)
    axes.minorticks_off()


def draw_growth(measurement: Measurement, path: Path | str) -> None:
    """Draw the time of a step against its size: a panel an axis, a curve a precision, its floor dotted below."""
    found = growth_axes(measurement)
    with picture(path, columns=len(found), size=(4.6, 4.0), below=where_measured(measurement)) as figure:
        for panel, (axis, rows) in zip(figure.axes, found.items(), strict=True):
            _growth(panel, axis, rows)
            panel.set_title(bench_tables.middle_point(measurement, axis), fontsize=8)


def _growth(panel: Axes, axis: str, rows: dict[str, dict[int, Row]]) -> None:
    for precision, found in rows.items():
        sizes, colour = sorted(found), _GROWTH_COLOURS.get(precision, GREEN)
        rising = [found[size] for size in sizes]
        panel.plot(sizes, _milliseconds(rising, "step_s"), color=colour, marker="o", ms=3, label=precision)
        panel.plot(sizes, _milliseconds(rising, "floor_s"), color=colour, ls=":", label=f"{precision}, floor")
    # Slope 1 above the largest sizes: twice the size, twice the time.
    sizes = sorted({size for found in rows.values() for size in found})
    top = max(1e3 * float(row["step_s"]) for found in rows.values() for row in found.values())
    ends, line = [sizes[-1] / 8, sizes[-1]], [2 * top / 8, 2 * top]
    panel.plot(ends, line, **_GUIDE)
    middle = (sum(ends) / 3, sum(line) / 3)  # nearly (ends[0] ends[1])^½ for ends 8 apart
    panel.annotate(f"∝ {AXES[axis]}", middle, color=GREY, ha="right", va="bottom")
    _both_logarithmic(panel, sizes, f"{axis} {AXES[axis]}", "milliseconds a step", fontsize=7)
    panel.legend(fontsize=7)


_REDUCTION_CURVES = (
    ("gramians_s", "Gramians", GREEN),
    ("hankel_s", "Hankel singular values", ORANGE),
    ("reduction_s", "whole reduction", BLUE),
)


def draw_reduction_cost(measurement: Measurement, path: Path | str) -> None:
    """Draw the time of a reduction against the order, a curve a stage; LRU layers with 8 channels, cut to a quarter."""
    require_reduction(measurement)
    wanted = {"system": "initial", "width": 8, "members": 1}
    rows = [row for row in measurement.rows if wanted.items() <= row.items()]
    if len(rows) < 2:
        raise MeasurementError(f"{measurement.name}: {len(rows)} rows of one LRU layer, H = 8; a curve needs 2")
    rows.sort(key=lambda row: float(row["order"]))
    orders = [float(row["order"]) for row in rows]
    with picture(path, size=(7.0, 4.6)) as figure:
        (axes,) = figure.axes
        for prefix, said, line in (("", "", "-"), ("plain_", ", plain formulas", ":")):
            for column, label, colour in _REDUCTION_CURVES:
                if all(f"{prefix}{column}" in row for row in rows):
                    times = _milliseconds(rows, f"{prefix}{column}")
                    axes.plot(orders, times, line, color=colour, label=f"{label}{said}", marker="o", ms=3)
        _guides(axes, orders, 1e3 * float(rows[-1]["reduction_s"]))
        _both_logarithmic(axes, orders, "order n", "milliseconds")
        axes.set(title="Cost of one reduction, n → n/4, of an LRU layer with 8 channels")
        axes.legend(fontsize=8)
        axes.text(0, -0.16, where_measured(measurement), transform=axes.transAxes, **_BELOW)


def _guides(axes: Axes, orders: list[float], top: float) -> None:
    """Draw slopes n² and n³ below the largest orders, named at their right ends, where no curve goes on."""
    ends = [orders[-1] / 4, orders[-1]]
    beside: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "annotation_clip": False}
    for power, name, height in ((2, "n²", 0.01), (3, "n³", 0.3)):
        line = [height * top * (order / ends[-1]) ** power for order in ends]
        axes.plot(ends, line, **_GUIDE)
        axes.annotate(name, (ends[-1], line[-1]), **beside, color=GREY, va="center")


# Of the costs by order, and of the parts of a training.
_SPEEDUP_COLOURS = (BLUE, GREEN, RED, PURPLE)


def draw_speedup(measurement: Measurement, path: Path | str) -> None:
    """Draw costs by order, and bars of a whole training where there is a schedule."""
    costs, schedules = speedup_rows(measurement)
    with picture(path, columns=2 if schedules else 1, size=(5.4, 4.0)) as figure:
        _costs(figure.axes[0], costs)
        if schedules:
            _bars(figure.axes[1], schedules[-1])
        figure.axes[0].text(0, -0.17, where_measured(measurement), transform=figure.axes[0].transAxes, **_BELOW)


def _costs(axes: Axes, rows: list[Row]) -> None:
    orders = [float(row["order"]) for row in rows]
    for (label, column), colour in zip(COSTS.items(), _SPEEDUP_COLOURS, strict=True):
        times = _milliseconds(rows, column)
        if any(times):
            axes.plot(orders, times, color=colour, marker="o", ms=4, label=label)
    _both_logarithmic(axes, orders, "order n", "milliseconds")
    axes.set(title=f"{rows[0]['recipe']}: what things cost")
    # Half a decade of room, so that the legend covers no line.
    axes.set_ylim(top=axes.get_ylim()[1] * 4)
    axes.legend(fontsize=8, ncols=2, loc="upper left")


def _bars(axes: Axes, row: Row) -> None:
    """Draw the training that is never cut, then the other: as predicted, and as measured where it was checked."""
    ways = {"predicted": "", **({"measured": "measured_"} if "measured_speedup" in row else {})}
    for place, prefix in enumerate(ways.values()):
        whole = float(row[f"{prefix}whole_s"])
        axes.barh(place, whole, color=GREY, height=0.55)
        axes.text(whole, place, f" {whole:.3g} s", va="center", fontsize=8)
    for place, prefix in enumerate(ways.values(), start=len(ways)):
        left = 0.0
        for (part, name), colour in zip(PARTS.items(), _SPEEDUP_COLOURS, strict=True):
            width, label = float(row[f"{prefix}{part}_s"]), None if prefix else name
            if width:
                axes.barh(place, width, left=left, color=colour, height=0.55, label=label)
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
    """σ of all states of one system, and for some orders the bound and the true H∞ error, all over ‖G‖∞."""

    title: str
    sigma: list[float]
    orders: list[int]
    bounds: list[float]
    errors: list[float]


def draw_reduction_error(curves: list[ReductionCurve], path: Path | str) -> Path:
    """Draw Hankel singular values, bounds and errors by order, a panel a system."""
    with picture(path, columns=len(curves), size=(5.2, 4.0)) as figure:
        for axes, curve in zip(figure.axes, curves, strict=True):
            ranks = range(1, len(curve.sigma) + 1)
            axes.semilogy(ranks, curve.sigma, color=GREY, lw=2, label="Hankel singular value $\\sigma_r$")
            axes.semilogy(curve.orders, curve.bounds, color=ORANGE, label="bound  $2\\,\\Sigma_{i>r}\\,\\sigma_i$")
            axes.semilogy(curve.orders, curve.errors, "o", color=BLUE, ms=4, label="true error  $\\|G-G_r\\|_\\infty$")
            axes.axhline(1, color=RED, lw=0.8, ls=":", label="as large as the system")
            axes.set(title=curve.title, xlabel="states kept, r", ylabel="relative to $\\|G\\|_\\infty$")
            axes.legend(fontsize=8, loc="lower left")
    return Path(path)


_GENTLY = ("cut gently", GREEN, "D")
# What a variant is called in the picture, and how it looks, by the first of these words in its label.
_FAMILIES = {
    ", penalty": ("automatic, under a penalty", PURPLE, "v"),
    "automatic": ("automatic", RED, "*"),
    "before training": ("cut before training", SKY, "<"),
    "moments anew": ("late, moments anew", BROWN, ">"),
    "in the warm-up": ("four cuts in the warm-up", ORANGE, "s"),
    "late to": ("four late cuts", SKY, "^"),
    "paper's way": ("cut with τ, in the paper's way", ORANGE, "s"),
    "τ": ("cut with τ", BLUE, "o"),
    "gently": _GENTLY,
    "four cuts": ("cut four times", GREEN, "D"),
    "Σσ": ("Σσ penalty, then cut", PURPLE, "v"),
    "largest": ("largest σ kept", GREEN, "D"),
    "random": ("random states kept", ORANGE, "s"),
    "smallest": ("smallest σ kept", RED, "v"),
    "taught": ("taught by the whole model", RED, "^"),
}
_START = ("from the start", GREY, "o")
RANGE = 12.0  # points of accuracy that are shown below the best


def draw_results(measurement: Measurement, path: Path | str) -> None:
    """Draw accuracy by order, hollow points the paper's; beside it by time, where trainings had a machine alone."""
    alone = all(row.get("together", 2) == 1 for row in measurement.rows)
    size = (5.2 if alone else 6.4, 4.4)
    with picture(path, columns=1 + alone, size=size, below=trained_on(measurement)) as figure:
        _draw_orders(figure.axes[0], measurement)
        figure.axes[0].legend(fontsize=8)
        if alone:
            _draw_times(figure.axes[1], measurement)
            figure.suptitle(measurement.title)
        else:
            figure.axes[0].set_title(measurement.title)


def _draw_orders(panel: Axes, measurement: Measurement) -> None:
    groups = by_variant(measurement)
    lowest = max(mean_of(rows, "best") for rows in groups.values()) - RANGE
    tolerances = any(variant.startswith("τ") for variant in groups)
    beside, most = False, max(map(len, groups.values()))
    rising = sorted(groups, key=lambda variant: mean_of(groups[variant], "order"))
    for (name, colour, marker), variants in grouped(rising, family).items():
        once = " (1 seed)" if max(len(groups[variant]) for variant in variants) == 1 < most else ""
        accuracies = {variant: mean_of(groups[variant], "best") for variant in variants}
        below = ", ".join(f"{value:.0f} %" for value in accuracies.values() if value < lowest)
        shown = [groups[variant] for variant, value in accuracies.items() if value >= lowest]
        orders, means = ([mean_of(rows, column) for rows in shown] for column in ("order", "best"))
        spreads = [stdev(float(row["best"]) for row in rows) if len(rows) > 1 else 0.0 for rows in shown]
        size = 11 if marker == "*" else 6  # a star's points take most of it
        label = f"{name}{once}" + (f" (far below: {below})" if below else "")
        panel.errorbar(orders, means, spreads, marker=marker, color=colour, lw=1, ms=size, capsize=3, label=label)
        paper = sorted({found for variant in variants if (found := in_paper(measurement, variant))})
        if paper and (name != _GENTLY[0] or not tolerances):  # the paper's are those of its tolerances
            panel.plot(*zip(*paper, strict=True), marker, color=colour, mfc="white", ms=7, ls=":", lw=0.8)
            beside = True
    if beside:
        panel.plot([], [], "o", color=GREY, mfc="white", label="hollow: the paper, its best three seeds")
    ticks = _apart(sorted({round(mean_of(rows, "order")) for rows in groups.values()}))
    panel.set(xscale="log", xlabel="states at the end", ylabel="test accuracy, %")
    panel.set_xticks(ticks, [str(order) for order in ticks])
    panel.minorticks_off()


def draw_fronts(measurements: Sequence[Measurement], path: Path | str) -> None:
    """Draw accuracy by order of several results, a panel each, with one legend."""
    columns = min(3, len(measurements))
    rows = -(-len(measurements) // columns)
    below = "; ".join(dict.fromkeys(trained_on(measurement) for measurement in measurements))
    with picture(path, columns=columns, rows=rows, size=(4.6, 3.6), below=below) as figure:
        panels = figure.axes
        for panel, measurement in zip(panels, measurements, strict=False):
            _draw_orders(panel, measurement)
            panel.set_title(measurement.title.partition(":")[0])
        for panel in panels[len(measurements) :]:
            panel.set_axis_off()
        found: dict[str, Any] = {}
        for panel in panels:
            found |= {label: line for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
        figure.legend(list(found.values()), list(found), loc="outside upper center", ncols=4, fontsize=8)


def _draw_times(panel: Axes, measurement: Measurement) -> None:
    """Draw every training by itself; names stand beside their first."""
    longest = max(float(row["seconds"]) for row in here(measurement, measurement.rows))
    for variant, everywhere in by_variant(measurement).items():
        rows = here(measurement, everywhere)
        if not rows:
            continue
        _, colour, marker = family(variant)
        times, accuracies = ([float(row[column]) for row in rows] for column in ("seconds", "best"))
        panel.plot(times, accuracies, marker, color=colour, ms=7)
        place, side = ((-9, 0), "right") if times[0] > 0.75 * longest else ((9, 0), "left")
        panel.annotate(variant, (times[0], accuracies[0]), place, textcoords="offset points", va="center", ha=side)
    panel.set(xlabel="whole run, seconds", xlim=(0, None))


def family(variant: str) -> tuple[str, str, str]:
    """Name, colour and marker of what belongs together."""
    return next((found for word, found in _FAMILIES.items() if word in variant), _START)


def _apart(orders: list[int]) -> list[int]:
    """The orders that can be read beside each other on a logarithmic axis."""
    shown: list[int] = []
    for order in orders:
        if not shown or order > 1.25 * shown[-1]:
            shown.append(order)
    return shown


def trained_on(measurement: Measurement) -> str:
    """Seeds, machines, date and commit, for below a picture."""
    where, counts = measurement.environment, {len(rows) for rows in by_variant(measurement).values()}
    few, most = min(counts), max(counts)
    seeds = f"{most} seed{'s' * (most > 1)}" if few == most else f"{few} to {most} seeds"
    others = sorted({str(row.get("machine", where.machine)) for row in measurement.rows} - {where.machine})
    beside = f" and {', '.join(others)}" if others else ""
    return f"{seeds}, {where.machine}{beside}, {where.date[:10]}, {where.commit}"


def draw_strips(measurement: Measurement, path: Path | str) -> None:
    """Draw seeds as points and their means as bars; what lies far below the best is written at the edge."""
    groups = {variant: sorted(float(row["best"]) for row in rows) for variant, rows in by_variant(measurement).items()}
    best = max(values[-1] for values in groups.values())
    shown = {variant: [value for value in values if value > best - RANGE] for variant, values in groups.items()}
    edge = min(value for values in shown.values() for value in values)
    room = 0.3 if shown != groups else 0.05  # for what is written at the edge
    left, right = edge - room * (best - edge) - 0.1, best + 0.05 * (best - edge) + 0.05
    with picture(path, size=(7.4, 1.3 + 0.3 * len(groups)), below=trained_on(measurement)) as figure:
        (panel,) = figure.axes
        for k, (variant, values) in enumerate(groups.items()):
            _, colour, _ = family(variant)
            panel.plot(shown[variant], [k] * len(shown[variant]), "o", color=colour, ms=6, alpha=0.7, mec="none")
            if len(values) > 1 and len(values) == len(shown[variant]):
                panel.plot(fmean(values), k, "|", color=colour, ms=15, mew=2)
            if below := [value for value in values if value not in shown[variant]]:
                said = ", ".join(f"{value:.1f}" for value in below)
                panel.annotate(f"← {said}", (left, k), (4, 0), textcoords="offset points", va="center", fontsize=8)
        panel.set(xlim=(left, right), xlabel="test accuracy, %", title=measurement.title)
        names = list(groups)
        if len({len(values) for values in groups.values()}) > 1:
            names = [f"{name} ({len(values)} seed{'s' * (len(values) > 1)})" for name, values in groups.items()]
        panel.set_yticks(range(len(groups)), names)
        panel.set_ylim(len(groups) - 0.5, -0.5)


# Colour and line of the ways that have one of their own.
_LOOK = {
    "uncut": (GREY, "-"),
    "paper": (RED, "-"),
    "restart": (ORANGE, "--"),
    "transport": (BLUE, "-"),
    "measured": (GREEN, "-."),
}


def draw_loss_curves(measurement: Measurement, path: Path | str) -> None:
    """Draw the loss around a cut: left running means with the spread of uncut runs, right the difference to them."""
    ways = require_curves(measurement)
    steps = sorted(int(column) for column in measurement.rows[0] if column[0] in "+-")
    # (steps, seeds) of every way.
    curves = {way: [[float(row[f"{step:+d}"]) for row in rows] for step in steps] for way, rows in ways.items()}
    with picture(path, columns=2, size=(5.6, 3.8), below=where_measured(measurement)) as figure:
        left, right = figure.axes
        _losses(left, steps[WINDOW - 1 :], curves)
        _differences(right, steps, curves)
        for axes in (left, right):
            axes.axvline(0.5, color=GREY, lw=1, ls=":")
            axes.set(xlabel="step, counted from the cut")
            axes.legend(fontsize=8)


def _losses(axes: Axes, steps: list[int], curves: dict[str, list[list[float]]]) -> None:
    """Draw means over the seeds, each of the last `WINDOW` steps."""
    for way, curve in curves.items():
        ends = range(WINDOW, len(curve) + 1)
        running = [[mean(losses) for losses in zip(*curve[end - WINDOW : end], strict=True)] for end in ends]
        centre = [mean(losses) for losses in running]
        if way == "uncut":
            width = [2 * stdev(losses) for losses in running]
            low, high = ([c + sign * w for c, w in zip(centre, width, strict=True)] for sign in (-1, 1))
            axes.fill_between(steps, low, high, color=GREY, alpha=0.2, lw=0, label="uncut, 2 standard deviations")
        colour, line = _LOOK.get(way, (PURPLE, "-"))
        axes.plot(steps, centre, line, color=colour, lw=1.3, label=way)
    axes.set(ylabel=f"training loss, mean of the last {WINDOW} steps", title="Mean over the seeds")


def _differences(axes: Axes, steps: list[int], curves: dict[str, list[list[float]]]) -> None:
    first = steps.index(0)
    for way, curve in curves.items():
        colour, line = _LOOK.get(way, (PURPLE, "-"))
        pairs = zip(curve[first:], curves["uncut"][first:], strict=True)
        apart = [mean(a - b for a, b in zip(*pair, strict=True)) for pair in pairs]
        axes.plot(steps[first:], apart, line, color=colour, lw=1.3, label=way)
    axes.set(ylabel="loss − loss uncut", title="On the same batches, step by step")


_PICTURES: dict[str, Callable[[Measurement, Path], None]] = {
    "reduction": draw_reduction_cost,
    "growth": draw_growth,
    "loss_continuity": draw_loss_curves,
    "speedup": draw_speedup,
    **dict.fromkeys((*RESULTS, *AUTOMATIC), draw_results),
    "results-smnist-choices": draw_strips,
    "results-smnist-selection": draw_strips,
}


def draw(measurement: Measurement, path: Path) -> Path:
    """Draw the picture of a result, where its kind has one, and return its path."""
    if measurement.name not in _PICTURES:
        raise MeasurementError(f"no picture for results named {measurement.name!r}, only for {', '.join(_PICTURES)}")
    _PICTURES[measurement.name](measurement, path)
    return path


_GRIDS = bench_tables.GRIDS | study_tables.GRIDS | automatic_tables.GRIDS | memory_tables.GRIDS


def grids(measurement: Measurement) -> list[Grid]:
    """The tables of a result of any benchmark or study."""
    if measurement.name not in _GRIDS:
        raise MeasurementError(f"no table for results named {measurement.name!r}, only for {', '.join(_GRIDS)}")
    return _GRIDS[measurement.name](measurement)


def markdown(measurement: Measurement) -> str:
    """The tables of a result in Markdown: one as it is, several with their titles."""
    tables = grids(measurement)
    if len(tables) == 1:
        return tables[0].markdown()
    return "\n\n".join(f"{table.title} ({table.caption}):\n\n{table.markdown()}" for table in tables)
