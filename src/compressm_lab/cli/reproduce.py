"""`compressm reproduce`: train and report the tables and figures of the paper."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.progress import MofNCompleteColumn, TimeElapsedColumn
from rich.table import Table

from compressm.cli import INTERRUPTED
from compressm.cli.options import PathError, number, require_writable
from compressm_lab.cli.terminal import (
    console,
    count_or_none,
    integer_option,
    progress_bars,
    require_unused,
    say,
    status,
)
from compressm_lab.experiments.catalogue import Experiment, exhibit, experiment_names, find_experiment
from compressm_lab.experiments.engine import Campaign, Outcome, conduct, require_ready, require_same_recipes
from compressm_lab.experiments.executors import Executor, LocalExecutor, SlurmExecutor, SlurmOptions, heard_as_ctrl_c
from compressm_lab.experiments.kept import FILE, write
from compressm_lab.experiments.rows import note_concurrency
from compressm_lab.runs.measurement import Measurement, MeasurementError
from compressm_lab.runs.paper import paper_labels, read_paper
from compressm_lab.runs.records import RunError
from compressm_lab.training.config import ConfigError

LIST = "LIST"


def command(
    name: Annotated[str, typer.Argument(help="LIST, or a table or figure by its label in the paper.")] = LIST,
    only: Annotated[
        list[str] | None, typer.Option(help="A task, a method or the folder of one arm's runs; again for more.")
    ] = None,
    seeds: Annotated[int | None, integer_option("Seeds of each training. Default: as the paper.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Digits and few steps: minutes on a CPU.")] = False,
    processes: Annotated[int, integer_option("Trainings at a time, here.")] = 1,
    executor: Annotated[
        Literal["local", "slurm"], typer.Option(help="This machine, or a Slurm cluster by submitit.")
    ] = "local",
    partition: Annotated[str | None, typer.Option(help="Partition of the cluster.")] = None,
    hours: Annotated[
        float, typer.Option(parser=number, metavar="NUMBER", help="Hours of a job on the cluster.")
    ] = 24.0,
    gpus: Annotated[int, integer_option("GPUs of a job on the cluster.", count_or_none)] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be trained and stop.")] = False,
    only_report: Annotated[bool, typer.Option("--only-report", help="Train nothing; report what is there.")] = False,
    data: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder of data sets that are there; nothing is fetched.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Folder for runs and reports. Default: out/reproduce, with --quick out/quick."
        ),
    ] = None,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Train what a table or figure of the paper needs and show it beside the paper's numbers.

    What is done stays, what was stopped goes on, and trainings that several tables need are shared. Exit 1 where a
    training failed, 130 after Ctrl-C, which saves: the same command goes on.
    """
    _require_used(context, name, executor, hours, only_report)
    folder = out or Path("out/quick" if quick else "out/reproduce")
    if name == LIST:
        console.print(_listed(folder, seeds, quick))
        return
    try:
        wanted = find_experiment(name, quick=quick)
        if wanted.measures:
            require_unused(context, f"it is for trainings, and {name} is measured", "seeds", *_TRAINING)
        plan = (wanted.only(only) if only else wanted).plan(folder, seeds)
        require_writable(folder / name / "report.md")
        require_same_recipes(plan.trainings())
        if dry_run or wanted.measures:
            _show(wanted, plan, data) if dry_run else _measure(wanted, folder / name, quick, only_report)
            return
        options = SlurmOptions(partition, hours, gpus)
        outcome = Outcome()
        if not only_report:
            outcome = _train(name, plan, _executor(executor, processes, folder, options, data), data)
        _report(wanted, wanted.plan(folder, seeds), folder / name, quick)
        _end(plan, outcome)
    except (ConfigError, PathError, RunError, MeasurementError) as error:
        raise typer.BadParameter(str(error)) from None


# Options of trainings.
_TRAINING = ("only", "processes", "executor", "partition", "hours", "gpus", "data")


def _require_used(context: typer.Context, name: str, executor: str, hours: float, only_report: bool) -> None:
    """Refuse options of the other executor, a job of no time, and options of trainings where there are none."""
    if not 0 < hours < math.inf:
        raise typer.BadParameter(f"hours is {hours:g}, expected a number above 0", param_hint="--hours")
    if executor == "local":
        require_unused(context, "it is for --executor slurm, not local", "partition", "hours", "gpus")
    else:
        require_unused(context, "it is for --executor local, not slurm", "processes")
    if name == LIST:
        require_unused(context, "it is for a table or figure, and LIST trains nothing", *_TRAINING)
        require_unused(context, "it is for a table or figure, not for LIST", "dry_run", "only_report")
    if only_report:
        require_unused(context, "it is for trainings, and --only-report trains nothing", *_TRAINING, "dry_run")


def _executor(where: str, processes: int, folder: Path, options: SlurmOptions, data: Path | None) -> Executor:
    return LocalExecutor(processes, data) if where == "local" else SlurmExecutor(folder / "slurm", options, data)


def _train(name: str, plan: Campaign, executor: Executor, data: Path | None) -> Outcome:
    trainings = plan.trainings()
    done = sum(training.state == "done" for training in trainings)
    say(f"{name}: {len(trainings)} training{'' if len(trainings) == 1 else 's'}, {done} done")
    require_ready(trainings, executor, data, say)
    if isinstance(executor, LocalExecutor):
        note_concurrency(trainings, executor.count)
    with heard_as_ctrl_c(), progress_bars(MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("trainings", total=len(trainings), completed=done)

        def show(line: str) -> None:
            say(line)
            bar.update(task, completed=sum(one.state == "done" for one in plan.trainings()))

        return conduct(plan, executor, show)


def _report(wanted: Experiment, plan: Campaign, out: Path, quick: bool) -> None:
    # matplotlib takes a second to import
    from compressm_lab.cli.bench import as_table
    from compressm_lab.reports.reproduction import paper_form_grids, write_reproduction

    shown = exhibit(wanted, plan, quick=quick)
    with console.status("drawing the report"):
        path = write_reproduction(shown, out)
    for grid in paper_form_grids(shown):
        # Wider than the terminal rather than with numbers cut off.
        console.print(as_table(grid), crop=False)
    if not quick and (result := write(plan, out / "ours.json")):
        say(f"result: {result}; as {FILE.name} of the package it fills tables without the runs")
    say(f"report: {path}{' and report.html' if shown.runs else ', without a page: no run has begun'}")


def _end(plan: Campaign, outcome: Outcome) -> None:
    trainings = plan.trainings(outcome.failed)
    left = [training for training in trainings if training.state != "done"]
    say(f"{len(trainings) - len(left)} of {len(trainings)} trainings are done")
    if outcome.interrupted:
        say("interrupted: what was trained is saved, and the same command goes on")
        raise typer.Exit(INTERRUPTED)
    if outcome.failed:
        for training in left:
            say(f"not done: {training}: {outcome.failed.get(training.key, 'waits for runs that failed')}")
        raise typer.Exit(1)


def _show(wanted: Experiment, plan: Campaign, data: Path | None) -> None:
    words = {"done": "done", "begun": "goes on", "new": "begins"}
    if wanted.measures:
        say(f"{wanted.label}: compressm bench {wanted.measures}")
    for training in plan.trainings():
        state = training.state
        say(f"{training}: {words.get(state) or training.waits_for}")
        if state in ("begun", "new"):
            say(f"    {shlex.join(['compressm', *training.command(data)[3:]])}")


def _listed(folder: Path, seeds: int | None, quick: bool) -> Table:
    title = "Quick versions" if quick else "Tables and figures of the paper"
    table = Table("name", "what", "runs", "done", title=title)
    for name in experiment_names():
        wanted = find_experiment(name, quick=quick)
        trainings = wanted.plan(folder, seeds).trainings()
        kind = read_paper(name).kind if name in paper_labels() else "ablation"
        runs = f"bench {wanted.measures}" if wanted.measures else str(len(trainings))
        done = "" if wanted.measures else str(sum(one.state == "done" for one in trainings))
        table.add_row(name, f"{kind}: {escape(wanted.title)}", runs, done)
    return table


def _measure(wanted: Experiment, out: Path, quick: bool, only_report: bool) -> None:
    """Measure the one figure that is a benchmark, or only report what was measured before."""
    from compressm_lab.bench.reduction import Case, measure_reduction
    from compressm_lab.cli.bench import report
    from compressm_lab.reports.reproduction import write_measured

    path = out / "reduction-cpu.json"
    if only_report:
        if not path.exists():
            raise RunError(f"{path} is not there: nothing was measured yet, and --only-report measures nothing")
        measurement = Measurement.read(path)
    else:
        cases = [Case(n, max(1, n // 4)) for n in (1, 4, 16, 64, 128)] if quick else None
        with status("measuring") as progress:
            measurement = measure_reduction(cases, repeats=3 if quick else 9, progress=progress)
        report(measurement, path)
    say(f"report: {write_measured(measurement, read_paper(wanted.label), out, quick=quick)}")
