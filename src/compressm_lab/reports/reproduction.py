"""Runs beside the paper's numbers: a table in the paper's form for every task, and one with all that was trained."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compressm.files import replacing
from compressm_lab.reports.curve_charts import curves_chart
from compressm_lab.reports.grid import NOTHING, Grid, clock, order, plus_minus, steps
from compressm_lab.reports.hankel_charts import spectra_chart
from compressm_lab.reports.measurements import draw, markdown
from compressm_lab.reports.outcome_charts import seeds_chart, seeds_finished
from compressm_lab.reports.panels import Chart
from compressm_lab.reports.run_report import Section, write_report
from compressm_lab.runs.groups import Statistic
from compressm_lab.runs.measurement import Measurement
from compressm_lab.runs.paper import Compared, Exhibit, PaperItem, Quantity

_NAMES: dict[Quantity, str] = {
    "order": "order",
    "accuracy": "top three by test, %",
    "mean": "mean of all, %",
    "best": "best seed, test, %",
    "speed-up": "speed-up",
}
_CAPTION = (
    "Test is where validation was best since the last cut, in mean ± standard deviation: of the three seeds that are "
    "best by test, as the paper counts, or of all where there are fewer; and of all seeds, which leaves nothing to "
    "choice. Orders are means over layers and seeds. Speed-up is the time of the "
    "model that is never cut over the run's own, and compares only runs that were trained alone on one machine. A "
    "student's time counts its teacher. What was cut once after training is the final model, tested after the cut."
)


def paper_form_grids(exhibit: Exhibit) -> list[Grid]:
    """Tables in the paper's form, a row a method and quantity: ours, and below it the paper's in brackets."""
    return [_paper_form(exhibit, task) for task in exhibit.tasks if len(exhibit.of_task(task)) > 1]


def _paper_form(exhibit: Exhibit, task: str) -> Grid:
    cells = exhibit.of_task(task)
    columns = list(dict.fromkeys(cell.column for cell in cells))
    rows = []
    for method in dict.fromkeys(cell.method for cell in cells):
        by_column = {cell.column: cell for cell in cells if cell.method == method}
        own = [by_column.get(column) for column in columns]
        rows += [(f"{method}: {_NAMES[q]}", *(_both(exhibit, cell, q) for cell in own)) for q in _quantities(exhibit)]
        rows.append((f"{method}: time", *(clock(cell.seconds) if cell else NOTHING for cell in own)))
    caption = "Ours, and below it the paper's in brackets." if exhibit.paper and exhibit.paper.values else ""
    if (most := max(cell.together for cell in cells)) > 1:
        caption += f" Up to {most} trainings shared the machine: times are of that, and GPUs have no speed-up."
    if missing := [cell for cell in cells if cell.missing]:
        caption += f" {len(missing)} of {len(cells)} cells are not trained: {command(exhibit, task)}"
    known = tuple(row for row in rows if any(text != NOTHING for text in row[1:]))
    return Grid(exhibit.named(task), ("", *columns), known, caption)


def command(exhibit: Exhibit, task: str) -> str:
    """The command that trains every cell of a task."""
    quick = ["--quick"] if exhibit.quick else []
    return shlex.join(["compressm", "reproduce", exhibit.label, "--only", task, *quick])


def _quantities(exhibit: Exhibit) -> tuple[Quantity, ...]:
    return "order", exhibit.quantity, "mean", "speed-up"


def _both(exhibit: Exhibit, cell: Compared | None, quantity: Quantity) -> str:
    if cell is None:
        return NOTHING
    ours, theirs = exhibit.ours(cell, quantity), exhibit.theirs(cell, quantity)
    return _shown(quantity, ours) + ("" if theirs is None else f"\n({_shown(quantity, theirs)})")


def _shown(quantity: Quantity, sample: Statistic | None) -> str:
    """A number with as many digits as the paper gives."""
    return order(sample) if quantity == "order" else plus_minus(sample, digits=2 if quantity == "speed-up" else 1)


def trained_grid(exhibit: Exhibit) -> Grid:
    """All that was trained, a row a cell: our numbers, the paper's, and how ours were measured."""
    heads = ["task", "method", "column"]
    heads += [head for quantity in _quantities(exhibit) for head in (_NAMES[quantity], "paper")]
    heads += ["seeds", "steps", "time", "commit"]
    rows = []
    for cell in exhibit.cells:
        both = [(q, sample(cell, q)) for q in _quantities(exhibit) for sample in (exhibit.ours, exhibit.theirs)]
        training = cell.missing or NOTHING, NOTHING, NOTHING, NOTHING
        if not cell.missing:
            training = _seeds(cell), steps(cell.steps), clock(cell.seconds), ", ".join(cell.commits)
        numbers = (_shown(quantity, sample) for quantity, sample in both)
        rows.append((exhibit.named(cell.task), cell.method, cell.column, *numbers, *training))
    # What the paper does not give, and a speed-up over nothing, would be columns of dashes.
    return Grid("Every cell", tuple(heads), tuple(rows), _CAPTION).without_empty("paper", "speed-up")


def _seeds(cell: Compared) -> str:
    """The number of seeds, with those of earlier results that have no run here."""
    here = seeds_finished(cell.group) if cell.group else ""
    earlier = f"{len(cell.kept)} kept" if cell.kept else ""
    return ", ".join(filter(None, (here, earlier)))


FORMATS = ("png", "svg")
# Pictures of their own; all others are those of every report on runs.
_CHARTS: dict[str, Callable[[Exhibit], Chart | str]] = {
    "curves": curves_chart,
    "spectra": spectra_chart,
    "seeds": seeds_chart,
}
# Which figures of a report on runs show it, by how their names begin.
_FIGURES = {"outcome": ("accuracy",), "hankel": ("hankel",), "timer": ("timer", "time")}


def write_reproduction(exhibit: Exhibit, out: Path, *, progress: Callable[[str], None] = lambda line: None) -> Path:
    """Write `out`/report.md, which is returned, and report.html and figures/ where runs have begun."""
    tables = [*paper_form_grids(exhibit), trained_grid(exhibit)]
    drawn = _CHARTS[exhibit.picture](exhibit) if exhibit.picture in _CHARTS else None
    figures: list[Path] = []
    if exhibit.runs:
        parts = (*_sentences(exhibit), *([drawn] if drawn is not None else []), *tables)
        front = [Section("paper", f"Beside the paper: {exhibit.label}", parts)]
        details = exhibit.picture in ("hankel", "timer")
        title = f"{exhibit.label}: {exhibit.title}"
        shown: dict[str, Any] = {"title": title, "names": exhibit.names, "front": front, "details": details}
        write_report(exhibit.runs, out, formats=FORMATS, progress=progress, **shown)
        figures = _figures(exhibit, out / "figures", drawn)
    with replacing(out / "report.md") as scratch:
        scratch.write_text(_markdown(exhibit, tables, drawn, figures), encoding="utf-8")
    return out / "report.md"


def write_measured(measurement: Measurement, paper: PaperItem, out: Path, *, quick: bool) -> Path:
    """Write `out`/report.md for a figure that is a benchmark: its table and its picture."""
    picture = draw(measurement, out / "figures" / f"{measurement.name}.png")
    machine = measurement.environment
    lines = [
        *(f"# {paper.label}: {paper.title}", ""),
        *(("Quick: small orders and few repeats.", "") if quick else ()),
        *(f"The paper ({paper.origin}): {paper.says}", ""),
        *(f"![{paper.title}](figures/{picture.name})", ""),
        *(markdown(measurement), ""),
        f"{machine.processor}, {machine.threads} thread(s), torch {machine.torch}, {machine.date}, {machine.commit}",
    ]
    with replacing(out / "report.md") as scratch:
        scratch.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return out / "report.md"


def _sentences(exhibit: Exhibit) -> list[str]:
    said = [exhibit.quick] if exhibit.quick else []
    if exhibit.paper is not None:
        said.append(f"The paper ({exhibit.paper.origin}): {exhibit.paper.says}")
    if missing := sum(bool(cell.missing) for cell in exhibit.cells):
        said.append(f"{missing} of {len(exhibit.cells)} cells are not trained; the last table has the command of each.")
    return said


def _figures(exhibit: Exhibit, folder: Path, drawn: Chart | str | None) -> list[Path]:
    wanted = (drawn.name,) if isinstance(drawn, Chart) else _FIGURES.get(exhibit.picture, ())
    return list(dict.fromkeys(path for begin in wanted for path in sorted(folder.glob(f"{begin}*.png"))))


def _markdown(exhibit: Exhibit, tables: list[Grid], drawn: Chart | str | None, figures: list[Path]) -> str:
    lines = [f"# {exhibit.label}: {exhibit.title}", "", *(f"{said}\n" for said in _sentences(exhibit))]
    for figure in figures:
        lines += [f"![{figure.stem}](figures/{figure.name})", ""]
    if drawn:
        lines += [drawn.caption if isinstance(drawn, Chart) else drawn, ""]
    for table in tables:
        lines += [f"## {table.title}", "", table.markdown().replace("\n(", "<br>("), ""]
        lines += [table.caption, ""] if table.caption else []
    return "\n".join(lines).rstrip() + "\n"
