"""The command `compressm inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from compressm.cli import in_words
from compressm.cli.options import DataOption, MeasuredOption, OfflineOption
from compressm.cli.saved import open_saved
from compressm.compression import inspect
from compressm.control import ControlError
from compressm.errors import CompressionError, SavingError

BAD_INPUT = (CompressionError, ControlError, SavingError)
console = Console()


def say(line: str) -> None:
    """Print a line as it stands."""
    console.print(escape(line), soft_wrap=True, highlight=False)


def command(
    path: Annotated[Path, typer.Argument(help="The folder of a saved model, its .safetensors file, or a run.")],
    measured: MeasuredOption = False,
    loss: Annotated[
        bool,
        typer.Option("--loss", help="Try cuts on validation data: which size does the loss need? Implies --measured."),
    ] = False,
    data: DataOption = None,
    offline: OfflineOption = False,
) -> None:
    """Show the Hankel spectra of a model's SSM layers, the orders they suggest, and the error bounds of cuts."""
    measured = measured or loss
    if data is not None and not measured and (path / "status.json").is_file():
        raise typer.BadParameter("it is for --measured and --loss, without which no data are read", param_hint="--data")
    try:
        saved = open_saved(path, with_data=measured, data=data, offline=offline)
        saved.require_data()
        tried = saved.loss if loss else None
        found = inspect(saved.model, saved.calibrate, loss=tried, selective=saved.selective())
    except BAD_INPUT as error:
        raise typer.BadParameter(in_words(error, options=True), param_hint="PATH") from error
    if saved.note:
        say(saved.note)
    say(str(found))
