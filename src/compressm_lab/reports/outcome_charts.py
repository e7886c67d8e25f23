"""Accuracy against the final order and against speed-up, with baselines (fig:speedup, fig:red-perf-all)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from compressm_lab.reports.grid import plus_minus, rounded
from compressm_lab.reports.palette import BLUE, BROWN, GREEN, GREY, INK, ORANGE, PAPER, PURPLE, RED, SKY
from compressm_lab.reports.panels import Chart, Panel, legend_below, plain_ticks
from compressm_lab.runs.groups import Group, Statistic, by_name, grouped, machines, reference, speed_up, time_kind
from compressm_lab.runs.paper import Compared, Exhibit
from compressm_lab.runs.run import Run

_SHOWN = "Circles are the mean of the three best seeds by validation, or of all where there are fewer than three; bars \
are one standard deviation; groups of one order stand side by side. Black and grey are models that were trained with \
nothing added: no cuts, no penalty, no teacher."
# Of groups with nothing added, the largest first; of all others.
_PLAIN, _OTHERS = (INK, GREY, BROWN), (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
# Of an axis of orders, between two points that can be told apart, and between the first and the last of many of one
# order; and how many orders it shows at least.
_APART, _SPREAD, _NARROWEST = 0.04, 0.16, 2.0
# Times the smallest order that the largest must be, for a logarithmic axis.
_FAR = 3.0
_SPEED = "Speed-up is the {} of the uncompressed model at the order of the start over the run's own; labels are \
final orders."
_STAR: dict[str, Any] = {"marker": "*", "edgecolor": PAPER, "linewidth": 0.5}


def outcome_chart(groups: Sequence[Group]) -> Chart | str:
    """Test values against the final order and, where there is a reference, against speed-up; a row a recipe."""
    found = by_name(group for group in groups if group.top())
    if not found:
        return "No finished run has a test value yet, so there is nothing to compare."
    rows, colours = [], colours_of(groups)
    for name, own in found.items():
        timed = [group for group in own if speed_up(group, groups)]
        speeds = [_speed_panel(name, timed, groups, colours)] if timed else []
        rows.append((_order_panel(name, own, colours), *speeds))
    kinds = sorted({time_kind(group, groups) for group in groups if speed_up(group, groups)})
    said = [_SHOWN, _SPEED.format(" or ".join(kinds)) if kinds else "", missing_references(groups)]
    for name, own in found.items():
        if len(machines(run for group in own for run in group.finished)) > 1:
            said.append(f"The runs of {name} come from different machines: their times do not compare.")
            break
    return Chart("accuracy", "", " ".join(filter(None, said)), tuple(rows))


def colours_of(groups: Sequence[Group]) -> dict[tuple[str, str], str]:
    """The colour of every group by name and label: one in all pictures of a report."""
    found: dict[tuple[str, str], str] = {}
    for own in by_name(groups).values():
        for wanted, colours in ((True, _PLAIN), (False, _OTHERS)):
            alike = [group for group in own if group.plain is wanted]
            if wanted:
                alike.sort(key=lambda group: -group.initial_order)
            found |= {(g.name, g.label): colours[k % len(colours)] for k, g in enumerate(alike)}
    return found


def missing_references(groups: Sequence[Group]) -> str:
    """A sentence on the groups without a speed-up, empty where all have one."""
    without = [g for g in groups if g.compressed and g.finished and reference(g, groups) is None]
    said = [f"{group.name} ({group.label}) at order {group.initial_order:g}" for group in without]
    if not said:
        return ""
    return f"No speed-up for {', '.join(said)}: no finished uncompressed run of that name starts there."


def named(group: Group, groups: Sequence[Group]) -> str:
    """The label of a group, after its name where there are several."""
    return f"{group.name}, {group.label}" if len({other.name for other in groups}) > 1 else group.label


def best_known(group: Group) -> Statistic | None:
    """The three best seeds, or all where there are fewer."""
    return group.top(3) or group.top()


def score(group: Group, sample: Statistic | None) -> str:
    """A test value in a table: accuracies in per cent, losses as they are."""
    return plus_minus(sample, factor=100.0) if group.metric == "accuracy" else rounded(sample)


def _order_panel(name: str, groups: list[Group], colours: Mapping[tuple[str, str], str]) -> Panel:
    def draw(axes: Axes) -> None:
        places = {id(group): group.order.centre for group in groups if group.order}
        plain = [group for group in groups if group.plain]
        line = sorted((places[id(g)], scale(g, sample.centre)) for g in plain if (sample := best_known(g)))
        axes.plot([x for x, _ in line], [y for _, y in line], color=GREY, lw=1)
        far = bool(places) and max(places.values()) > _FAR * min(places.values())
        _points(axes, groups, _side_by_side(groups, places, far), colours)
        axes.set(xlabel="final order, mean over layers", ylabel=metric_name(groups[0]))
        axes.margins(x=0.12, y=0.15)
        if far:
            axes.set_xscale("log")
            plain_ticks(axes)
        else:
            # Ticks at whole numbers, of which an axis shows one at least.
            low, high = axes.get_xlim()
            middle = (low + high) / 2
            axes.set_xlim(min(low, middle - _NARROWEST / 2), max(high, middle + _NARROWEST / 2))
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        legend_below(axes, columns=2)

    known = ((g, best_known(g), g.order) for g in groups)
    said = [f"{g.label}: {scale(g, y.centre):.3g} at order {x.centre:.3g}" for g, y, x in known if y and x]
    return Panel(f"{name}: against final order", "; ".join(said), draw)


def _side_by_side(groups: list[Group], places: dict[int, float], far: bool) -> dict[int, float]:
    """Places of groups, apart where several that are not plain end with one order: bars would hide each other.

    Of a logarithmic axis, for orders that are `far` apart, the logarithms are.
    """
    known = {key: math.log(place) for key, place in places.items()} if far else dict(places)
    wide = max(max(known.values()) - min(known.values()), 0.0 if far else _NARROWEST)
    others = (id(group) for group in groups if not group.plain and id(group) in known)
    for keys in grouped(others, dict(known).__getitem__).values():
        apart = wide * min(_APART, _SPREAD / max(len(keys) - 1, 1))
        for k, key in enumerate(keys):
            known[key] += apart * (k - (len(keys) - 1) / 2)
    return {key: math.exp(place) for key, place in known.items()} if far else known


def _speed_panel(
    name: str, groups: list[Group], every: Sequence[Group], colours: Mapping[tuple[str, str], str]
) -> Panel:
    found = {id(g): ups for g in groups if (ups := speed_up(g, every))}

    def draw(axes: Axes) -> None:
        places = {key: ups.centre for key, ups in found.items()}
        axes.axvline(1, color=GREY, lw=1, ls="--")
        _points(axes, groups, places, colours)
        for group in groups:
            sample = best_known(group)
            if group.order and sample:
                at = (places[id(group)], scale(group, sample.centre))
                axes.annotate(f"{group.order.centre:.3g}", at, (7, -10), textcoords="offset points", fontsize=8)
        kind = time_kind(groups[0], every)
        axes.set(xlabel=f"speed-up of the whole training, by {kind}", ylabel=metric_name(groups[0]))
        axes.margins(x=0.14, y=0.18)
        legend_below(axes, columns=2)

    said = [f"{g.label}: {found[id(g)].centre:.2f} times as fast" for g in groups]
    return Panel(f"{name}: against speed-up", "; ".join(said), draw)


def _points(axes: Axes, groups: list[Group], places: dict[int, float], colours: Mapping[tuple[str, str], str]) -> None:
    for group in groups:
        sample = best_known(group)
        if sample is None or group.order is None:
            continue
        x, colour, error = places[id(group)], colours[group.name, group.label], None
        if sample.spread is not None:
            error = scale(group, sample.spread)
        axes.errorbar(x, scale(group, sample.centre), yerr=error, color=colour, lw=1.2, capsize=2, zorder=2.5)
        axes.scatter(x, scale(group, sample.centre), s=40, color=colour, label=group.label, zorder=3)


def seeds_finished(group: Group) -> str:
    """The number of seeds, and of those that finished where not all did."""
    done, every = len(group.finished), len(group.runs)
    return str(every) if done == every else f"{done} of {every}"


def scale(group: Group | Run, value: float) -> float:
    """A value as pictures show it: accuracies in per cent, losses as they are."""
    return 100 * value if group.metric == "accuracy" else value


def metric_name(group: Group) -> str:
    """The label of the axis that `scale` fills."""
    return {"accuracy": "test accuracy, %", "mse": "test MSE", "loss": "test loss"}[group.metric]


_COLOURS = {"baseline": GREY, "CompreSSM": ORANGE, "random states": RED}


def seeds_chart(exhibit: Exhibit) -> Chart | str:
    """Test values of all seeds and of the best against the order, with and without the extremes."""
    known = [cell for cell in exhibit.cells if cell.group is not None and cell.group.ranked]
    if not known:
        return "No finished run has a test value yet, so there is nothing to compare."
    rows = tuple(tuple(_panel(known, best=best, trimmed=trim) for best in (True, False)) for trim in (False, True))
    caption = (
        "Left, circles are the mean of the three best seeds by validation and stars the best; right, circles are the "
        "mean of all. Bars are one standard deviation. Below, the best and the worst seed of each are left out where "
        "there are more than two. Orders are means over layers and seeds; of channels with orders of their own the "
        "largest counts."
    )
    return Chart(f"seeds-{exhibit.label}", "", caption, rows)


def values_of(cell: Compared, *, trimmed: bool) -> list[float]:
    """Test values, the best validation first; `trimmed`: without the best and the worst test where there are others."""
    assert cell.group is not None
    found = [scale(cell.group, run.score.test) for run in cell.group.ranked if run.score and run.score.test is not None]
    if trimmed and len(found) > 2:
        for extreme in (max(found), min(found)):
            found.remove(extreme)
    return found


def _panel(cells: Sequence[Compared], *, best: bool, trimmed: bool) -> Panel:
    def draw(axes: Axes) -> None:
        for k, cell in enumerate(cells):
            assert cell.group is not None
            assert cell.group.order is not None
            values = values_of(cell, trimmed=trimmed)
            shown, x = values[:3] if best else values, cell.group.order.centre
            colour = _COLOURS.get(cell.method, BLUE)
            spread = stdev(shown) if len(shown) > 1 else None
            axes.errorbar(x, fmean(shown), yerr=spread, color=colour, lw=1.2, capsize=2, zorder=2.5)
            label = None if cell.method in {other.method for other in cells[:k]} else cell.method
            axes.scatter(x, fmean(shown), s=36, color=colour, zorder=3, label=label)
            if best:
                axes.scatter(x, values[0], s=80, color=colour, zorder=3.5, **_STAR)
        axes.set(xlabel="final order, mean over layers", ylabel=metric_name(cells[0].group))  # type: ignore[arg-type]
        axes.margins(x=0.1, y=0.15)
        legend_below(axes, columns=2)

    words = "; ".join(f"{cell.title}: {fmean(values_of(cell, trimmed=trimmed)):.1f}" for cell in cells)
    title = ("best seeds" if best else "mean") + (", without the extremes" if trimmed else "")
    return Panel(title, words, draw)
