"""Accuracy against the final order: of the best seeds and of all, with and without the extremes (fig:mamba-imdb)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from matplotlib.axes import Axes

from compressm.reports.canvas import BLUE, GREY, ORANGE, RED
from compressm.reports.outcome_charts import metric_name, scale
from compressm.reports.panels import PAPER, Chart, Panel, legend_below
from compressm.runs.comparison import Compared, Exhibit

_COLOURS = {"baseline": GREY, "CompreSSM": ORANGE, "random states": RED}


def seeds_chart(exhibit: Exhibit) -> Chart | str:
    """The paper's four panels."""
    known = [cell for cell in exhibit.cells if cell.group is not None and cell.group.ranked]
    if not known:
        return "No finished run has a test value yet, so there is nothing to compare."
    rows = tuple(
        (_panel(known, best=True, trimmed=trimmed), _panel(known, best=False, trimmed=trimmed))
        for trimmed in (False, True)
    )
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
    if not trimmed or len(found) < 3:
        return found
    kept = list(found)
    kept.remove(max(found))
    kept.remove(min(found))
    return kept


def _panel(cells: Sequence[Compared], *, best: bool, trimmed: bool) -> Panel:
    def draw(axes: Axes) -> None:
        named: set[str] = set()
        for cell in cells:
            assert cell.group is not None
            assert cell.group.order is not None
            values = values_of(cell, trimmed=trimmed)
            shown, x = values[:3] if best else values, cell.group.order.centre
            colour = _COLOURS.get(cell.method, BLUE)
            spread = stdev(shown) if len(shown) > 1 else None
            axes.errorbar(x, fmean(shown), yerr=spread, color=colour, lw=1.2, capsize=2, zorder=2.5)
            label = None if cell.method in named else cell.method
            axes.scatter(x, fmean(shown), s=36, color=colour, zorder=3, label=label)
            if best:
                axes.scatter(x, values[0], s=80, marker="*", color=colour, edgecolor=PAPER, linewidth=0.5, zorder=3.5)
            named.add(cell.method)
        axes.set(xlabel="final order, mean over layers", ylabel=metric_name(cells[0].group))  # type: ignore[arg-type]
        axes.margins(x=0.1, y=0.15)
        legend_below(axes, columns=2)

    words = "; ".join(f"{cell.title}: {fmean(values_of(cell, trimmed=trimmed)):.1f}" for cell in cells)
    title = ("best seeds" if best else "mean") + (", without the extremes" if trimmed else "")
    return Panel(title, words, draw)
