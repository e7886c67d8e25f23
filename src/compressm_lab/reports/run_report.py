"""The report of runs: one HTML page that needs nothing else, and its figures as files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from compressm.files import replacing
from compressm_lab.reports.curve_charts import order_paths_chart, training_chart
from compressm_lab.reports.grid import Grid, listed
from compressm_lab.reports.hankel_charts import hankel_chart
from compressm_lab.reports.outcome_charts import missing_references, outcome_chart
from compressm_lab.reports.panels import Chart, inline_svg, write_files
from compressm_lab.reports.penalty_charts import penalty_chart, penalty_grid, truncation_grid
from compressm_lab.reports.run_tables import cut_grid, machine_grid, recipe_grid, result_grid, run_grid
from compressm_lab.reports.time_charts import time_chart, timer_chart
from compressm_lab.runs.directory import State
from compressm_lab.runs.groups import Group, group_runs
from compressm_lab.runs.records import RunError
from compressm_lab.runs.run import Run

FORMATS = ("png", "pdf")
_STATES: dict[State, str] = {
    "running": "running, or ended without a word",
    "interrupted": "interrupted",
    "failed": "failed",
}


@dataclass(frozen=True)
class Section:
    """A heading with charts and tables, or with sentences that say why one is missing."""

    key: str
    title: str
    parts: tuple[Chart | Grid | str, ...]


@dataclass(frozen=True)
class Recipe:
    """What a reader needs to train a group again."""

    title: str
    commands: tuple[str, ...]
    config: str
    cuts: tuple[Grid, ...]


def write_report(
    runs: Sequence[Run],
    out: Path | str,
    *,
    title: str | None = None,
    names: Mapping[str, str] | None = None,
    formats: Iterable[str] = FORMATS,
    broken: Sequence[str] = (),
    front: Sequence[Section] = (),
    details: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """`out`/report.html and `out`/figures/*; the page is written last, whole or not at all.

    `names` are, by the path of a run, what its group is called instead of its label. `broken` says which runs are left
    out and why (`gather`), for the top of the page; `front` are sections before all others. Without `details` there are
    no spectra and no times by order, which take minutes for many groups.
    """
    if not runs:
        raise RunError("no runs given, expected at least one")
    folder, wanted = Path(out), tuple(formats)
    called = names or {}
    groups = [replace(group, label=called.get(group.runs[0].path, group.label)) for group in group_runs(runs)]
    sections = [*front, *_sections(groups, progress, details)]
    charts = [part for section in sections for part in section.parts if isinstance(part, Chart)]
    for chart in charts if wanted else []:
        progress(f"{chart.name} ({', '.join(wanted)})")
        write_files(chart, folder / "figures", wanted)
    progress("page")
    page = _page(groups, sections, title or f"Training report: {listed(_names(groups))}", broken)
    with replacing(folder / "report.html") as scratch:
        scratch.write_text(page, encoding="utf-8")
    return folder / "report.html"


def _sections(groups: list[Group], progress: Callable[[str], None], details: bool) -> list[Section]:
    cut, uncut = ([group for group in groups if group.compressed is wanted] for wanted in (True, False))
    timed = [group for group in cut if details and any(run.events for run in group.runs)]
    progress("spectra")
    # Where nothing was cut, they are what there is to see.
    folded = [(group, False) for group in cut] + [(group, bool(cut)) for group in uncut]
    hankel = tuple(hankel_chart(group, folded=away) for group, away in folded if details)
    sections = [
        Section("accuracy", "Accuracy, order and speed-up", (outcome_chart(groups),)),
        Section("training", "Over training", (training_chart(groups),)),
        Section("orders", "Order of every layer", (order_paths_chart(groups),)),
        Section("penalty", "Penalties, and one cut after training", _compared(groups)),
        Section("hankel", "Hankel singular values", hankel),
        Section("time", "Where the time went", (time_chart(groups), *(timer_chart(group) for group in timed))),
    ]
    return [section for section in sections if section.parts]


def _compared(groups: list[Group]) -> tuple[Chart | Grid, ...]:
    """Of runs that have such records."""
    found = (penalty_chart(groups), penalty_grid(groups), truncation_grid(groups))
    return tuple(part for part in found if part is not None)


def _page(groups: list[Group], sections: list[Section], title: str, broken: Sequence[str]) -> str:
    jinja = Environment(
        loader=PackageLoader("compressm_lab.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.tests["chart"] = lambda part: isinstance(part, Chart)
    jinja.tests["grid"] = lambda part: isinstance(part, Grid)
    # Trusted: drawn here, and what it quotes of a run was escaped.
    jinja.globals["drawing"] = lambda chart, k: Markup(
        inline_svg(chart.panels[k], key=f"{chart.name}-{k}", size=chart.size)
    )
    runs = [run for group in groups for run in group.runs]
    return jinja.get_template("report.html").render(
        title=title,
        summary=_summary(groups),
        unfinished=_unfinished(runs),
        broken=broken,
        sections=sections,
        recipes_grid=recipe_grid(groups),
        results=result_grid(groups),
        reference_note=missing_references(groups),
        runs=run_grid(groups),
        machines=machine_grid(runs),
        recipes=[_recipe(group) for group in groups],
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _names(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(group.name for group in groups))


def _summary(groups: Sequence[Group]) -> str:
    said = []
    for name in _names(groups):
        own = [group for group in groups if group.name == name]
        runs = sum(len(group.runs) for group in own)
        said.append(f"{name} ({_counted(runs, 'run')} in {_counted(len(own), 'group')})")
    return f"This page shows {listed(said)}."


def _unfinished(runs: Sequence[Run]) -> str:
    """A sentence, empty where all runs finished."""
    counts = {words: sum(run.status.state == state for run in runs) for state, words in _STATES.items()}
    said = [f"{count} {words}" for words, count in counts.items() if count]
    if not said:
        return ""
    return f"Of {_counted(len(runs), 'run')}, {listed(said)}. They are listed below and left out of the means."


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _recipe(group: Group) -> Recipe:
    return Recipe(
        f"{group.name}, {group.label}",
        tuple(command(run) for run in group.runs),
        json.dumps(dict(group.shown.config), indent=2, ensure_ascii=False),
        tuple(cut_grid(run) for run in group.runs if run.events),
    )


def command(run: Run) -> str:
    """What trains a run again, from the configuration it wrote down."""
    return shlex.join(["compressm", "train", f"{run.path}/config.json", "--out", f"{run.path}-again"])
