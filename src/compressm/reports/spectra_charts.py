"""Hankel values over training side by side, on one axis (fig:sanity_hankel, num_red_hankel, red_window_hankel)."""

from __future__ import annotations

import math

from matplotlib.axes import Axes

from compressm.reports.cut_lines import mark_cuts, title_pad
from compressm.reports.hankel_charts import draw_paths
from compressm.reports.hankel_history import History, histories
from compressm.reports.panels import Chart, Panel, count_steps, in_rows, plain_ticks
from compressm.runs.comparison import Compared, Exhibit
from compressm.runs.run import Run

# Decades below the largest value that are shown.
_DECADES = 6


def spectra_chart(exhibit: Exhibit) -> Chart | str:
    """One panel an arm: the first layer of its first seed, states followed."""
    found = [(cell, run, history) for cell in exhibit.cells if (run := _run(cell)) for history in histories(run)[:1]]
    if not found:
        return "No spectra were recorded yet."
    limits = _limits([(history, exhibit.head * run.steps) for _, run, history in found])
    panels = [_panel(cell, run, history, exhibit.head, limits) for cell, run, history in found]
    shown = "" if exhibit.head == 1 else f" The first {exhibit.head:.0%} of training is shown."
    caption = (
        "Hankel singular values of the first seed of each arm, its states followed from snapshot to snapshot; all "
        f"panels share their limits. Dotted lines are cuts.{shown}"
    )
    return Chart(f"spectra-{exhibit.label}", "", caption, in_rows(panels), size=(3.8, 3.0))


def _run(cell: Compared) -> Run | None:
    return min(cell.runs, key=lambda run: run.seed, default=None)


def _limits(found: list[tuple[History, float]]) -> tuple[float, float]:
    """Of all values up to the last step that is shown."""
    shown = [snapshot for history, last in found for snapshot in history.snapshots if snapshot.step <= last]
    values = [value for snapshot in shown for value in snapshot.sigma if value > 0]
    high = max(values, default=1.0)
    return max(min(values, default=high), high * 10.0**-_DECADES) / 1.4, 1.4 * high


def _panel(cell: Compared, run: Run, history: History, head: float, limits: tuple[float, float]) -> Panel:
    def draw(axes: Axes) -> None:
        for stretch in history.stretches():
            draw_paths(axes, stretch)
        axes.set_yscale("log")
        axes.set_ylim(*limits)
        plain_ticks(axes)
        axes.set_ylabel("σ")
        count_steps(axes, max(1, math.ceil(head * run.steps)))
        mark_cuts(axes, run, history.module)

    last = history.snapshots[-1].sigma
    words = f"At the end {len(last)} values from {max(last):.2g} to {min(last):.2g}."
    return Panel(cell.title, words, draw, pad=title_pad(run))
