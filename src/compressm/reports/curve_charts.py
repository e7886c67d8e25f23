"""Validation and loss over training, and the order of every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes

from compressm.reports.canvas import BLUE, GREEN, GREY, ORANGE, PURPLE, RED
from compressm.reports.cut_lines import mark_cuts, title_pad
from compressm.reports.outcome_charts import scale
from compressm.reports.panels import (
    BROWN,
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
from compressm.runs.groups import Group
from compressm.runs.records import SplitName
from compressm.runs.run import Run

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
