"""`compressm demo`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from compressm.cli.options import PathError, require_writable
from compressm_lab.cli.bench import console, count, report
from compressm_lab.experiments import demo
from compressm_lab.runs.directory import find_runs
from compressm_lab.runs.run import read_run


def command(
    out: Annotated[Path, typer.Option(help="Folder for runs, result and report; an earlier demo's go.")] = Path(
        "out/demo"
    ),
    seeds: Annotated[int, typer.Option(parser=count, metavar="INTEGER", help="Trainings of each model.")] = 3,
    processes: Annotated[
        int | None, typer.Option(parser=count, metavar="INTEGER", help="At a time. Default: one a core, up to 4.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe; again for more.")
    ] = None,
) -> None:
    """Train digits by a large model, a small one, and large ones that shrink while they train; about two minutes."""
    from compressm_lab.reports.study_tables import demo_says
    from compressm_lab.training import ConfigError

    begin = time.perf_counter()
    try:
        require_writable(out / "demo.json")
        wanted = demo.plan(out, seeds, settings or ())
        steps = wanted.arms[0].read(0).training.steps
    except (PathError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from None
    shutil.rmtree(out / "runs", ignore_errors=True)
    with _bars(steps, seeds) as progress:
        demo.run(wanted, processes=processes or min(4, os.cpu_count() or 1), progress=progress)
    measurement, page = demo.collect(out), _page(out)
    report(measurement, out / "demo.json")
    for line in demo_says(measurement):
        console.print(line, highlight=False)
    spent = time.perf_counter() - begin
    console.print(f"{spent:.0f} s. Report: {page.resolve()}", soft_wrap=True, highlight=False)


@contextmanager
def _bars(steps: int, seeds: int) -> Iterator[demo.Progress]:
    """One bar a model; off a terminal a line whenever a training is done."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks = {label: bars.add_task(label, total=steps * seeds) for label in demo.MODELS}
        reached: dict[tuple[str, int], int] = {}

        def show(label: str, seed: int, step: int) -> None:
            reached[label, seed] = step
            bars.update(tasks[label], completed=sum(done for (one, _), done in reached.items() if one == label))
            if step == steps and not console.is_terminal:
                console.print(f"{label}, seed {seed}: trained", highlight=False)

        yield show


def _page(out: Path) -> Path:
    from compressm_lab.reports.run_report import write_report  # matplotlib takes a second to import

    with console.status("drawing the report"):
        runs = [read_run(directory) for directory in find_runs([out / "runs"])]
        return write_report(runs, out / "report", title="Digits: large, small and compressed", formats=["png"])
