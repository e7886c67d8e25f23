"""The answer, first of all: one sentence, and one picture of accuracy by states and of a layer as it shrinks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from compressm_lab.reports.grid import order as said_order
from compressm_lab.reports.hankel_charts import histories
from compressm_lab.reports.outcome_charts import best_known, colours_of, metric_name, scale
from compressm_lab.reports.palette import BLUE, GREY, INK, ORANGE
from compressm_lab.reports.panels import Chart, Panel, count_steps, plain_ticks, tick_powers, write_files
from compressm_lab.runs.groups import Group, Statistic, by_name, grouped, reference, speed_up, time_kind
from compressm_lab.runs.measurement import Measurement
from compressm_lab.runs.run import Run

# Points with a label beside each; more would cover each other, and the section on accuracy has them all.
_LABELLED = 7
# Of the height of a panel, between two labels of two lines; of its width, between two points of one column.
_APART, _COLUMN = 0.155, 0.2
# Of the height, by which labels under an arrow are lower; factor between the places of two points with as many states.
_LOWER, _BESIDE = 0.09, 1.06
# Of the height: the highest and the lowest label.
_TOP, _BOTTOM = 0.96, 0.06
# Of the height, between a point and a label that a line leads to.
_FAR_FROM_POINT = 0.1
# Of the width of a panel: points left of the one have their labels on the right, so far beside them as the other says.
_MIDDLE, _BEYOND = 0.6, 0.035
# Steps that are shown, as a multiple of the step of the last cut; orders that are written above the states.
_AFTER, _WRITTEN = 1.45, 8
# Lines of states in one panel, and decades below the largest value.
_LINES, _DECADES = 64, 5
# Inches of a panel; points below its title, for the numbers above the states.
_SIZE, _PAD = (4.6, 3.1), 17.0
# The models of the demo: words for one with so many states at the end, and its colour.
_DEMO = {
    "large": ("{} states", INK),
    "small": ("{} from the start", GREY),
    "compressed": ("cut to {}", BLUE),
    "white noise": ("cut to {}, white noise", ORANGE),
}
# Orders that differ by less than this part count as one, when models of one size are compared.
_ALIKE = 0.1


@dataclass(frozen=True)
class Point:
    """Models with some number of states at the end, and what they reach, as the axis has it; `label` says which."""

    label: str
    states: float
    value: float
    spread: float | None
    said: str
    colour: str


@dataclass(frozen=True)
class Shrinking:
    """The spectra of one layer, (step, σ), and its path of orders, (step, order from there on), up to a step."""

    spectra: Sequence[tuple[int, Sequence[float]]]
    path: Sequence[tuple[int, int]]
    last: int

    @classmethod
    def of(cls, run: Run) -> Shrinking | None:
        """Take the first layer of a run, up to a while after its last cut; None without spectra or cuts."""
        found = histories(run)
        if not found or not run.cut_records:
            return None
        path = run.order_paths[found[0].module]
        last = math.ceil(min(run.steps, max(step for step, _ in path) * _AFTER))
        spectra = [(snapshot.step, snapshot.sigma) for snapshot in found[0].snapshots if snapshot.step <= last]
        return cls(spectra, path, last) if len(spectra) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """The comparison of a recipe: the models that were cut, and those they are held against.

    `cut` is the group with the best validation among those that were cut; `large` has its order at the start, `small`
    that at the end.
    """

    cut: Group
    large: Group | None
    small: Group | None
    ways: int

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Comparison | None:
        """Compare the groups of one recipe; None where none was cut to its end."""
        every = [
            group for group in groups if group.compressed and group.top() and _mean_order(group) < group.initial_order
        ]
        if not every:
            return None
        cut = max(every, key=_validation)
        plain = [group for group in groups if group.plain and group.order and group.top()]
        large, small = (_nearest(plain, wanted) for wanted in (cut.initial_order, _mean_order(cut)))
        return cls(cut, large, None if small is large else small, len(every))


def answers(groups: Sequence[Group]) -> list[str]:
    """Say in one sentence a recipe what came out."""
    return [said for name, own in by_name(groups).items() if (said := _answer(name, own, groups))]


def answer_chart(groups: Sequence[Group], *, spectra: bool = True) -> Chart | None:
    """A row a recipe: test by the number of states, and a layer as it shrinks; None where nothing has finished."""
    rows: list[tuple[Panel, ...]] = []
    colours, shrinks = colours_of(groups), False
    for name, own in by_name(group for group in groups if group.top() and group.order).items():
        compared = Comparison.of(own)
        known = own if len(own) <= _LABELLED else _foremost(own, compared)
        points = {id(group): _point(group, compared, colours) for group in known}
        arrow = None
        if compared is not None and compared.large is not None:
            arrow = points[id(compared.large)], points[id(compared.cut)]
        title = f"{name}: {_metric(own[0])}"
        panels = [states_panel(title, metric_name(own[0]) + _better(own[0]), list(points.values()), arrow)]
        if spectra and compared is not None and (shrinking := Shrinking.of(compared.cut.shown)):
            panels.append(shrinking_panel(shrinking, points[id(compared.cut)].colour))
            shrinks = True
        rows.append(tuple(panels))
    if not rows:
        return None
    caption = (
        "Means over the seeds that finished, of more than three the three best by validation; bars are one standard "
        "deviation. The axis of states is logarithmic."
    )
    if shrinks:
        caption += (
            " On the right each line is a state of the first layer: its Hankel singular value σ, which says how much "
            "it matters. Dotted lines are cuts, the numbers above say how many states are left."
        )
    return Chart("answer", "", caption, tuple(rows), size=_SIZE)


def _answer(name: str, groups: list[Group], every: Sequence[Group]) -> str:
    compared = Comparison.of(groups)
    if compared is None:
        known = [group for group in groups if group.top()]
        said = [f"{_value(group)} with {said_order(group.order)} states ({group.label})" for group in known[:4]]
        return f"{name}, {_metric(known[0])}{_better(known[0])}: {', '.join(said)}." if said else ""
    cut, seeds = compared.cut, len(compared.cut.finished)
    words = [
        f"{name}: models that begin with {cut.initial_order:g} states and are cut to {said_order(cut.order)} while they"
        f" train reach {_value(cut)} ({_metric(cut)}{_better(cut)}; {seeds} seed{'s' if seeds > 1 else ''})"
    ]
    against = [
        f"{said_order(group.order)} states {how} reach {_value(group)}"
        for group, how in ((compared.large, "to the end"), (compared.small, "from the start"))
        if group is not None
    ]
    if against:
        words.append(f"; models with {' and models with '.join(against)}")
    ups = speed_up(cut, every)
    if ups is not None and compared.large is reference(cut, every):
        words.append(f". Training takes {100 / ups.centre:.0f} % of the {time_kind(cut, every)} of the large ones")
    if compared.ways > 1:
        words.append(f". Of {compared.ways} ways to cut, this is the best by validation ({cut.label})")
    return "".join(words) + "."


def _metric(group: Group) -> str:
    return metric_name(group).removesuffix(", %")


def _better(group: Group) -> str:
    return "" if group.metric == "accuracy" else ", lower is better"


def _value(group: Group) -> str:
    sample = best_known(group)
    assert sample is not None
    value = scale(group, sample.centre)
    return f"{value:.1f}\u00a0%" if group.metric == "accuracy" else f"{value:.3g}"


def _validation(group: Group) -> float:
    """The mean of the best validation values of its seeds, higher is better."""
    found = [score.rank for run in group.ranked if (score := group.score(run))]
    return fmean(found) if found else -math.inf


def _mean_order(group: Group) -> float:
    return math.inf if group.order is None else group.order.centre


def _nearest(groups: Sequence[Group], order: float) -> Group | None:
    near = [group for group in groups if abs(_mean_order(group) - order) <= _ALIKE * order]
    return min(near, key=lambda group: abs(_mean_order(group) - order), default=None)


def _foremost(groups: list[Group], compared: Comparison | None) -> list[Group]:
    """The groups that a picture with few labels shows: those that are compared, then the best others."""
    first = [] if compared is None else [group for group in (compared.cut, compared.large, compared.small) if group]
    others = sorted((group for group in groups if group not in first), key=_validation, reverse=True)
    kept = [*first, *others][:_LABELLED]
    return [group for group in groups if group in kept]


def _point(group: Group, compared: Comparison | None, colours: Mapping[tuple[str, str], str]) -> Point:
    """The point of a group; its label says what was done."""
    sample, states = best_known(group), said_order(group.order).split(" ± ")[0]
    assert sample is not None
    if compared is None or not (group.plain or group.compressed):
        label = f"{group.label}, {states} states"
    elif group is compared.cut:
        label = f"cut to {states}"
    elif group.compressed:
        label = f"cut to {states}, {group.label}"
    else:
        label = f"{states} states" if group is compared.large else f"{states} from the start"
    spread = None if sample.spread is None else scale(group, sample.spread)
    colour = colours[group.name, group.label]
    return Point(label, _mean_order(group), scale(group, sample.centre), spread, _value(group), colour)


def draw_demo(results: Measurement, spectra: Measurement, path: Path) -> None:
    """Draw the first picture of the README: the models of `compressm demo`, and the spectra of one of its layers."""
    groups = {label: list(rows) for label, rows in grouped(results.rows, lambda row: str(row["model"])).items()}
    points = {}
    for label, (said, colour) in _DEMO.items():
        found = Statistic.of(float(row["accuracy"]) for row in groups[label])
        states = fmean(float(row["order"]) for row in groups[label])
        assert found is not None
        points[label] = Point(
            said.format(f"{states:g}"), states, found.centre, found.spread, f"{found.centre:.1f} %", colour
        )
    title, metric = "handwritten digits: test accuracy", "test accuracy, %"
    left = states_panel(title, metric, list(points.values()), (points["large"], points["compressed"]))
    snapshots = [(int(row["step"]), [float(value) for value in str(row["sigma"]).split()]) for row in spectra.rows]
    path_of_orders = [(int(row["step"]), int(row["order"])) for row in spectra.rows]
    changes = [path_of_orders[0], *(b for a, b in pairwise(path_of_orders) if a[1] != b[1])]
    last = min(snapshots[-1][0], math.ceil(changes[-1][0] * _AFTER))
    shrinking = Shrinking([pair for pair in snapshots if pair[0] <= last], changes, last)
    chart = Chart(path.stem, "", "", ((left, shrinking_panel(shrinking, points["compressed"].colour)),), size=_SIZE)
    write_files(chart, path.parent, [path.suffix.removeprefix(".")])


def states_panel(title: str, metric: str, points: Sequence[Point], arrow: tuple[Point, Point] | None) -> Panel:
    """Values by the number of states, each point with its label; the arrow leads to where a training ended."""
    places = _side_by_side(points)

    def draw(axes: Axes) -> None:
        for point, x in zip(points, places, strict=True):
            style: dict[str, Any] = {"color": point.colour, "zorder": 3}
            axes.errorbar(x, point.value, yerr=point.spread, lw=1.3, capsize=2.5, **style)
            axes.scatter(x, point.value, s=52, **style)
        axes.set(xlabel="states of a layer at the end", ylabel=metric, xscale="log")
        # Above the points is room for the arrow.
        low, high = axes.get_ylim()
        axes.set_ylim(low - 0.04 * (high - low), high + (0.26 if arrow else 0.04) * (high - low))
        fewest, most = (extreme(point.states for point in points) for extreme in (min, max))
        wide = most > fewest
        axes.set_xlim(fewest / (1.5 if wide else 4), most * (1.6 if wide else 4))
        tick_powers(axes)
        if metric.endswith("%"):
            axes.set_yticks([tick for tick in axes.get_yticks() if axes.get_ylim()[0] <= tick <= 100])
        if arrow is not None:
            _draw_arrow(axes, *arrow)
        _label_points(axes, points, places, arrow or ())

    return Panel(title, "; ".join(f"{point.label}: {point.said}" for point in points), draw, pad=_PAD)


def _side_by_side(points: Sequence[Point]) -> list[float]:
    """Places along the axis of states, apart where several points have as many: bars would hide each other."""
    places = [point.states for point in points]
    for states in set(places):
        alike = [k for k, point in enumerate(points) if point.states == states]
        for place, k in enumerate(alike):
            places[k] *= _BESIDE ** (place - (len(alike) - 1) / 2)
    return places


def _draw_arrow(axes: Axes, start: Point, end: Point) -> None:
    """An arrow above the points, from where models begin to where they end."""
    style = {"arrowstyle": "-|>", "color": end.colour, "lw": 1.4, "shrinkA": 7, "shrinkB": 7, "mutation_scale": 13}
    ends: dict[str, Any] = {"xy": (end.states, end.value), "xytext": (start.states, start.value)}
    axes.annotate("", **ends, arrowprops={**style, "connectionstyle": "arc3,rad=0.22"}, zorder=2)
    middle = math.sqrt(start.states * end.states), max(start.value, end.value)
    words: dict[str, Any] = {"xytext": (0, 31), "textcoords": "offset points", "ha": "center", "fontsize": 8.5}
    axes.annotate("shrinks while it trains", middle, color=end.colour, **words)


def _label_points(axes: Axes, points: Sequence[Point], places: Sequence[float], below: Sequence[Point]) -> None:
    """Write the label of every point beside it, those of one column of points apart from each other.

    Labels of points `below` an arrow are a little lower.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    spots = [tuple(map(float, to_axes.transform((x, point.value)))) for point, x in zip(points, places, strict=True)]
    columns: list[list[int]] = []
    for k in sorted(range(len(points)), key=lambda k: spots[k][0]):
        if columns and spots[k][0] - spots[columns[-1][0]][0] < _COLUMN:
            columns[-1].append(k)
        else:
            columns.append([k])
    for column in columns:
        xs = [spots[k][0] for k in column]
        right = xs[0] < _MIDDLE
        side = max(xs) + _BEYOND if right else min(xs) - _BEYOND
        # The arrow comes from above: no label of its column is higher than that of its end.
        ceiling = min((spots[k][1] - _LOWER for k in column if points[k] in below), default=_TOP)
        heights = _pushed_apart([spots[k][1] for k in column], ceiling)
        for k, height in zip(column, heights, strict=True):
            if abs(height - spots[k][1]) > _FAR_FROM_POINT:
                ends = [spots[k][0], side], [spots[k][1], height]
                axes.plot(*ends, color=points[k].colour, lw=0.9, transform=axes.transAxes, zorder=2)
            style: dict[str, Any] = {"transform": axes.transAxes, "ha": "left" if right else "right", "color": INK}
            axes.text(side, height + 0.005, points[k].label, va="bottom", fontsize=8.5, **style)
            axes.text(side, height - 0.005, points[k].said, va="top", fontsize=9.5, weight="bold", **style)


def _pushed_apart(heights: Sequence[float], ceiling: float) -> list[float]:
    """Heights at least `_APART` from each other, in their order: the highest at most at a ceiling, the others below.

    Where that would lead below the axis, the lowest stays on it, and the others go up.
    """
    found = list(heights)
    falling = sorted(range(len(heights)), key=lambda k: -heights[k])
    for place, k in enumerate(falling):
        found[k] = min(heights[k], found[falling[place - 1]] - _APART if place else ceiling)
    for place, k in enumerate(reversed(falling)):
        found[k] = max(found[k], found[falling[-place]] + _APART if place else _BOTTOM)
    return found


def shrinking_panel(shrinking: Shrinking, colour: str) -> Panel:
    """The states of a layer over training, one line each; those that stay to the end are wide."""

    def draw(axes: Axes) -> None:
        _draw_states(axes, shrinking, colour)
        count_steps(axes, shrinking.last)
        axes.set_ylabel("σ, how much a state matters")
        _write_orders(axes, shrinking.path)

    said = ", ".join(f"{order} states from step {step}" for step, order in shrinking.path)
    return Panel("a layer while it trains: one line a state", said, draw, pad=_PAD)


def _draw_states(axes: Axes, shrinking: Shrinking, colour: str) -> None:
    """Draw every state by its rank, up to the last snapshot that has it."""
    count, kept = len(shrinking.spectra[0][1]), shrinking.path[-1][1]
    thinned = {round(k * (count - 1) / (_LINES - 1)) for k in range(_LINES)}
    steps = [step for step, _ in shrinking.spectra]
    found: list[float] = []
    for rank in sorted(k for k in {*range(kept), *thinned} if k < count):
        values = [sigma[rank] if rank < len(sigma) else 0.0 for _, sigma in shrinking.spectra]
        found += [value for value in values if value > 0]
        stays: dict[str, Any] = {"color": colour, "lw": 2.0, "zorder": 3}
        line = [value if value > 0 else math.nan for value in values]
        axes.plot(steps, line, **(stays if rank < kept else {"color": GREY, "lw": 0.8, "alpha": 0.7}))
    if found:
        axes.set_yscale("log")
        axes.set_ylim(max(min(found) / 1.6, max(found) * 10.0**-_DECADES), 1.8 * max(found))
        plain_ticks(axes)


def _write_orders(axes: Axes, path: Sequence[tuple[int, int]]) -> None:
    """Write above the panel how many states there are between two cuts, and draw a line at each."""
    _, end = axes.get_xlim()
    for step, _ in path[1:]:
        axes.axvline(step, color=INK, lw=0.9, ls=":", alpha=0.75, zorder=1.5)
    steps = [*(step for step, _ in path), end]
    for k in range(len(path)) if len(path) <= _WRITTEN else (0, len(path) - 1):
        words = f"{path[k][1]} states" if k == len(path) - 1 else str(path[k][1])
        middle = (steps[k] + steps[k + 1]) / 2
        axes.text(middle, 1.015, words, transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=8.5)
