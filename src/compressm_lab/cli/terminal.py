"""The console of all commands, and the options that several of them share."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

from compressm_lab.runs.records import Evaluation, TruncationRecord
from compressm_lab.training.evaluation import Score


class _Console(Console):
    """A console that may be closed while a training runs, which then saves and ends."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:
            self._fall_silent()
            if error.errno != errno.EIO:  # a terminal that was closed: a SIGHUP comes too
                with suppress(OSError):
                    os.write(
                        2, f"compressm: the output cannot be written ({error.strerror}): nothing more is\n".encode()
                    )

    def on_broken_pipe(self) -> None:
        """Stop as by SIGTERM, on which trainings save; a command that does not hear it goes on in silence."""
        self._fall_silent()
        if callable(signal.getsignal(signal.SIGTERM)):
            signal.raise_signal(signal.SIGTERM)

    def _fall_silent(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


console = _Console()


@contextmanager
def ending_in_words(what: str) -> Iterator[None]:
    """A context in which SIGINT, SIGTERM and SIGHUP end the command at once, with words; a training catches its own.

    A SIGHUP that nohup ignores stays ignored.
    """
    came: list[str] = []

    def end(number: int, frame: FrameType | None) -> None:
        came.append(signal.Signals(number).name)
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()  # no other may catch signals
    wanted = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))  # Windows has no SIGHUP
    heard = [which for which in wanted if main and signal.getsignal(which) is not signal.SIG_IGN]
    before = {which: signal.signal(which, end) for which in dict.fromkeys(heard)}
    try:
        yield
    except KeyboardInterrupt:
        if came:
            say(f"{came[0]} {what}")
        raise
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe; again for more.")
]


def count(text: str | int, low: int = 1) -> int:
    """Read an integer of at least `low`; Typer's own check does not say what was given."""
    try:
        number = int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an integer, expected at least {low}") from None
    if number < low:
        raise typer.BadParameter(f"{number} is too small, expected at least {low}")
    return number


def count_or_none(text: str | int) -> int:
    """Read an integer of at least 0."""
    return count(text, 0)


def integer_option(help: str, parser: Callable[[str], int] = count) -> Any:
    """An option that takes an integer, by default one of at least 1."""
    return typer.Option(parser=parser, metavar="INTEGER", help=help)


def is_given(context: typer.Context, name: str) -> bool:
    """Tell if an option is on the command line, rather than at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def require_unused(context: typer.Context, why: str, *names: str) -> None:
    """Refuse each option that is on the command line; `why` says what it is for."""
    for name in names:
        if is_given(context, name):
            raise typer.BadParameter(f"{why}: leave it out", param_hint=f"--{name.replace('_', '-')}")


def say(*lines: str) -> None:
    """Print each line as it stands: no markup, no colours, no added line breaks."""
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def score_text(found: Score | Evaluation | TruncationRecord) -> str:
    """A score in words: the accuracy, or both errors of a regression in the units of its targets."""
    if found.accuracy is not None:
        return f"accuracy {100 * found.accuracy:.2f} %"
    if found.mse is None or found.mae is None:
        return f"loss {found.loss:.4f}"
    return f"MSE {found.mse:.4g}, MAE {found.mae:.4g}"


def progress_bars(
    *columns: ProgressColumn, description: str = "{task.description}", transient: bool = False
) -> Progress:
    """Bars with these columns on a terminal; nothing elsewhere."""
    shown = (TextColumn(description), BarColumn(), *columns)
    return Progress(*shown, console=console, disable=not console.is_terminal, transient=transient)


@contextmanager
def status(verb: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done: a spinner on a terminal, plain lines elsewhere."""
    with console.status(verb) as spinner:

        def show(line: str) -> None:
            if console.is_terminal:
                spinner.update(f"{verb} {line}")
            else:
                say(line)

        yield show
