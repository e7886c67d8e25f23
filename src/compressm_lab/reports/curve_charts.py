"""Where a run was cut, and where it was brought back, as lines across a panel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from compressm_lab.reports.outcome_charts import metric_name, scale
from compressm_lab.reports.panels import (
    BLUE,
    BROWN,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RAMP,
    RED,
    Chart,
    Panel,
    count_steps,
    in_rows,
    label_ends,
    legend_below,
    plain_ticks,
    positive_heights,
    shades,
    short_names,
)
from compressm_lab.runs.groups import Group
from compressm_lab.runs.paper import Compared, Exhibit
from compressm_lab.runs.records import CutRecord, SplitName
from compressm_lab.runs.run import Run

# Lines nearer than this part of the axis share one label.
_NEAR = 0.16


def title_pad(run: Run) -> float:
    """Room for the labels between a panel and its title, in points."""
    return 17.0 if run.events else 6.0


def mark_cuts(axes: Axes, run: Run, module: str | None = None) -> None:
    """Dotted lines at cuts with the order that remains, dashed ones at restorations; `axes` has its limits in x."""
    changes = _changes(run, module)
    low, high = axes.get_xlim()
    for step, (_, restored) in changes.items():
        axes.axvline(step, color=RED if restored else INK, lw=0.9, ls="--" if restored else ":", alpha=0.75, zorder=1.5)
    cluster: list[int] = []
    for step in changes:
        if cluster and step - cluster[-1] > _NEAR * (high - low):
            _label(axes, cluster, changes)
            cluster = []
        cluster.append(step)
    if cluster:
        _label(axes, cluster, changes)


def _changes(run: Run, module: str | None) -> dict[int, tuple[float, bool]]:
    """By step: the order from there on, of deep models the mean over layers, and whether it was restored."""
    orders = dict(run.initial_orders)
    found: dict[int, tuple[float, bool]] = {}
    for event in run.events:
        cut = isinstance(event, CutRecord)
        orders.update({event.module: event.rank} if isinstance(event, CutRecord) else event.orders)
        if module is None or not isinstance(event, CutRecord) or event.module == module:
            mean = sum(orders.values()) / len(orders) if module is None else float(orders[module])
            found[event.step] = (mean, not cut)
    return found


def _label(axes: Axes, cluster: list[int], changes: dict[int, tuple[float, bool]]) -> None:
    order, restored = changes[cluster[-1]]
    said = f"{'back to' if restored else '→'} {order:.3g}"
    cuts = sum(not changes[step][1] for step in cluster)
    if cuts > 1:
        said = f"{cuts} cuts {said}"
    # Left of the last line where there is room, so that labels of one cluster end at its last line.
    place = (sum(cluster) / len(cluster) - axes.get_xlim()[0]) / (axes.get_xlim()[1] - axes.get_xlim()[0])
    where = "left" if place < 0.15 else "right" if place > 0.85 else "center"
    transform = axes.get_xaxis_transform()
    axes.text(sum(cluster) / len(cluster), 1.015, said, transform=transform, ha=where, va="bottom", fontsize=8)


_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, BROWN, GREY)
_LINES = ("-", "--", "-.", ":")

Curve = list[tuple[int, float]]


def training_chart(groups: Sequence[Group]) -> Chart | str:
    """A row a recipe: validation, and the loss in training."""
    rows = []
    for name in dict.fromkeys(group.name for group in groups):
        found = [group for group in groups if group.name == name and any(run.evaluations for run in group.runs)]
        if found:
            rows.append((_metric_panel(name, found), _loss_panel(name, found)))
    if not rows:
        return "No run has been evaluated yet."
    caption = "Lines are means over the seeds that came so far, bands reach from the lowest to the highest seed. "
    if any(run.config.get("distillation") for group in groups for run in group.runs):
        caption += "A student's loss in training is that of its answers and that to its teacher's, mixed. "
    return Chart("training", "", caption + _divergences(groups), tuple(rows))


def order_paths_chart(groups: Sequence[Group]) -> Chart | str:
    """A panel for every group with cuts."""
    cut = [group for group in groups if any(run.events for run in group.runs)]
    if not cut:
        return "No layer was cut."
    panels = [_paths_panel(group) for group in cut]
    caption = "The number of states of every layer; of several layers, those of the best seed by validation. "
    return Chart("orders", "", caption + _restorations(cut), in_rows(panels))


def _divergences(groups: Sequence[Group]) -> str:
    said = []
    for run in (run for group in groups for run in group.runs):
        bad = [found.step for found in run.evaluations if not math.isfinite(found.loss)]
        if bad:
            said.append(f"The loss of {run.name}, {run.label}, seed {run.seed}, is no number from step {min(bad)} on.")
    return " ".join(said)


def _restorations(groups: Sequence[Group]) -> str:
    found = [(run, event) for group in groups for run in group.runs for event in run.restorations]
    said = [
        f"Seed {run.seed} of {run.name}, {run.label}, was restored at step {event.step}: {event.reason}."
        for run, event in found
    ]
    return " ".join(said)


def _metric_panel(name: str, groups: list[Group]) -> Panel:
    accuracy = groups[0].metric == "accuracy"

    def draw(axes: Axes) -> None:
        for k, group in enumerate(groups):
            curves = [[(step, scale(group, value)) for step, value in _validation(run)] for run in group.runs]
            _bundle(axes, k, group.label, curves)
        count_steps(axes, max(group.shown.steps for group in groups))
        axes.set(ylabel="accuracy, %" if accuracy else "loss")
        if not accuracy:
            _logarithmic(axes)
        legend_below(axes)

    return Panel(f"{name}: validation", _ends(groups), draw)


def _loss_panel(name: str, groups: list[Group]) -> Panel:
    def draw(axes: Axes) -> None:
        for k, group in enumerate(groups):
            _bundle(axes, k, group.label, [_losses(run, "train") for run in group.runs])
        count_steps(axes, max(group.shown.steps for group in groups))
        axes.set(ylabel="loss")
        _logarithmic(axes)
        legend_below(axes)

    return Panel(f"{name}: loss in training", "One line for every group of seeds.", draw)


def _validation(run: Run) -> Curve:
    return run.curve("validation") or run.curve("test")


def _losses(run: Run, split: SplitName) -> Curve:
    return [(found.step, found.loss) for found in run.evaluations if found.split == split]


def _logarithmic(axes: Axes) -> None:
    """Where there is something that it could show."""
    if positive_heights(axes):
        axes.set_yscale("log")
        plain_ticks(axes)


def _bundle(axes: Axes, k: int, label: str, curves: list[Curve]) -> None:
    by_step: dict[int, list[float]] = {}
    for curve in curves:
        for step, value in curve:
            by_step.setdefault(step, []).append(value if math.isfinite(value) else math.nan)
    if not by_step:
        return
    steps = sorted(by_step)
    colour, line = _COLOURS[k % len(_COLOURS)], _LINES[(k // len(_COLOURS)) % len(_LINES)]
    means = [sum(by_step[step]) / len(by_step[step]) for step in steps]
    axes.plot(steps, means, line, color=colour, lw=1.4, label=label, marker="o" if len(steps) == 1 else "", ms=4)
    if len(curves) > 1:
        low, high = ([extreme(by_step[step]) for step in steps] for extreme in (min, max))
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0)


def _ends(groups: list[Group]) -> str:
    said = []
    for group in groups:
        last = [curve[-1][1] for run in group.runs if (curve := _validation(run))]
        if last:
            said.append(f"{group.label} ends at {scale(group, sum(last) / len(last)):.3g}")
    return "; ".join(said)


def _paths_panel(group: Group) -> Panel:
    run = group.shown
    colours, short = dict(zip(run.modules, shades(len(run.modules)), strict=True)), short_names(run.modules)

    def draw(axes: Axes) -> None:
        if len(run.modules) == 1:
            others = [other for other in group.runs if other is not run]
            for k, other in enumerate(others):
                _path(axes, other, run.modules[0], GREY, None if k else "other seeds")
            _path(axes, run, run.modules[0], BLUE, f"seed {run.seed}, the best" if others else None)
        else:
            for module in run.modules:
                _path(axes, run, module, colours[module], None)
        count_steps(axes, run.steps)
        axes.set(ylabel="order")
        axes.set_ylim(bottom=0)
        mark_cuts(axes, run)
        if len(run.modules) > 1:
            label_ends(axes, {short[m]: (float(order), colours[m]) for m, order in run.final_orders.items()})
        legend_below(axes)

    ends = ", ".join(f"{module} {run.initial_orders[module]} to {order}" for module, order in run.final_orders.items())
    return Panel(f"{group.name}: {group.label}", ends, draw, pad=title_pad(run))


def _path(axes: Axes, run: Run, module: str, colour: str, label: str | None) -> None:
    path = run.order_paths.get(module, [])
    if path:
        steps, orders = zip(*path, (max(run.status.step, path[-1][0]), path[-1][1]), strict=True)
        axes.step(steps, orders, where="post", color=colour, lw=1.5, label=label)


# Of the last evaluations: where curves can be told apart.
_LATE = 0.6


def curves_chart(exhibit: Exhibit) -> Chart | str:
    """All of training, and its last part on an axis of its own."""
    known = [cell for cell in exhibit.cells if any(run.curve("validation") for run in cell.runs)]
    if not known:
        return "No run has been evaluated yet."
    colours = _colours(known)
    panels = [_panel(known, colours, late=False), _panel(known, colours, late=True)]
    caption = (
        "Validation accuracy, mean over seeds; bands are one standard deviation. Grey and black lines are models that "
        "are never cut. Dotted lines are cuts, in the colour of their arm where they differ; the right panel shows the "
        "end of training."
    )
    return Chart(f"curves-{exhibit.label}", "", caption, in_rows(panels), size=(4.6, 3.4))


def _colours(cells: Sequence[Compared]) -> dict[str, str]:
    cut = [cell for cell in cells if cell.runs[0].compressed]
    found = dict(zip((cell.title for cell in cut), shades(len(cut)) if len(cut) > 1 else RAMP[4:5], strict=True))
    plain = [cell for cell in cells if not cell.runs[0].compressed]
    return found | {cell.title: GREY if k == 0 else INK for k, cell in enumerate(plain)}


def _panel(cells: Sequence[Compared], colours: dict[str, str], *, late: bool) -> Panel:
    first_cut = next((run for cell in cells for run in cell.runs if run.events), None)
    alike = len({_cut_steps(cell) for cell in cells if _cut_steps(cell)}) == 1

    def draw(axes: Axes) -> None:
        for cell in cells:
            _line(axes, cell, colours[cell.title], late=late)
        last = max(run.steps for cell in cells for run in cell.runs)
        count_steps(axes, last)
        axes.set(ylabel=metric_name(cells[0].group).replace("test", "validation"))  # type: ignore[arg-type]
        if late:
            axes.set_xlim(_LATE * last, last)
        elif first_cut is not None and alike:
            mark_cuts(axes, first_cut)
        else:
            _mark_each(axes, cells, colours)
        legend_below(axes, columns=2)

    words = "; ".join(f"{cell.title}: {_end(cell):.1f} at the end" for cell in cells)
    # The labels of the first panel, and as much in the second: their titles stand at one height.
    pad = title_pad(first_cut) if first_cut is not None and alike else 6.0
    return Panel("the end of training" if late else "all of training", words, draw, pad=pad)


def _cut_steps(cell: Compared) -> tuple[int, ...]:
    return tuple(dict.fromkeys(event.step for event in cell.runs[0].events))


def _mark_each(axes: Axes, cells: Sequence[Compared], colours: dict[str, str]) -> None:
    for cell in cells:
        for step in _cut_steps(cell):
            axes.axvline(step, color=colours[cell.title], lw=0.9, ls=":", zorder=1.5)


def mean_curve(runs: Sequence[Run]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Steps that all runs came to, with mean and standard deviation over them; 0 for one run."""
    curves = [dict(run.curve("validation")) for run in runs if run.curve("validation")]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = np.array([[curve[step] for step in steps] for curve in curves])
    return steps, values.mean(0), values.std(0, ddof=1) if len(curves) > 1 else np.zeros(len(steps))


def _line(axes: Axes, cell: Compared, colour: str, *, late: bool) -> None:
    steps, mean, spread = mean_curve(cell.runs)
    assert cell.group is not None
    kept = [k for k, step in enumerate(steps) if not late or step >= _LATE * cell.runs[0].steps]
    x = [steps[k] for k in kept]
    centre, width = scale(cell.group, 1.0) * mean[kept], scale(cell.group, 1.0) * spread[kept]
    axes.plot(x, centre, color=colour, lw=1.4, label=cell.title)
    axes.fill_between(x, centre - width, centre + width, color=colour, alpha=0.15, lw=0)


def _end(cell: Compared) -> float:
    assert cell.group is not None
    return float(scale(cell.group, mean_curve(cell.runs)[1][-1]))
