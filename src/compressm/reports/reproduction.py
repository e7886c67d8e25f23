"""The report on a table or figure of the paper: Markdown, an HTML page and pictures, ours beside the paper's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from compressm.reports.ablation_charts import curves_chart
from compressm.reports.comparison_tables import paper_form_grids, trained_grid
from compressm.reports.grid import Grid
from compressm.reports.panels import Chart
from compressm.reports.pictures import draw
from compressm.reports.run_report import Section, write_report
from compressm.reports.seed_charts import seeds_chart
from compressm.reports.spectra_charts import spectra_chart
from compressm.reports.tables import markdown
from compressm.runs.atomic import replacing
from compressm.runs.comparison import Exhibit
from compressm.runs.measurement import Measurement
from compressm.runs.paper import PaperItem

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
    """`out`/report.md and, where runs have begun, report.html and figures/; the first is returned."""
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
    """The same for a figure that is a benchmark: its table and its picture, in `out`/report.md."""
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
    missing = [f"{cell.task}, {cell.method}, {cell.column}: {cell.missing}" for cell in exhibit.cells if cell.missing]
    if missing:
        said.append(f"Missing: {'; '.join(missing)}.")
    return said


def _figures(exhibit: Exhibit, folder: Path, drawn: Chart | str | None) -> list[Path]:
    wanted = (drawn.name,) if isinstance(drawn, Chart) else _FIGURES.get(exhibit.picture, ())
    return list(dict.fromkeys(path for begin in wanted for path in sorted(folder.glob(f"{begin}*.png"))))


def _markdown(exhibit: Exhibit, tables: list[Grid], drawn: Chart | str | None, figures: list[Path]) -> str:
    lines = [f"# {exhibit.label}: {exhibit.title}", "", *(f"{said}\n" for said in _sentences(exhibit))]
    for figure in figures:
        lines += [f"![{figure.stem}](figures/{figure.name})", ""]
    if isinstance(drawn, Chart):
        lines += [drawn.caption, ""]
    elif drawn:
        lines += [drawn, ""]
    for table in tables:
        lines += [f"## {table.title}", "", table.markdown().replace("\n(", "<br>("), ""]
        lines += [table.caption, ""] if table.caption else []
    return "\n".join(lines).rstrip() + "\n"
