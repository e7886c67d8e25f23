"""Time of runs by phase and by order (fig:timer)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from compressm_lab.reports.grid import file_name
from compressm_lab.reports.palette import BLUE, BROWN, GREEN, GREY, INK, ORANGE, PAPER, PURPLE, RED, SKY
from compressm_lab.reports.panels import Chart, Panel, legend_below, say_instead
from compressm_lab.runs.groups import Group
from compressm_lab.runs.records import TimeKind
from compressm_lab.runs.run import Run

PHASES = {
    "steps": BLUE,
    "data": GREY,
    "evaluation": GREEN,
    "spectrum": ORANGE,
    "cut": RED,
    "optimizer": PURPLE,
    "capture": SKY,
    "checkpoint": BROWN,
}
_REDUCTION = ("spectrum", "cut", "optimizer", "capture")
# The share of a bar that can hold its own percentage; more bars than _STAGES could not be labelled, and of more than
# _WIDE each is narrower than its percentage.
_LEGIBLE, _STAGES, _WIDE = 0.09, 9, 5


def _timed(group: Group) -> list[Run]:
    return [run for run in group.finished or group.runs if run.timings]


@dataclass(frozen=True)
class Stage:
    """Steps, evaluations and seconds by phase at one mean order."""

    order: float
    steps: int
    seconds: dict[str, float]
    evaluations: int = 0

    @property
    def per_evaluation(self) -> float | None:
        """Milliseconds of an evaluation; None where there was none."""
        return 1e3 * self.seconds["evaluation"] / self.evaluations if self.evaluations else None

    def per_step(self, phase: str) -> float:
        """Milliseconds of a phase for each step."""
        return 1e3 * self.seconds.get(phase, 0.0) / max(self.steps, 1)


def time_chart(groups: Sequence[Group]) -> Chart | str:
    """Seconds by phase of the mean finished seed, a bar a group."""
    kind = run_clock([run for group in groups for run in _timed(group)])
    totals = {f"{group.name}, {group.label}": phases(group, kind) for group in groups}
    known = {label: spent for label, spent in totals.items() if spent}
    if not known:
        return "No timings were recorded."
    caption = f"Seconds of {kind} by phase, the mean over seeds that finished, or over all of a group without any."
    words = "; ".join(f"{label}: {sum(spent.values()):.3g} seconds" for label, spent in known.items())
    panel = Panel("Seconds by phase", words, lambda axes: _bars(axes, known, kind))
    return Chart("time", "", caption, ((panel,),), size=(5.2, 1.4 + 0.48 * len(known)))


def timer_chart(group: Group) -> Chart | str:
    """The paper's four panels for the run that stands for a compressed group."""
    run = group.shown
    stages = stages_of(run)
    if not stages:
        return f"{group.name}, {group.label}: no timings were recorded."
    steps = [(stage.order, stage.per_step("steps")) for stage in stages]
    evaluations = [(stage.order, each) for stage in stages if (each := stage.per_evaluation) is not None]
    rows = (
        (
            _cost_panel("(a) a gradient step", steps, "steps", "gradient step"),
            _cost_panel("(b) an evaluation", evaluations, "evaluation", "evaluation"),
        ),
        (_reduction_panel(run), _budget_panel(stages)),
    )
    caption = (
        f"Times are {run_clock([run])}: of a gradient step and of an evaluation by the order at the time; of each cut, "
        "with the spectra recorded since the evaluation before; and of a thousand steps at every order, divided into "
        "phases, with the share of gradient steps written into the bars. Of deep models the order is the mean over "
        "layers."
    )
    name = file_name("timer", group.name, group.label)
    return Chart(name, f"{group.name}, {group.label}, seed {run.seed}", caption, rows)


def run_clock(runs: Sequence[Run]) -> TimeKind:
    """The clock that parts of runs are compared by: the processors', where all have it and none is on a GPU.

    What one phase takes on a GPU, as a cut, another takes on the processors: on a GPU the wall clock counts both.
    """
    timings = [timing for run in runs for timing in run.timings]
    return "CPU time" if timings and all(t.cpu is not None and t.gpu is None for t in timings) else "wall time"


def phases(group: Group, kind: TimeKind) -> dict[str, float]:
    """Mean seconds of every phase, in the order of `PHASES`."""
    runs = _timed(group)
    found: dict[str, float] = {}
    for run in runs:
        for timing in run.timings:
            for phase, seconds in timing.by(kind).items():
                found[phase] = found.get(phase, 0.0) + seconds / len(runs)
    return {phase: found[phase] for phase in (*PHASES, *sorted(set(found) - set(PHASES))) if found.get(phase)}


def stages_of(run: Run) -> list[Stage]:
    """A stage for every mean order at which steps were taken, large orders first; its seconds are by `run_clock`."""
    kind = run_clock([run])
    found: dict[float, Stage] = {}
    for timing in run.timings:
        order = sum(timing.orders.values()) / max(len(timing.orders), 1)
        before = found.get(order, Stage(order, 0, {}))
        spent = {key: before.seconds.get(key, 0.0) + value for key, value in timing.by(kind).items()}
        evaluations = before.evaluations + (timing.seconds.get("evaluation", 0.0) > 0)
        found[order] = Stage(order, before.steps + timing.steps, {**before.seconds, **spent}, evaluations)
    return sorted((stage for stage in found.values() if stage.steps), key=lambda stage: -stage.order)


def cuts_of(run: Run) -> list[dict[str, float]]:
    """Seconds of each cut by phase: up to its record, and what graphs were captured anew from there to the next cut."""
    steps, kind = dict.fromkeys(cut.step for cut in run.cut_records), run_clock([run])
    places = [next((k for k, t in enumerate(run.timings) if t.step >= step), None) for step in steps]
    known = [place for place in places if place is not None]
    found = []
    for place, end in pairwise([*known, len(run.timings)]):
        spent = {phase: run.timings[place].by(kind).get(phase, 0.0) for phase in _REDUCTION}
        spent["capture"] = sum(timing.by(kind).get("capture", 0.0) for timing in run.timings[place + 1 : end + 1])
        found.append(spent)
    return found


def _bars(axes: Axes, totals: dict[str, dict[str, float]], kind: TimeKind) -> None:
    places = range(len(totals))
    left = [0.0] * len(totals)
    longest = max(sum(spent.values()) for spent in totals.values())
    for phase in dict.fromkeys(phase for spent in totals.values() for phase in spent):
        widths = [spent.get(phase, 0.0) for spent in totals.values()]
        axes.barh(places, widths, left=left, color=PHASES.get(phase, INK), label=phase, height=0.42)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    # Names stand above their bars: beside them they would take half of a narrow screen.
    for place, label, end in zip(places, totals, left, strict=True):
        axes.text(0, place - 0.29, label, va="bottom", fontsize=8.5)
        axes.text(end + 0.01 * longest, place, f"{end:.3g} s", va="center", fontsize=8.5)
    axes.set(xlabel=f"seconds of {kind}", xlim=(0, 1.14 * longest), ylim=(len(totals) - 0.5, -0.85), yticks=[])
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    legend_below(axes, columns=4)


def _cost_panel(title: str, points: Sequence[tuple[float, float]], phase: str, thing: str) -> Panel:
    """A panel of milliseconds by order."""
    absent = f"no {thing} was timed"

    def draw(axes: Axes) -> None:
        if not points:
            say_instead(axes, absent)
            return
        axes.plot(*zip(*points, strict=True), color=PHASES[phase], marker="o", ms=4, lw=1.4)
        axes.set(xlabel="order", ylabel=f"ms for each {thing}")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)

    words = "; ".join(f"{value:.3g} milliseconds at order {order:.3g}" for order, value in points)
    return Panel(title, words or absent, draw)


def _reduction_panel(run: Run) -> Panel:
    cuts = [{phase: 1e3 * seconds for phase, seconds in spent.items()} for spent in cuts_of(run)]

    def draw(axes: Axes) -> None:
        if not cuts:
            say_instead(axes, "no time of a cut was recorded")
            return
        _stack(axes, [str(k) for k in range(1, len(cuts) + 1)], cuts, _REDUCTION)
        axes.set(xlabel="cut", ylabel="milliseconds")
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        legend_below(axes, columns=4)

    total = sum(sum(spent.values()) for spent in cuts)
    return Panel("(c) every cut", f"{len(cuts)} cuts, {total:.3g} milliseconds together.", draw)


def _budget_panel(stages: Sequence[Stage]) -> Panel:
    shown = stages if len(stages) <= _STAGES else [stages[round(k * (len(stages) - 1) / 8)] for k in range(_STAGES)]

    def draw(axes: Axes) -> None:
        spent = [{phase: stage.per_step(phase) for phase in PHASES} for stage in shown]
        _stack(axes, [f"{stage.order:.3g}" for stage in shown], spent, tuple(PHASES))
        axes.set(xlabel="order", ylabel="seconds for 1000 steps")
        legend_below(axes, columns=3)

    words = "; ".join(f"{sum(s.per_step(p) for p in PHASES):.3g} seconds at order {s.order:.3g}" for s in shown)
    return Panel("(d) a thousand steps", words, draw)


def _stack(axes: Axes, labels: list[str], spent: list[dict[str, float]], order: Sequence[str]) -> None:
    bottom = [0.0] * len(labels)
    highest = max((sum(values.values()) for values in spent), default=0.0)
    inside: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "color": PAPER}
    inside["rotation"] = 90 if len(labels) > _WIDE else 0
    for phase in order:
        heights = [values.get(phase, 0.0) for values in spent]
        if not any(heights):
            continue
        axes.bar(labels, heights, bottom=bottom, color=PHASES[phase], label=phase, width=0.68)
        for k, height in enumerate(heights):
            if phase == "steps" and height > _LEGIBLE * highest:
                share = height / sum(spent[k].values())
                axes.text(k, bottom[k] + height / 2, f"{share:.0%}", **inside)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    # A bar of no height on top of the highest would take its margin away.
    axes.set_ylim(0, 1.05 * highest or 1.0)
    axes.grid(visible=False, axis="x")
