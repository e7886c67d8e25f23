"""Curves over training: validation and loss, the order of every layer, and marks where a run was cut or restored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes

from compressm_lab.reports.outcome_charts import colours_of, metric_name, scale
from compressm_lab.reports.palette import GREY, INK, RAMP, RED, shades
from compressm_lab.reports.panels import Chart, Panel, count_steps, label_ends, legend_below, logarithmic, short_names
from compressm_lab.runs.groups import Group, by_name
from compressm_lab.runs.paper import Compared, Exhibit
from compressm_lab.runs.records import RestoredRecord
from compressm_lab.runs.run import Run

# Lines nearer than this part of the axis share one label.
_NEAR = 0.16


def title_pad(run: Run) -> float:
    """Points between a panel and its title, for the labels of cuts."""
    return 17.0 if run.events else 6.0


def mark_cuts(axes: Axes, run: Run, module: str | None = None) -> None:
    """Draw dotted lines at cuts with the order that remains, dashed ones at restorations; `axes` has its limits in x.

    The order is that of `module`, by default the mean over layers.
    """
    orders = dict(run.initial_orders)
    changes: dict[int, tuple[float, bool]] = {}
    for event in run.events:
        orders.update(event.orders)
        restored = isinstance(event, RestoredRecord)
        if module is None or restored or module in event.orders:
            changes[event.step] = (fmean(orders.values()) if module is None else orders[module], restored)
    low, high = axes.get_xlim()
    clusters: list[list[int]] = []
    for step, (_, restored) in changes.items():
        axes.axvline(step, color=RED if restored else INK, lw=0.9, ls="--" if restored else ":", alpha=0.75, zorder=1.5)
        if not clusters or step - clusters[-1][-1] > _NEAR * (high - low):
            clusters.append([])
        clusters[-1].append(step)
    for cluster in clusters:
        order, restored = changes[cluster[-1]]
        cuts = sum(not changes[step][1] for step in cluster)
        said = f"{f'{cuts} cuts ' if cuts > 1 else ''}{'back to' if restored else '→'} {order:.3g}"
        middle = fmean(cluster)
        # Beside the lines where the panel ends.
        place = (middle - low) / (high - low)
        side = "left" if place < 0.15 else "right" if place > 0.85 else "center"
        axes.text(middle, 1.015, said, transform=axes.get_xaxis_transform(), ha=side, va="bottom", fontsize=8)


_LINES = ("-", "--", "-.", ":")

Curve = list[tuple[int, float]]


def training_chart(groups: Sequence[Group]) -> Chart | str:
    """Validation and the loss in training, a row a recipe."""
    rows, colours = [], colours_of(groups)
    for name, own in by_name(group for group in groups if any(run.evaluations for run in group.runs)).items():
        lasts = {g.label: [curve[-1][1] for run in g.runs if (curve := _validation(run))] for g in own}
        ends = "; ".join(f"{label} ends at {fmean(last):.3g}" for label, last in lasts.items() if last)
        metric = {"accuracy": "accuracy, %", "mse": "MSE", "loss": "loss"}[own[0].metric]
        rows.append(
            (
                _training_panel(f"{name}: validation", ends, own, _validation, metric, colours),
                _training_panel(
                    f"{name}: loss in training", "One line for every group of seeds.", own, _losses, "loss", colours
                ),
            )
        )
    if not rows:
        return "No run has been evaluated yet."
    runs = [run for group in groups for run in group.runs]
    caption = "Lines are means over the seeds that came so far, bands reach from the lowest to the highest seed. "
    if any(run.config.get("distillation") for run in runs):
        caption += "A student's loss in training is that of its answers and that to its teacher's, mixed. "
    bad = [(run, [found.step for found in run.evaluations if not math.isfinite(found.loss)]) for run in runs]
    caption += " ".join(
        f"The loss of {run.name}, {run.label}, seed {run.seed}, is no number from step {min(steps)} on."
        for run, steps in bad
        if steps
    )
    return Chart("training", "", caption, tuple(rows))


def _validation(run: Run) -> Curve:
    return [(step, scale(run, value)) for step, value in run.curve("validation") or run.curve("test")]


def _losses(run: Run) -> Curve:
    return [(found.step, found.loss) for found in run.evaluations if found.split == "train"]


def _training_panel(
    title: str,
    words: str,
    groups: list[Group],
    curve: Callable[[Run], Curve],
    metric: str,
    colours: Mapping[tuple[str, str], str],
) -> Panel:
    def draw(axes: Axes) -> None:
        drawn: list[str] = []
        for group in groups:
            colour = colours[group.name, group.label]
            line = _LINES[drawn.count(colour) % len(_LINES)]
            drawn.append(colour)
            _bundle(axes, colour, line, group.label, [curve(run) for run in group.runs])
        count_steps(axes, max(group.shown.steps for group in groups))
        axes.set(ylabel=metric)
        if metric in ("loss", "MSE"):
            logarithmic(axes)
        legend_below(axes)

    return Panel(title, words, draw)


def _bundle(axes: Axes, colour: str, line: str, label: str, curves: list[Curve]) -> None:
    by_step: dict[int, list[float]] = {}
    for curve in curves:
        for step, value in curve:
            by_step.setdefault(step, []).append(value if math.isfinite(value) else math.nan)
    if not by_step:
        return
    steps = sorted(by_step)
    means = [fmean(by_step[step]) for step in steps]
    axes.plot(steps, means, line, color=colour, lw=1.4, label=label, marker="o" if len(steps) == 1 else "", ms=4)
    if len(curves) > 1:
        low, high = ([extreme(by_step[step]) for step in steps] for extreme in (min, max))
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0)


def order_paths_chart(groups: Sequence[Group]) -> Chart | str:
    """The order of every layer over training, a panel for every group with cuts."""
    cut = [group for group in groups if any(run.events for run in group.runs)]
    if not cut:
        return "No layer was cut."
    caption = "The number of states of every layer; of several layers, those of the best seed by validation. "
    caption += " ".join(
        f"Seed {run.seed} of {run.name}, {run.label}, was restored at step {event.step}: {event.reason}."
        for group in cut
        for run in group.runs
        for event in run.restorations
    )
    colours = colours_of(groups)
    return Chart.of("orders", caption, [_paths_panel(group, colours[group.name, group.label]) for group in cut])


def _paths_panel(group: Group, colour: str) -> Panel:
    run = group.shown
    colours, short = dict(zip(run.modules, shades(len(run.modules)), strict=True)), short_names(run.modules)

    def draw(axes: Axes) -> None:
        if len(run.modules) == 1:
            others = [other for other in group.runs if other is not run]
            for k, other in enumerate(others):
                _path(axes, other, run.modules[0], GREY, None if k else "other seeds")
            _path(axes, run, run.modules[0], colour, f"seed {run.seed}, the best" if others else None)
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
    """Validation over all of training, and over its last part on an axis of its own."""
    known = [cell for cell in exhibit.cells if any(run.curve("validation") for run in cell.runs)]
    if not known:
        return "No run has been evaluated yet."
    cut, plain = ([cell.title for cell in known if cell.runs[0].compressed is wanted] for wanted in (True, False))
    colours = dict(zip(cut, shades(len(cut)) if len(cut) > 1 else RAMP[4:5], strict=True))
    colours |= {title: GREY if k == 0 else INK for k, title in enumerate(plain)}
    panels = [_panel(known, colours, late=late) for late in (False, True)]
    caption = (
        "Validation accuracy, mean over seeds; bands are one standard deviation. Grey and black lines are models that "
        "are never cut. Dotted lines are cuts, in the colour of their arm where they differ; the right panel shows the "
        "end of training."
    )
    return Chart.of(f"curves-{exhibit.label}", caption, panels, size=(4.6, 3.4))


def _panel(cells: Sequence[Compared], colours: dict[str, str], *, late: bool) -> Panel:
    first_cut = next((run for cell in cells for run in cell.runs if run.events), None)
    cut_steps = {cell.title: tuple(dict.fromkeys(event.step for event in cell.runs[0].events)) for cell in cells}
    if len(set(filter(None, cut_steps.values()))) != 1:
        first_cut = None
    curves = {cell.title: _mean_curve(cell.runs) for cell in cells}

    def draw(axes: Axes) -> None:
        for cell in cells:
            steps, mean, spread = curves[cell.title]
            kept = np.array(steps) >= (_LATE * cell.runs[0].steps if late else 0)
            x, centre, width = np.array(steps)[kept], mean[kept], spread[kept]
            axes.plot(x, centre, color=colours[cell.title], lw=1.4, label=cell.title)
            axes.fill_between(x, centre - width, centre + width, color=colours[cell.title], alpha=0.15, lw=0)
        last = max(run.steps for cell in cells for run in cell.runs)
        count_steps(axes, last)
        axes.set(ylabel=metric_name(cells[0].group).replace("test", "validation"))  # type: ignore[arg-type]
        if late:
            axes.set_xlim(_LATE * last, last)
        elif first_cut is not None:
            mark_cuts(axes, first_cut)
        else:
            for title, found in cut_steps.items():
                for step in found:
                    axes.axvline(step, color=colours[title], lw=0.9, ls=":", zorder=1.5)
        legend_below(axes, columns=2)

    words = "; ".join(f"{title}: {mean[-1]:.1f} at the end" for title, (_, mean, _) in curves.items())
    # The labels of the first panel, and as much in the second: their titles stand at one height.
    pad = title_pad(first_cut) if first_cut is not None else 6.0
    return Panel("the end of training" if late else "all of training", words, draw, pad=pad)


def _mean_curve(runs: Sequence[Run]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Steps that all runs came to, with mean and standard deviation over them; 0 for one run."""
    curves = [dict(run.curve("validation")) for run in runs if run.curve("validation")]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = scale(runs[0], 1.0) * np.array([[curve[step] for step in steps] for curve in curves])
    return steps, values.mean(0), values.std(0, ddof=1) if len(curves) > 1 else np.zeros(len(steps))
