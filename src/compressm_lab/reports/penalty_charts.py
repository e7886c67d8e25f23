"""Penalties over training, and the test values of models that are cut once after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes

from compressm_lab.reports.grid import NOTHING, Grid, clock, number, plus_minus, rounded
from compressm_lab.reports.outcome_charts import best_known, colours_of, metric_name, named, scale, score
from compressm_lab.reports.palette import GREY, PAPER
from compressm_lab.reports.panels import Chart, Panel, count_steps, legend_below, logarithmic, plain_ticks
from compressm_lab.runs.groups import Group, Statistic, by_name

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
    """The penalty over training, and test by the order of one cut, a row a recipe; None where there is neither."""
    rows, colours = [], colours_of(groups)
    for name, own in by_name(groups).items():
        penalised, cut = [g for g in own if _penalised(g)], [g for g in own if _orders(g)]
        row = [_penalty_panel(name, penalised, colours)] if penalised else []
        row += [_order_panel(name, cut, own, colours)] if cut else []
        rows += [tuple(row)] if row else []
    said = [_PENALTY] if any(map(_penalised, groups)) else []
    said += [_TRUNCATED] if any(map(_orders, groups)) else []
    return Chart("penalty", "", " ".join(said), tuple(rows)) if rows else None


def penalty_grid(groups: Sequence[Group]) -> Grid | None:
    """First and last values of penalties and their cost, a row a group; None without any."""
    rows = tuple((named(group, groups), *_penalty_row(group)) for group in groups if _penalised(group))
    heads = ("runs", "penalty", "weight", "at first", "at last", "found", "each", "share of step time")
    return Grid("Penalties", heads, rows) if rows else None


def truncation_grid(groups: Sequence[Group]) -> Grid | None:
    """Test values of models cut once, a row a group and order, from the model as it was trained downwards."""
    rows: list[tuple[str, ...]] = []
    for group in groups:
        if _orders(group):
            rows.append((named(group, groups), *_truncation_row(group, None)))
            rows += [("", *_truncation_row(cut, best_known(group))) for cut in _truncated(group)]
    metric = "test, %" if all(group.metric == "accuracy" for group in groups) else "test"
    heads = ("runs", "order", metric, "against the whole", "error bound", "seeds")
    return Grid("Cut once after training", heads, tuple(rows)) if rows else None


def _penalised(group: Group) -> bool:
    return any(run.penalties for run in group.runs)


def _orders(group: Group) -> list[int]:
    return sorted({record.order for run in group.finished for record in run.truncations}, reverse=True)


def _penalty_panel(name: str, groups: list[Group], colours: Mapping[tuple[str, str], str]) -> Panel:
    def draw(axes: Axes) -> None:
        for group in groups:
            colour = colours[group.name, group.label]
            for k, run in enumerate(run for run in group.runs if run.penalties):
                points = [(record.step, record.value) for record in run.penalties]
                label, marker = group.label if k == 0 else None, "o" if len(points) == 1 else None
                axes.plot(*zip(*points, strict=True), color=colour, lw=1.3, label=label, marker=marker, ms=4)
        axes.set_ylabel("penalty")
        logarithmic(axes)
        count_steps(axes, max(run.steps for group in groups for run in group.runs))
        legend_below(axes, columns=1)

    said = [f"{g.label}: {number(_ends(g)[0])} at first, {number(_ends(g)[1])} at last" for g in groups]
    return Panel(f"{name}: penalty over training", "; ".join(said), draw)


def _order_panel(name: str, groups: list[Group], every: list[Group], colours: Mapping[tuple[str, str], str]) -> Panel:
    def draw(axes: Axes) -> None:
        plain = sorted(_points(other for other in every if other.plain and other not in groups))
        if plain:
            axes.plot(*zip(*((x, y) for x, y, _ in plain), strict=True), color=GREY, lw=1, marker="o", ms=4)
            axes.lines[-1].set_label("trained at that order")
        for group in groups:
            colour = colours[group.name, group.label]
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
    """Order, test and its spread of every group that has them."""
    found = ((group, group.order, best_known(group)) for group in groups)
    known = ((group, order.centre, sample) for group, order, sample in found if order and sample)
    return [(order, scale(g, sample.centre), scale(g, sample.spread or 0.0)) for g, order, sample in known]


def _ends(group: Group) -> tuple[float, float]:
    """The first and the last value, means over seeds."""
    runs = [run.penalties for run in group.runs if run.penalties]
    first, last = (sum(records[place].value for records in runs) / len(runs) for place in (0, -1))
    return first, last


def _penalty_row(group: Group) -> tuple[str, ...]:
    runs = [run for run in group.runs if run.penalties]
    records = [run.penalties[-1] for run in runs]
    each = Statistic.of(record.seconds / max(record.evaluations, 1) for record in records)
    steps = [max((e.step_seconds for e in run.evaluations), default=0.0) for run in runs]
    shares = [record.seconds / spent for record, spent in zip(records, steps, strict=True) if spent]
    return (
        records[0].kind.replace("-", " "),
        f"{records[0].beta:g}",
        *map(number, _ends(group)),
        f"{max(record.evaluations for record in records)} times",
        clock(each),
        plus_minus(Statistic.of(shares), factor=100.0) + " %" if shares else NOTHING,
    )


def _truncation_row(group: Group, whole: Statistic | None) -> tuple[str, ...]:
    sample, order = best_known(group), group.order
    records = [r for run in group.finished for r in run.truncations if r.order == group.truncated]
    bound = Statistic.of(record.error_bound for record in records if record.split == "test")
    loss = None if sample is None or whole is None else scale(group, sample.centre - whole.centre)
    return (
        NOTHING if order is None else f"{order.centre:.4g}",
        score(group, sample),
        NOTHING if loss is None else f"{loss:+.2g}".replace("-", "−"),
        rounded(bound),
        str(len(group.ranked)),
    )
