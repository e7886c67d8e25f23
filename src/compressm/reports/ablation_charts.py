"""Validation over training, a line an arm: mean and standard deviation of seeds (fig:sanity, num_red, red_window)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from compressm.reports.canvas import GREY
from compressm.reports.cut_lines import mark_cuts, title_pad
from compressm.reports.outcome_charts import metric_name, scale
from compressm.reports.panels import INK, RAMP, Chart, Panel, count_steps, in_rows, legend_below, shades
from compressm.runs.comparison import Compared, Exhibit
from compressm.runs.run import Run

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
