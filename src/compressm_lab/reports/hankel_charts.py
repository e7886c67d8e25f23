"""Hankel singular values of every layer over training, thinned to what a picture can show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from numpy.typing import ArrayLike
from torch import Tensor

from compressm.control import bottom_shares, trajectories
from compressm_lab.reports.curve_charts import mark_cuts, title_pad
from compressm_lab.reports.grid import file_name
from compressm_lab.reports.palette import BLUE, RAMP, RED, shades
from compressm_lab.reports.panels import (
    Chart,
    Panel,
    count_steps,
    label_ends,
    plain_ticks,
    positive_heights,
    say_instead,
    short_names,
)
from compressm_lab.runs.groups import Group
from compressm_lab.runs.paper import Exhibit
from compressm_lab.runs.records import Spectrum
from compressm_lab.runs.run import Run

# Following 384 states through one snapshot takes 30 ms; more than this many could not be told apart anyway.
SNAPSHOTS = 150


@dataclass(frozen=True)
class Episode:
    """Snapshots between two restorations, over which orders only fall; values[k, j] is state j at steps[k].

    `resolved`: snapshots are close enough to follow states through crossings; otherwise none cross.
    """

    steps: list[int]
    values: Float[Tensor, "steps n"]
    margins: list[float]
    crossings: int
    resolved: bool


@dataclass(frozen=True)
class History:
    """The spectra of one layer."""

    module: str
    snapshots: tuple[Spectrum, ...]
    recorded: int

    @property
    def steps(self) -> list[int]:
        return [found.step for found in self.snapshots]

    @property
    def bounds(self) -> list[tuple[int, float]]:
        """Pairs (step, max |eig δH|) where it was recorded and is finite."""
        known = ((found.step, found.weyl_bound) for found in self.snapshots)
        return [(step, float(bound)) for step, bound in known if bound is not None and math.isfinite(bound)]

    def shares(self, part: float) -> list[float]:
        """The share of Σσ that the smallest `part` of the states hold, of every snapshot."""
        spectra = [torch.tensor(found.sigma, dtype=torch.float64) for found in self.snapshots]
        return [float(bottom_shares(sigma)[math.floor(part * len(sigma))]) for sigma in spectra]

    def stretches(self) -> list[Episode]:
        """States followed by linear assignment, or by rank, anew after every restoration."""
        parts: list[list[Spectrum]] = []
        for found in self.snapshots:
            if not parts or len(found.sigma) > len(parts[-1][-1].sigma):
                parts.append([])
            parts[-1].append(found)
        return [_followed(part) for part in parts]


def histories(run: Run) -> list[History]:
    """The spectra of every layer that has one."""
    found = []
    for module in run.modules:
        recorded = [spectrum for spectrum in run.spectra if spectrum.module == module and spectrum.sigma]
        if recorded:
            found.append(History(module, _thinned(recorded), len(recorded)))
    return found


def _thinned(spectra: Sequence[Spectrum]) -> tuple[Spectrum, ...]:
    """Spectra evenly spaced, the first and the last among them, and those on both sides of a change of order."""
    stride = max(1, math.ceil(len(spectra) / SNAPSHOTS))
    kept = {*range(0, len(spectra), stride), len(spectra) - 1}
    for k in range(1, len(spectra)):
        if len(spectra[k].sigma) != len(spectra[k - 1].sigma):
            kept |= {k - 1, k}
    return tuple(spectra[k] for k in sorted(kept))


def _followed(part: Sequence[Spectrum]) -> Episode:
    margins = [math.nan if found.weyl_bound is None else float(found.weyl_bound) for found in part]
    paths = trajectories([torch.tensor(found.sigma, dtype=torch.float64) for found in part])
    return Episode([found.step for found in part], paths.values, margins, int(paths.crossings.sum()), paths.resolved)


# More values or lines in one panel could not be told apart, and a page with many layers would weigh megabytes.
_VALUES, _LINES = 64, 32
_PARTS = (0.25, 0.5, 0.75, 0.9)
# Of the axis, beside a snapshot that is alone.
_AIR = 0.03
# Between two values for a logarithmic axis to read better than a linear one.
_SPAN = 30.0


def hankel_chart(group: Group, *, folded: bool = False, colour: str = BLUE) -> Chart | str:
    """Four panels for every layer of the run that stands for its group, three where no bounds were recorded.

    `colour` is that of the group, in panels that do not tell states apart.
    """
    run = group.shown
    found = histories(run)
    if not found:
        return f"{group.name}, {group.label}: no spectra were recorded."
    # Rows of small panels for deep models, two by two otherwise.
    deep = len(found) > 2
    followed = [history.stretches() for history in found]
    bounded = any(history.bounds for history in found)
    rows: list[tuple[Panel, ...]] = []
    for history, paths in zip(found, followed, strict=True):
        prefix = f"{short_names(run.modules)[history.module]}: " if len(run.modules) > 1 else ""
        panels = (
            _raw_panel(run, history, prefix, colour),
            *([_bound_panel(run, history, prefix, colour)] if bounded else []),
            _path_panel(run, history, paths, prefix),
            _share_panel(run, history, prefix),
        )
        rows += [panels] if deep or not bounded else [panels[:2], panels[2:]]
    name, title = file_name("hankel", group.name, group.label), f"{group.name}, {group.label}, seed {run.seed}"
    size = (3.0, 2.5) if deep else (4.0, 2.9)
    return Chart(name, title, _caption(run, found, followed), tuple(rows), size, folded=folded)


def _caption(run: Run, found: Sequence[History], followed: Sequence[Sequence[Episode]]) -> str:
    resolved = all(stretch.resolved for stretches in followed for stretch in stretches)
    largest = max(len(snapshot.sigma) for history in found for snapshot in history.snapshots)
    bounded = any(history.bounds for history in found)
    panel, margin = "", ""
    if bounded:
        panel = "the largest |eigenvalue| of δH, which bounds how far any σ moved since the snapshot before; "
        margin = ", with that bound as its margin where it is below σ"
    said = [
        f"The values σ as a set; {panel}each state followed by linear assignment{margin}; the share of Σσ that the "
        "smallest 25, 50, 75 and 90 % of the states hold."
    ]
    if not bounded and any(len(history.snapshots) > 1 for history in found):
        said.append("Bounds on how far values move between snapshots were not recorded (`spectra.changes`).")
    if not resolved:
        said.append(
            "Where states move far beside the distance to their neighbours from one snapshot to the next, crossings "
            "cannot be told, and states are followed by rank."
        )
    if largest > _LINES:
        said.append(f"Of {largest} values at most {_VALUES} are drawn as a set and {_LINES} as lines, spread by rank.")
    if (drawn := len(found[0].snapshots)) < found[0].recorded:
        said.append(f"{drawn} of {found[0].recorded} recorded snapshots are drawn; bounds are between recorded ones.")
    if all(len(history.snapshots) == 1 for history in found):
        said.append("There is one snapshot: points instead of lines, and nothing to compare it with.")
    if run.events:
        said.append("Dotted lines are cuts, labelled with the order that remains; dashed ones are restorations.")
    return " ".join(said)


def _raw_panel(run: Run, history: History, prefix: str, colour: str) -> Panel:
    def draw(axes: Axes) -> None:
        # Dashes of one line, not markers: those would be an element each, and a page of them megabytes.
        count = len(history.snapshots)
        half = (_AIR if count == 1 else 0.3 / max(count, 40)) * _last_step(run, history)
        steps, heights = [], []
        for snapshot in history.snapshots:
            for value in _spread(snapshot.sigma, _VALUES):
                steps += [snapshot.step - half, snapshot.step + half, math.nan]
                heights += [value, value, math.nan]
        axes.plot(steps, heights, color=colour, lw=0.9, solid_capstyle="butt")
        _finish(axes, run, history, "σ")

    first, last = history.snapshots[0], history.snapshots[-1]
    ends = [first] if first is last else [first, last]
    words = ", ".join(f"{_range(end.sigma)} at step {end.step}" for end in ends)
    return Panel(f"{prefix}values σ", f"{words}.", draw, pad=title_pad(run))


def _bound_panel(run: Run, history: History, prefix: str, colour: str) -> Panel:
    bounds, absent = history.bounds, "not recorded for this layer"

    def draw(axes: Axes) -> None:
        if not bounds:
            say_instead(axes, absent)
        else:
            # A gap where a snapshot has no bound: across a cut.
            known = [dict(bounds).get(step, math.nan) for step in history.steps]
            axes.plot(history.steps, known, color=colour, lw=1.3, marker=".", ms=3)
        _finish(axes, run, history, "since the snapshot before")

    words = f"From {bounds[0][1]:.2g} to {bounds[-1][1]:.2g}." if bounds else f"{absent.capitalize()}."
    return Panel(f"{prefix}max |eig δH|", words, draw, pad=title_pad(run))


def _path_panel(run: Run, history: History, stretches: Sequence[Episode], prefix: str) -> Panel:
    def draw(axes: Axes) -> None:
        for stretch in stretches:
            draw_paths(axes, stretch)
        _finish(axes, run, history, "σ")

    crossings = sum(stretch.crossings for stretch in stretches)
    words = f"{crossings} pairs of states changed their order." if crossings else "No two states changed their order."
    if len(history.snapshots) == 1:
        words = "One snapshot, in which no state can be followed."
    if not all(stretch.resolved for stretch in stretches):
        words = "Followed by rank: crossings cannot be told from snapshots this far apart."
    return Panel(f"{prefix}states followed", words, draw, pad=title_pad(run))


def draw_paths(axes: Axes, stretch: Episode) -> None:
    """Draw states over steps, each in the colour of its rank, with the bound on its change as a margin."""
    values = stretch.values.numpy()
    states = _chosen(values)
    steps, margins = np.array(stretch.steps, dtype=float), np.array(stretch.margins)
    for k, state in enumerate(states):
        path, colour = values[:, state], RAMP[k * len(RAMP) // len(states)]
        _plot(axes, steps, path, color=colour, lw=0.9)
        narrow = margins < path
        if narrow.any():
            axes.fill_between(steps, path - margins, path + margins, where=narrow, color=colour, alpha=0.16, lw=0)


def _chosen(values: np.ndarray) -> list[int]:
    """The states to draw: as many of those that stayed to the end as of those that were cut, spread by rank."""
    stayed, gone = (np.flatnonzero(np.isfinite(values[-1]) == wanted).tolist() for wanted in (True, False))
    few = _spread(gone, max(_LINES // 2, _LINES - len(stayed)))
    return sorted(_spread(stayed, _LINES - len(few)) + few)


def _share_panel(run: Run, history: History, prefix: str) -> Panel:
    curves = {part: history.shares(part) for part in _PARTS}
    tau = (run.config["compression"] or {}).get("tau")

    def draw(axes: Axes) -> None:
        ends = {}
        for (part, shares), colour in zip(curves.items(), shades(len(curves))[::-1], strict=True):
            _plot(axes, history.steps, [100 * share for share in shares], color=colour, lw=1.3)
            ends[f"{part:.0%}"] = (100 * shares[-1], colour)
        if isinstance(tau, int | float):
            axes.axhline(100 * tau, color=RED, lw=1, ls="--")
            ends["τ"] = (100.0 * tau, RED)
        _finish(axes, run, history, "share of Σσ, %")
        label_ends(axes, {label: (max(value, axes.get_ylim()[0]), colour) for label, (value, colour) in ends.items()})

    said = [f"the smallest {part:.0%} hold {100 * shares[-1]:.2g} %" for part, shares in curves.items()]
    return Panel(f"{prefix}bottom share", f"At the end {', '.join(said)}.", draw, pad=title_pad(run))


def _finish(axes: Axes, run: Run, history: History, label: str) -> None:
    positive = positive_heights(axes)
    if positive and max(positive) > _SPAN * min(positive):
        axes.set_yscale("log")
        axes.set_ylim(bottom=max(min(positive) / 1.6, max(positive) * 1e-9))
        plain_ticks(axes)
    elif positive:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    last = _last_step(run, history)
    count_steps(axes, last)
    if len(history.snapshots) == 1:
        axes.set_xlim(-_AIR * last, (1 + _AIR) * last)  # its points may lie on either end
    mark_cuts(axes, run, history.module)


def _last_step(run: Run, history: History) -> int:
    """The last step; of a run that has not finished, the status may be older than the last snapshot."""
    return run.steps if run.finished else max(run.status.step, history.steps[-1], 1)


def _plot(axes: Axes, steps: ArrayLike, values: ArrayLike, **style: Any) -> None:
    """Draw a line, or a point where it would have no length."""
    if np.isfinite(np.asarray(values, dtype=float)).sum() == 1:
        style |= {"marker": ".", "ms": 6}
    axes.plot(steps, values, **style)


def _spread(items: list, most: int) -> list:
    """Items spread evenly, `most` or fewer, the first and the last among them."""
    if len(items) <= most:
        return items
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def _range(sigma: Sequence[float]) -> str:
    return f"{len(sigma)} values from {max(sigma):.2g} to {min(sigma):.2g}"


# Decades below the largest value that are shown.
_DECADES = 6


def spectra_chart(exhibit: Exhibit) -> Chart | str:
    """States followed over training, a panel an arm: the first layer of its first seed."""
    firsts = [(cell.title, min(cell.runs, key=lambda run: run.seed)) for cell in exhibit.cells if cell.runs]
    found = [(title, run, history) for title, run in firsts for history in histories(run)[:1]]
    if not found:
        return "No spectra were recorded yet."
    snapshots = [(s, exhibit.head * run.steps) for _, run, history in found for s in history.snapshots]
    values = [value for snapshot, last in snapshots if snapshot.step <= last for value in snapshot.sigma if value > 0]
    high = max(values, default=1.0)
    limits = max(min(values, default=high), high * 10.0**-_DECADES) / 1.4, 1.4 * high
    panels = [_panel(title, run, history, exhibit.head, limits) for title, run, history in found]
    shown = "" if exhibit.head == 1 else f" The first {exhibit.head:.0%} of training is shown."
    caption = (
        "Hankel singular values of the first seed of each arm, its states followed from snapshot to snapshot; all "
        f"panels share their limits. Dotted lines are cuts.{shown}"
    )
    return Chart.of(f"spectra-{exhibit.label}", caption, panels, size=(3.8, 3.0))


def _panel(title: str, run: Run, history: History, head: float, limits: tuple[float, float]) -> Panel:
    def draw(axes: Axes) -> None:
        for stretch in history.stretches():
            draw_paths(axes, stretch)
        axes.set_yscale("log")
        axes.set_ylim(*limits)
        plain_ticks(axes)
        axes.set_ylabel("σ")
        count_steps(axes, max(1, math.ceil(head * run.steps)))
        mark_cuts(axes, run, history.module)

    return Panel(title, f"At the end {_range(history.snapshots[-1].sigma)}.", draw, pad=title_pad(run))
