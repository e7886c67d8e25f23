"""The spectrum of a run as a reader walks through its training, snapshot by snapshot, with a slider on the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes

from compressm_lab.reports.grid import file_name, steps
from compressm_lab.reports.hankel_charts import History, histories
from compressm_lab.reports.panels import Chart, Panel, plain_ticks, short_names, tick_powers
from compressm_lab.runs.groups import Group
from compressm_lab.runs.records import Spectrum
from compressm_lab.runs.run import Run

# Snapshots to walk through beside those of cuts, and values of each: more could not be told apart.
_MOMENTS, _VALUES = 40, 48
# Decades below the largest value that are shown.
_DECADES = 6
# The opacity of the first snapshot on paper; the last has 1.
_PALE = 0.15


def walk_chart(group: Group, colour: str) -> Chart | None:
    """σ by rank at every snapshot, a panel a layer, in the colour of the group; None with fewer than two snapshots."""
    run = group.shown
    found = histories(run)
    if not found or len(found[0].snapshots) < 2:
        return None
    walked = _walked(run, found[0])
    names = short_names(run.modules)
    panels = [
        _panel(run, history, walked, f"{names[history.module]}: " if len(run.modules) > 1 else "", colour)
        for history in found
    ]
    caption = (
        "Each line is a snapshot of the spectrum: the Hankel singular values σ of one layer, the largest first. The "
        "slider walks through training; on paper all snapshots are shown, the last one darkest. At a cut the states "
        "that it drops are dotted."
    )
    name = file_name("walk", group.name, group.label)
    title = f"{group.name}, {group.label}, seed {run.seed}: the spectrum through training"
    deep = len(panels) > 2
    wide = 4 if deep else 2
    rows = tuple(tuple(panels[k : k + wide]) for k in range(0, len(panels), wide))
    moments = tuple(_said(run, found, step) for step in walked)
    return Chart(name, title, caption, rows, (3.0, 2.5) if deep else (5.2, 3.2), moments=moments)


def _walked(run: Run, history: History) -> list[int]:
    """The steps to walk through: spread evenly, the first, the last and those on both sides of every cut among them."""
    known = history.steps
    kept = set(known[:: max(1, math.ceil(len(known) / _MOMENTS))]) | {known[-1]}
    changed = {event.step for event in run.events}
    for before, after in pairwise(known):
        if any(before <= step < after for step in changed):
            kept |= {before, after}
    return sorted(kept)


def _said(run: Run, found: Sequence[History], step: int) -> str:
    """The states of a step, in words."""
    now = [len(snapshot.sigma) for history in found if (snapshot := _at(history, step))]
    cuts = [event.rank for event in run.cut_records if event.step == step]
    said = f"step {steps(step)}: {_counted(now)}"
    return f"{said}, cut to {_counted(cuts)} here" if cuts else said


def _counted(orders: Sequence[int]) -> str:
    low, high = min(orders, default=0), max(orders, default=0)
    return f"{high} state{'s' * (high != 1)}" if low == high else f"{low} to {high} states a layer"


def _at(history: History, step: int) -> Spectrum | None:
    return next((snapshot for snapshot in history.snapshots if snapshot.step == step), None)


def _panel(run: Run, history: History, walked: Sequence[int], prefix: str, colour: str) -> Panel:
    shown = [snapshot for step in walked if (snapshot := _at(history, step))]
    ranks = {event.step: event.rank for event in run.cut_records if event.module == history.module}

    def draw(axes: Axes) -> None:
        for k, step in enumerate(walked):
            if (snapshot := _at(history, step)) is not None:
                _draw_moment(axes, snapshot, ranks.get(step), k, _PALE + (1 - _PALE) * (k + 1) / len(walked), colour)
        high = max(max(snapshot.sigma) for snapshot in shown)
        low = min((value for snapshot in shown for value in snapshot.sigma if value > 0), default=high)
        most = max(len(snapshot.sigma) for snapshot in shown)
        axes.set(xlabel="state, the one that matters most first", ylabel="σ", xscale="log", xlim=(0.9, 1.1 * most))
        tick_powers(axes)
        if high > 0:
            axes.set_yscale("log")
            axes.set_ylim(max(low, high * 10.0**-_DECADES) / 1.4, 1.6 * high)
            plain_ticks(axes)

    first, last = shown[0].sigma, shown[-1].sigma
    words = f"From {len(first)} values, the largest {max(first):.2g}, to {len(last)}, the largest {max(last):.2g}."
    return Panel(f"{prefix}σ of every state", words, draw)


def _draw_moment(axes: Axes, snapshot: Spectrum, rank: int | None, k: int, alpha: float, colour: str) -> None:
    """Draw one snapshot as artists that a page finds by their names; what a cut leaves of it, and what it drops."""
    count = len(snapshot.sigma)
    kept = count if rank is None else min(rank, count)
    style: dict[str, Any] = {"color": colour, "alpha": alpha, "lw": 1.0}
    parts: list[tuple[int, int, str, dict[str, Any]]] = [(1, kept, f"moment-{k}", {"marker": ".", "ms": 3.5})]
    if kept < count:
        parts.append((kept, count, f"moment-{k}-cut", {"ls": (0, (1, 3))}))
    for begin, end, name, look in parts:
        places = _spread(begin, end)
        (drawn,) = axes.plot(places, [snapshot.sigma[place - 1] for place in places], **style, **look)
        drawn.set_gid(name)


def _spread(begin: int, end: int) -> list[int]:
    """Ranks from begin to end, as far apart on a logarithmic axis as `_VALUES` of them are."""
    if end - begin < _VALUES:
        return list(range(begin, end + 1))
    share = (end / begin) ** (1 / (_VALUES - 1))
    return sorted({min(end, round(begin * share**k)) for k in range(_VALUES)} | {end})
