"""`compressm inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from compressm.cli.saved import open_saved
from compressm.compression import inspect
from compressm.control import ControlError
from compressm.errors import CompressionError, SavingError
from compressm_lab.data import DataError, Store
from compressm_lab.runs.records import RunError
from compressm_lab.training import ConfigError

BAD_INPUT = (CompressionError, ControlError, SavingError, DataError, RunError, ConfigError)
DataOption = Annotated[Path | None, typer.Option(help="Folder of data sets. Default: $COMPRESSM_DATA, or a cache.")]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Fetch nothing.")]
MeasuredOption = Annotated[
    bool, typer.Option("--measured", help="Gramians of training data instead of white noise; the path is a run.")
]
console = Console()


def command(
    path: Annotated[Path, typer.Argument(help="The folder of a saved model, or of a run.")],
    measured: MeasuredOption = False,
    data: DataOption = None,
    offline: OfflineOption = False,
) -> None:
    """Show the Hankel spectra of a model's SSM layers, the orders they suggest, and the error bounds of cuts."""
    store = Store(offline=offline) if data is None else Store(data, offline=offline)
    try:
        saved = open_saved(path, with_data=measured, store=store)
        saved.require_data()
        calibrate = (lambda model: saved.calibrate()) if measured else None
        found = inspect(saved.model, calibrate, selective=saved.selective())
    except BAD_INPUT as error:
        raise typer.BadParameter(str(error), param_hint="PATH") from error
    console.print(escape(str(found)), soft_wrap=True, highlight=False)
