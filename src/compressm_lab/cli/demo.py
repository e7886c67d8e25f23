"""`compressm demo`: train digits in two minutes and show how small models get."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from compressm.cli import in_words
from compressm.cli.options import PathError, require_writable
from compressm.errors import CompressionError
from compressm_lab.cli.bench import report
from compressm_lab.cli.terminal import SetOption, console, integer_option, progress_bars, say
from compressm_lab.data import DataError
from compressm_lab.experiments import demo
from compressm_lab.runs.directory import find_runs
from compressm_lab.runs.lock import RunLockedError
from compressm_lab.runs.records import RunError
from compressm_lab.runs.run import read_run


def command(
    out: Annotated[Path, typer.Option(help="Folder for runs, result and report; an earlier demo's go.")] = Path(
        "out/demo"
    ),
    seeds: Annotated[int, integer_option("Trainings of each model.")] = 3,
    processes: Annotated[int | None, integer_option("Trainings at a time. Default: one a core, up to 4.")] = None,
    settings: SetOption = None,
) -> None:
    """Train digits by a large model, a small one, and large ones that shrink while they train; about two minutes."""
    from compressm_lab.reports.run_report import write_report  # matplotlib takes a second to import
    from compressm_lab.reports.study_tables import demo_says
    from compressm_lab.training import ConfigError, CutError, Diverged

    begin = time.perf_counter()
    try:
        require_writable(out / "demo.json")
        wanted = demo.plan(out, seeds, settings or ())
        demo.require_sound(wanted)
        steps = wanted.arms[0].read(0).training.steps
    except (PathError, ConfigError, DataError) as error:
        raise typer.BadParameter(str(error)) from None
    try:
        with demo.alone(out):
            with _bars(steps, seeds) as progress:
                demo.run(wanted, processes=processes or min(4, os.cpu_count() or 1), progress=progress)
            measurement = demo.collect(out)
            with console.status("drawing the report"):
                runs = [read_run(directory) for directory in find_runs([out / "runs"])]
                page = write_report(runs, out / "report", title="Digits: large, small and compressed", formats=["png"])
            if spectra := demo.collect_spectra(out):
                spectra.write(out / "demo-spectra.json")
            report(measurement, out / "demo.json")
    except RunLockedError as error:
        raise typer.BadParameter(str(error)) from None
    except (CompressionError, ConfigError, CutError, DataError, Diverged, RunError) as error:
        say(in_words(error))
        raise typer.Exit(1) from None
    for line in demo_says(measurement):
        console.print(line, highlight=False)
    say(f"{time.perf_counter() - begin:.0f} s. Report: {page.resolve()}")


@contextmanager
def _bars(steps: int, seeds: int) -> Iterator[demo.Progress]:
    """Show a bar a model; off a terminal, print a line whenever a training is done."""
    with progress_bars(MofNCompleteColumn(), TimeRemainingColumn(), description="{task.description:<24}") as bars:
        tasks = {label: bars.add_task(label, total=steps * seeds) for label in demo.MODELS}
        reached: dict[tuple[str, int], int] = {}

        def show(label: str, seed: int, step: int) -> None:
            reached[label, seed] = step
            bars.update(tasks[label], completed=sum(done for (one, _), done in reached.items() if one == label))
            if step == steps and not console.is_terminal:
                say(f"{label}, seed {seed}: trained")

        yield show
