"""Runs with a penalty in their loss, and models cut once after training: how it fell, what is left at every order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from matplotlib.axes import Axes

from compressm_lab.reports.grid import NOTHING, Grid, clock, number, plus_minus, rounded
from compressm_lab.reports.outcome_charts import best_known, metric_name, named, scale
from compressm_lab.reports.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PAPER,
    PURPLE,
    RED,
    Chart,
    Panel,
    count_steps,
    legend_below,
    plain_ticks,
    positive_heights,
)
from compressm_lab.runs.groups import Group, Statistic

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED)
_PENALTY = (
    "The penalty is without its weight, as it was when it was found last; a line a seed. It is found every so many "
    "steps, and seconds are those of finding it."
)
_TRUNCATED = (
    "Copies of the final model are cut once to each order and evaluated: filled circles, the three best seeds by "
    "validation or all where there are fewer; bars are one standard deviation. Open circles are the models as "
    "they were trained; grey are models that were trained at their order with nothing added."
)


def penalty_chart(groups: Sequence[Group]) -> Chart | None:
    """A row a recipe: the penalty over training, and test by the order of one cut; None where there is neither."""
    rows = []
    for name in dict.fromkeys(group.name for group in groups):
        own = [group for group in groups if group.name == name]
        penalised, cut = [g for g in own if _penalised(g)], [g for g in own if _orders(g)]
        row = (
            *([_penalty_panel(name, penalised)] if penalised else []),
            *([_order_panel(name, cut, own)] if cut else []),
        )
        rows += [row] if row else []
    if not rows:
        return None
    said = (
        _PENALTY if any(map(_penalised, groups)) else "",
        _TRUNCATED if any(map(_orders, groups)) else "",
    )
    return Chart("penalty", "", " ".join(filter(None, said)), tuple(rows))


def penalty_grid(groups: Sequence[Group]) -> Grid | None:
    """One row a group: where the penalty began and ended, and what it cost."""
    rows = tuple(_penalty_row(group, groups) for group in groups if _penalised(group))
    heads = ("runs", "penalty", "weight", "at first", "at last", "found", "each", "share of step time")
    return Grid("Penalties", heads, rows) if rows else None


def truncation_grid(groups: Sequence[Group]) -> Grid | None:
    """One row a group and order, from the model as it was trained downwards."""
    rows = tuple(row for group in groups if _orders(group) for row in _truncation_rows(group, groups))
    metric = "test, %" if all(group.metric == "accuracy" for group in groups) else "test"
    heads = ("runs", "order", metric, "against the whole", "error bound", "seeds")
    return Grid("Cut once after training", heads, rows) if rows else None


def _penalised(group: Group) -> bool:
    return any(run.penalties for run in group.runs)


def _orders(group: Group) -> list[int]:
    return sorted({record.order for run in group.finished for record in run.truncations}, reverse=True)


def _penalty_panel(name: str, groups: list[Group]) -> Panel:
    def draw(axes: Axes) -> None:
        for colour, group in zip(_cycled(groups), groups, strict=False):
            for k, run in enumerate(run for run in group.runs if run.penalties):
                points = [(record.step, record.value) for record in run.penalties]
                label, marker = group.label if k == 0 else None, "o" if len(points) == 1 else None
                axes.plot(*zip(*points, strict=True), color=colour, lw=1.3, label=label, marker=marker, ms=4)
        axes.set_ylabel("penalty")
        if positive_heights(axes):
            axes.set_yscale("log")
            plain_ticks(axes)
        count_steps(axes, max(run.steps for group in groups for run in group.runs))
        legend_below(axes, columns=1)

    said = [f"{g.label}: {number(_ends(g)[0])} at first, {number(_ends(g)[1])} at last" for g in groups]
    return Panel(f"{name}: penalty over training", "; ".join(said), draw)


def _order_panel(name: str, groups: list[Group], every: list[Group]) -> Panel:
    def draw(axes: Axes) -> None:
        plain = sorted(_points(other for other in every if other.plain and other not in groups))
        if plain:
            axes.plot(*zip(*((x, y) for x, y, _ in plain), strict=True), color=GREY, lw=1, marker="o", ms=4)
            axes.lines[-1].set_label("trained at that order")
        for colour, group in zip(_cycled(groups), groups, strict=False):
            found = sorted(_points(_truncated(group)))
            x, y, spread = zip(*found, strict=True)
            axes.errorbar(x, y, yerr=spread, color=colour, lw=1.3, capsize=2, marker="o", ms=4.5, label=group.label)
            for at, value, _ in _points([group]):
                axes.scatter(at, value, s=34, facecolor=PAPER, edgecolor=colour, zorder=3)
        axes.set(xlabel="order, mean over layers", ylabel=metric_name(groups[0]), xscale="log")
        plain_ticks(axes)
        axes.margins(x=0.08, y=0.12)
        legend_below(axes, columns=2)

    said = [f"{g.label}: {y:.3g} at order {x:g}" for g in groups for x, y, _ in _points(_truncated(g))]
    return Panel(f"{name}: one cut after training", "; ".join(said), draw)


def _truncated(group: Group) -> list[Group]:
    return [replace(group, truncated=order) for order in _orders(group)]


def _points(groups: Iterable[Group]) -> list[tuple[float, float, float]]:
    """Order, test and its spread."""
    found = ((group, group.order, best_known(group)) for group in groups)
    return [
        (order.centre, scale(group, sample.centre), scale(group, sample.spread or 0.0))
        for group, order, sample in found
        if order and sample
    ]


def _cycled(groups: Sequence[Group]) -> list[str]:
    return [_COLOURS[k % len(_COLOURS)] for k in range(len(groups))]


def _ends(group: Group) -> tuple[float, float]:
    """The first and the last value, means over seeds."""
    runs = [run.penalties for run in group.runs if run.penalties]
    first, last = (sum(records[place].value for records in runs) / len(runs) for place in (0, -1))
    return first, last


def _penalty_row(group: Group, groups: Sequence[Group]) -> tuple[str, ...]:
    records = [run.penalties[-1] for run in group.runs if run.penalties]
    each = Statistic.of(record.seconds / max(record.evaluations, 1) for record in records)
    steps = [max((e.step_seconds for e in run.evaluations), default=0.0) for run in group.runs if run.penalties]
    shares = [record.seconds / spent for record, spent in zip(records, steps, strict=True) if spent]
    first, last = _ends(group)
    return (
        named(group, groups),
        records[0].kind.replace("-", " "),
        f"{records[0].beta:g}",
        number(first),
        number(last),
        f"{max(record.evaluations for record in records)} times",
        clock(each),
        plus_minus(Statistic.of(shares), factor=100.0) + " %" if shares else NOTHING,
    )


def _truncation_rows(group: Group, groups: Sequence[Group]) -> list[tuple[str, ...]]:
    whole = best_known(group)
    rows = [_truncation_row(named(group, groups), group, None)]
    return rows + [_truncation_row("", cut, whole) for cut in _truncated(group)]


def _truncation_row(name: str, group: Group, whole: Statistic | None) -> tuple[str, ...]:
    sample, order = best_known(group), group.order
    records = [r for run in group.finished for r in run.truncations if r.order == group.truncated]
    bound = Statistic.of(record.error_bound for record in records if record.split == "test")
    loss = None if sample is None or whole is None else scale(group, sample.centre - whole.centre)
    shown = plus_minus(sample, factor=100.0) if group.metric == "accuracy" else rounded(sample)
    return (
        name,
        NOTHING if order is None else f"{order.centre:.4g}",
        shown,
        NOTHING if loss is None else f"{loss:+.2g}".replace("-", "−"),
        rounded(bound) if bound else NOTHING,
        str(len(group.ranked)),
    )
