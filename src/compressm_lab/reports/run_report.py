"""The report of runs: one HTML page that needs nothing else, its figures as files, and its tables.

Tables: what was trained, what came out, every run, every cut, every machine.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from compressm.files import replacing
from compressm_lab.reports.answer_chart import answer_chart, answers
from compressm_lab.reports.curve_charts import order_paths_chart, training_chart
from compressm_lab.reports.grid import NOTHING, Grid, clock, listed, number, order, percent, plus_minus, rounded, steps
from compressm_lab.reports.hankel_charts import hankel_chart
from compressm_lab.reports.outcome_charts import (
    colours_of,
    missing_references,
    named,
    outcome_chart,
    score,
    seeds_finished,
)
from compressm_lab.reports.panels import Chart, inline_svg, write_files
from compressm_lab.reports.penalty_charts import penalty_chart, penalty_grid, truncation_grid
from compressm_lab.reports.time_charts import time_chart, timer_chart
from compressm_lab.reports.walk_chart import walk_chart
from compressm_lab.runs.directory import RunState
from compressm_lab.runs.groups import (
    Group,
    Statistic,
    by_name,
    flat,
    group_runs,
    grouped,
    reference,
    speed_up,
    time_kind,
)
from compressm_lab.runs.records import CutRecord, RunError, TimeKind
from compressm_lab.runs.run import Run

FORMATS = ("png",)
_STATES: dict[RunState, str] = {
    "running": "running, or ended without a word",
    "interrupted": "interrupted",
    "failed": "failed",
}
TIMES: tuple[TimeKind, ...] = ("wall time", "CPU time", "GPU time")
_TIMES_SAID = (
    "Wall time grows when other programs use the machine; CPU time counts this training's own work, and so does GPU "
    "time where the training had the GPU to itself. Speed-ups are found from them where all runs have recorded them. "
    "The load is how many processes of the machine wanted a processor, itself included."
)
_WORDS = (
    "The order is the number of states of a layer; 1 × LRU is one layer of the kind LRU. A compressed layer is cut at "
    "some steps: rho is the share of its states that each cut keeps, tau the share of Σσ that it may drop; a cut is "
    "made only where it leaves less than the share called gate. The table of results has a row for each of these."
)
_OTHER_WAYS = {"regulariser": "penalty", "distillation": "teacher", "truncation": "cut once after training"}


@dataclass(frozen=True)
class Section:
    """A heading with charts and tables, or with sentences that say why one is missing."""

    key: str
    title: str
    parts: tuple[Chart | Grid | str, ...]


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
    """Write `out`/report.html and `out`/figures/*; the page comes last, whole or not at all.

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
    first = answer_chart(groups, spectra=details)
    charts = [part for section in sections for part in section.parts if isinstance(part, Chart)]
    charts = charts if first is None else [first, *charts]
    for chart in charts if wanted else []:
        progress(f"{chart.name} ({', '.join(wanted)})")
        write_files(chart, folder / "figures", wanted)
    progress("page")
    page = _page(groups, sections, first, title or f"Training report: {listed(list(by_name(groups)))}", broken)
    with replacing(folder / "report.html") as scratch:
        scratch.write_text(page, encoding="utf-8")
    return folder / "report.html"


def _sections(groups: list[Group], progress: Callable[[str], None], details: bool) -> list[Section]:
    cut, uncut = ([group for group in groups if group.compressed is wanted] for wanted in (True, False))
    timed = [group for group in cut if details and any(run.events for run in group.runs)]
    progress("spectra")
    # Where nothing was cut, they are what there is to see.
    folded = [(group, False) for group in cut] + [(group, bool(cut)) for group in uncut]
    colours = colours_of(groups)
    hankel: list[Chart | str] = []
    for group, away in folded if details else []:
        colour = colours[group.name, group.label]
        walk = None if away else walk_chart(group, colour)
        hankel += [*([walk] if walk else []), hankel_chart(group, folded=away, colour=colour)]
    quality = "Accuracy" if any(group.metric == "accuracy" for group in groups) else "Error"
    compared = (penalty_chart(groups), penalty_grid(groups), truncation_grid(groups))
    sections = [
        Section("accuracy", f"{quality}, order and speed-up", (outcome_chart(groups),)),
        Section("training", "Over training", (training_chart(groups),)),
        Section("orders", "Order of every layer", (order_paths_chart(groups),)),
        Section("penalty", "Penalties, and one cut after training", tuple(part for part in compared if part)),
        Section("hankel", "Hankel singular values", tuple(hankel)),
        Section("time", "Where the time went", (time_chart(groups), *(timer_chart(group) for group in timed))),
    ]
    return [section for section in sections if section.parts]


def _page(groups: list[Group], sections: list[Section], first: Chart | None, title: str, broken: Sequence[str]) -> str:
    jinja = jinja2.Environment(
        loader=jinja2.PackageLoader("compressm_lab.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.tests["chart"] = lambda part: isinstance(part, Chart)
    jinja.tests["grid"] = lambda part: isinstance(part, Grid)
    # Trusted: drawn here, and what it quotes of a run was escaped.
    jinja.globals["drawing"] = lambda chart, k: Markup(
        inline_svg(chart.panels[k], key=f"{chart.name}-{k}", size=chart.size)
    )
    jinja.globals |= {"command": command, "cut_grid": cut_grid, "decision_grid": decision_grid}
    jinja.filters["text"] = lambda words: json.dumps(words, ensure_ascii=False)
    jinja.filters["config"] = lambda run: json.dumps(dict(run.config), indent=2, ensure_ascii=False)
    runs = [run for group in groups for run in group.runs]
    return jinja.get_template("report.html").render(
        title=title,
        summary=_summary(groups),
        answers=answers(groups),
        first=first,
        unfinished=_unfinished(runs),
        broken=broken,
        sections=sections,
        recipes_grid=recipe_grid(groups),
        results=result_grid(groups),
        reference_note=missing_references(groups),
        runs=run_grid(groups),
        machines=machine_grid(runs),
        groups=groups,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _summary(groups: Sequence[Group]) -> str:
    said = []
    for name, own in by_name(groups).items():
        runs = sum(len(group.runs) for group in own)
        said.append(f"{name} ({_counted(runs, 'run')} in {_counted(len(own), 'group')})")
    return f"This page shows {listed(said)}."


def _unfinished(runs: Sequence[Run]) -> str:
    """A sentence on runs that did not finish, empty where all did."""
    counts = {words: sum(run.status.state == state for run in runs) for state, words in _STATES.items()}
    said = [f"{count} {words}" for words, count in counts.items() if count]
    if not said:
        return ""
    return f"Of {_counted(len(runs), 'run')}, {listed(said)}. They are listed below and left out of the means."


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def command(run: Run) -> str:
    """The command that trains a run again, from the configuration it wrote down."""
    return shlex.join(["compressm", "train", f"{run.path}/config.json", "--out", f"{run.path}-again"])


def recipe_grid(groups: Sequence[Group]) -> Grid:
    """Model, training and compression of every group in words, and what compression is compared with where it is."""
    ways = [key for key in _OTHER_WAYS if any(group.shown.config.get(key) is not None for group in groups)]
    rows = []
    for group in groups:
        config = group.shown.config
        model, training = config["model"], config["training"]
        size = [
            f"{model.get('depth', 1)} × {model.get('factory') or model.get('layer', 'layer')}",
            f"order {model['order']}",
        ]
        size += [f"{key} {model[key]}" for key in ("width", "dropout") if key in model]
        plan = [f"{steps(training['steps'])} steps"] if "steps" in training else []
        known = [key for key in ("batch", "learning_rate", "schedule") if key in training]
        plan += [f"{key.replace('_', ' ')} {training[key]}" for key in known]
        others = (_settings(config.get(key)) for key in ("compression", *ways))
        rows.append((named(group, groups), ", ".join(size), ", ".join(plan) or NOTHING, *others))
    heads = ("runs", "model", "training", "compression", *(_OTHER_WAYS[key] for key in ways))
    return Grid("One row for each recipe, whatever its seeds", heads, tuple(rows), _WORDS)


def _settings(settings: Mapping[str, Any] | None) -> str:
    if settings is None:
        return "none"
    known = {key: value for key, value in flat(settings).items() if value is not None}
    return ", ".join(f"{key.split('.')[-1].replace('_', ' ')} {_said(value)}" for key, value in known.items())


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " ".join(map(str, value))
    text = str(value)
    return text if "/" in text else text.replace("_", " ")  # the folder of a teacher stays as it is


_AS_PAPER = "top 3 by test"


def result_grid(groups: Sequence[Group]) -> Grid:
    """Test values, times and bounds of every group, over the seeds that finished."""
    metrics = {group.metric for group in groups}
    heads = {"accuracy": "test, %", "mse": "test MSE", "loss": "test loss"}
    metric = "test" if len(metrics) > 1 else heads[next(iter(metrics))]
    kinds = sorted({time_kind(group, groups) for group in groups if speed_up(group, groups)})
    columns: list[tuple[str, Callable[[Group], str]]] = [
        ("runs", lambda group: named(group, groups)),
        ("layers × order", _layers),
        (metric, lambda group: score(group, group.top())),
        ("top 3", lambda group: score(group, group.top(3)) if any(len(g.ranked) > 3 for g in groups) else ""),
        (_AS_PAPER, lambda group: score(group, group.best(3)) if len(group.finished) > 3 else NOTHING),
        ("top 1", lambda group: score(group, group.top(1))),
        ("test MAE", lambda group: NOTHING if group.truncated else rounded(Statistic.of(r.mae for r in group.ranked))),
        ("speed-up" + (f" by {kinds[0]}" if len(kinds) == 1 else ""), lambda group: _speed_up(group, groups, kinds)),
        *((kind, partial(_time, kind=kind)) for kind in TIMES),
        ("load", lambda group: _load(group.load)),
        ("error bound", _bounds),
        ("seeds", seeds_finished),
    ]
    caption = (
        "Test is the test accuracy in per cent, or the mean squared error (MSE) of a regression, at the best "
        "validation since the last cut: mean ± standard deviation over the seeds that finished. Top 3 and top 1 are "
        "the seeds that are best by validation; top 3 by test is how the paper counts. Orders are means over layers. "
        "The error bound sums 2 Σσ of what each cut dropped, layer by layer, and below it cut by cut for the best "
        f"seed; each holds for a layer at its cut, not for the training that follows. {_TIMES_SAID}"
    )
    found = Grid.of("Over the seeds of each recipe", groups, columns, caption)
    return found.without_empty("top 3", _AS_PAPER, "test MAE", "GPU time", "CPU time", "load", "error bound")


def _time(group: Group, kind: TimeKind) -> str:
    return clock(group.time(kind))


def _load(load: Statistic | None) -> str:
    return NOTHING if load is None else f"{load.centre:.1f}"


def _layers(group: Group) -> str:
    return f"{group.layers} × {group.initial_order:g}" + (f" → {order(group.order)}" if group.compressed else "")


def _speed_up(group: Group, groups: Sequence[Group], kinds: Sequence[TimeKind]) -> str:
    """The speed-up of a group, with what it was found from where groups differ in it."""
    ups = speed_up(group, groups)
    if ups is None:
        return NOTHING
    said = f" by {time_kind(group, groups)}" if len(kinds) > 1 else ""
    return "reference" if reference(group, groups) is group else f"{plus_minus(ups)} ×{said}"


def _bounds(group: Group) -> str:
    """The sum of error bounds, and on a line below its parts."""
    if group.summed_bound is None:
        return NOTHING
    parts = [number(bound) for bound in group.bounds_by_cut]
    return rounded(group.summed_bound) + (f"\n{' + '.join(parts)}" if len(parts) > 1 else "")


def run_grid(groups: Sequence[Group]) -> Grid:
    """Every run with its state, finished or not."""
    runs = [(named(group, groups), run) for group in groups for run in group.runs]
    above = Path(os.path.commonpath([Path(run.path).absolute().parent for _, run in runs]))
    rows = tuple((name, *_run(run), str(Path(run.path).absolute().relative_to(above))) for name, run in runs)
    heads = ("run", "seed", "state", "steps", "best at", "validation", "test", *TIMES, "load", "orders", "folder")
    caption = f"Folders are below {above}. Runs that did not finish are left out of the means above."
    return Grid("One row for each run", heads, rows, caption).without_empty("GPU time", "CPU time", "load")


def _run(run: Run) -> tuple[str, ...]:
    found, show = run.score, percent if run.metric == "accuracy" else number
    return (
        str(run.seed),
        run.status.state + (f": {run.status.message}" if run.status.message else ""),
        f"{steps(run.status.step)} of {steps(run.status.steps)}",
        *((steps(found.step), show(found.validation), show(found.test)) if found else [NOTHING] * 3),
        *(clock(Statistic.of([run.time(kind)])) for kind in TIMES),
        _load(Statistic.of([run.load])),
        ", ".join(map(str, run.final_orders.values())) or NOTHING,
    )


def cut_grid(run: Run) -> Grid:
    """Every cut and restoration of one run, in their order."""
    heads = ("step", "layer", "order", "error bound", "measured error", "energy lost", "time")
    rows: list[tuple[str, ...]] = []
    for event in run.events:
        if isinstance(event, CutRecord):
            said = f"{event.order} → {event.rank}{'' if event in run.lasting_cuts else ', undone'}"
            numbers = number(event.error_bound), percent(event.measured_error), percent(event.energy_lost)
            spent = clock(Statistic.of([event.seconds]))
            rows.append((steps(event.step), event.module or "the model", said, *numbers, spent))
        else:
            back = ((module, f"back to {number}") for module, number in event.orders.items())
            rows += [(steps(event.step), module, said, *[NOTHING] * 4) for module, said in back]
    return Grid(f"Cuts of {run.name}, {run.label}, seed {run.seed}", heads, tuple(rows))


def decision_grid(run: Run) -> Grid | None:
    """The decisions of a schedule that finds its steps, in one run; None if the steps were listed."""
    rows = tuple(
        (steps(one.step), one.action, one.reason, NOTHING if one.again is None else steps(one.again))
        for one in run.decisions
    )
    heads = ("step", "decision", "reason", "looks again at")
    title = f"When to cut {run.name}, {run.label}, seed {run.seed}"
    return Grid(title, heads, rows) if rows else None


def machine_grid(runs: Iterable[Run]) -> Grid:
    """Each environment once, with the days and the number of its runs."""
    rows = []
    for e, alike in grouped(runs, lambda run: replace(run.environment, date="")).items():
        days = [run.environment.date[:10] for run in alike]
        machine = (f"{e.accelerator}; " if e.accelerator else "") + f"{e.processor}, {e.cores} cores"
        span = " to ".join(sorted({min(days), max(days)}))
        rows.append((machine, str(e.threads), e.python, e.torch, e.commit, span, str(len(days))))
    heads = ("machine", "threads", "Python", "torch", "commit", "date", "runs")
    return Grid("Where it ran", heads, tuple(rows))
