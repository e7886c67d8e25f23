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
from compressm_lab.data import CATALOGUE, DataError, Form, Source, Split, Store, Task, TaskKind, make
from compressm_lab.data.describing import describe
from compressm_lab.data.files import default_root


def data(
    name: Annotated[
        str | None, typer.Argument(help="A task to fetch and look at, or `inspect` and a FILE. Default: list all.")
    ] = None,
    file: Annotated[Path | None, typer.Argument(help="A file of your own, to show what training would read.")] = None,
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
    """List all tasks, fetch one and show its splits, or `inspect FILE`: show what training would read from a file."""
    store = Store(folder or root or default_root(), offline=offline)
    if file is not None or name == "inspect":
        _inspect(name, file, _options(set_ or []), store)
        return
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


def _inspect(name: str | None, file: Path | None, options: dict[str, Any], store: Store) -> None:
    """Show a file, and the recipe that trains on it."""
    if name != "inspect" or file is None:
        wanted = "`compressm data inspect FILE`"
        came = "inspect without a file" if file is None else f"{name} {file}"
        raise typer.BadParameter(f"{came}, expected {wanted}", param_hint="FILE")
    try:
        found = describe(file, options, store)
    except DataError as error:
        raise typer.BadParameter(str(error), param_hint="FILE") from None
    say(*found.lines, "")
    if found.undecided:
        say(
            f"to decide: {found.undecided}",
            "try it with --set, as in --set target=NAME; a table with one row a step also needs --set sequence=NAME",
            "",
        )
    say("a recipe to begin with:" if found.undecided else "a recipe, to be changed:", *found.recipe)


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
            options[option] = _listed(value)
    return options


def _listed(text: str) -> Any:
    """A text, or the list of [a, b]."""
    if not (text.startswith("[") and text.endswith("]")):
        return text
    return [int(part) if part.isdecimal() else part for part in map(str.strip, text[1:-1].split(","))]


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


def _reads(form: Form | Task) -> str:
    what = f"{form.channels} real" if form.vocabulary is None else f"{form.vocabulary} tokens"
    return what if form.towers == 1 else f"{form.towers} × {what}"


def _summary(source: Source, task: Task) -> Table:
    total = sum(split.bytes for split in (task.train, task.validation, task.test))
    counted = f"{task.classes} {'outputs' if task.kind.is_regression else 'classes'}"
    title = f"{source}: {task.kind.value}, {_reads(task)}, {counted}, {_size(total)}"
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
    if task.kind.is_regression:
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
