"""`compressm data`: list the tasks, fetch one and show it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.progress import Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from compressm_lab.cli.opening import load_task
from compressm_lab.cli.terminal import console, progress_bars, say
from compressm_lab.data import CATALOGUE, DataError, DataSet, Form, Split, Store, Task, TaskKind, make
from compressm_lab.data.files import default_root


def data(
    name: Annotated[str | None, typer.Argument(help="A task to fetch and look at. Default: list all.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing; use files that are there.")] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--data", file_okay=False, help="Folder of the files. Default: $COMPRESSM_DATA, or a cache."),
    ] = None,
    root: Annotated[Path | None, typer.Option(hidden=True, help="The earlier name of --data.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="OPTION=VALUE", help="An option of the task; again for more.")
    ] = None,
) -> None:
    """List all tasks, or fetch one, parse it and show its splits."""
    store = Store(folder or root or default_root(), offline=offline)
    try:
        if name is None:
            if set_:
                raise typer.BadParameter(f"{set_[0]!r} is an option of no task: give its name", param_hint="--set")
            console.print(_listing(store))
            return
        dataset = make(name, **_options(set_ or []))
        columns = TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn()
        with progress_bars(*columns, transient=True) as bars:
            task = load_task(dataset, Store(store.root, offline, _Shown(bars)))
    except DataError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from None
    console.print(_summary(dataset, task))


def _options(given: list[str]) -> dict[str, Any]:
    options = {}
    for text in given:
        option, equals, value = text.partition("=")
        if not equals or not option:
            raise typer.BadParameter(f"{text!r}, expected OPTION=VALUE", param_hint="--set")
        if option in options:
            raise typer.BadParameter(f"{option} is there twice: leave one of them out", param_hint="--set")
        try:
            options[option] = ast.literal_eval(value.title() if value.lower() in ("true", "false", "none") else value)
        except (ValueError, SyntaxError):
            options[option] = value
    return options


class _Shown:
    """Show a bar for each thing that takes time; off a terminal, print its name once."""

    def __init__(self, bars: Progress) -> None:
        self.bars, self.known = bars, dict[str, TaskID]()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if what not in self.known:
            self.known[what] = self.bars.add_task(escape(what))
            if not console.is_terminal:
                say(what)
        self.bars.update(self.known[what], completed=done, total=total)


def _listing(store: Store) -> Table:
    table = Table(title=f"tasks; files in {escape(str(store.root))}")
    for head in ("name", "length", "reads", "classes"):
        table.add_column(head, justify="left" if head == "name" else "right", no_wrap=True)
    table.add_column("files", overflow="fold")
    table.add_column("here", no_wrap=True)
    for name, kind in CATALOGUE.items():
        dataset = kind()
        form = dataset.form
        classes = f"{form.classes} real" if form.kind is TaskKind.REGRESS else str(form.classes)
        places = [wanted.place for wanted in dataset.wanted]
        files = f"{len(places)} in {Path(places[0]).parent}/" if len(places) > 1 else "".join(places) or "none"
        here = ("yes" if dataset.present(store) else "no") if places else "made"
        table.add_row(name, str(form.length), _reads(form), classes, files, here)
    return table


def _reads(form: Form) -> str:
    what = f"{form.channels} real" if form.vocabulary is None else f"{form.vocabulary} tokens"
    return what if form.towers == 1 else f"{form.towers} × {what}"


def _summary(dataset: DataSet, task: Task) -> Table:
    total = sum(split.bytes for split in (task.train, task.validation, task.test))
    title = f"{dataset}: {task.kind.value}, {_reads(dataset.form)}, {task.classes} classes, {_size(total)}"
    table = Table(title=escape(title))
    for head in ("split", "examples", "inputs", "steps", "bytes", "share of classes, %"):
        table.add_column(head, overflow="fold")
    for which in ("train", "validation", "test"):
        split: Split = getattr(task, which)
        inputs = f"{str(split.inputs.dtype).removeprefix('torch.')} {tuple(split.inputs.shape[1:])}"
        table.add_row(which, str(len(split)), inputs, _steps(split, task), _size(split.bytes), _balance(split, task))
    return table


def _steps(split: Split, task: Task) -> str:
    if split.lengths is None:
        return str(task.length)
    lengths = split.lengths.double()
    return f"{int(lengths.min())} to {int(lengths.max())}, mean {float(lengths.mean()):.0f}"


def _balance(split: Split, task: Task) -> str:
    if task.kind is TaskKind.REGRESS:
        return "-"
    asked = split.targets[split.targets >= 0]
    shares = torch.bincount(asked, minlength=task.classes).double() / len(asked)
    return " ".join(f"{100 * share:.1f}" for share in shares.tolist())


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000  # type: ignore[assignment]
    return f"{count:.3g} GB"
