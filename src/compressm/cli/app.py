"""The command-line app; each command is loaded when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

import compressm
from compressm.cli.commands import LazyGroup

app = typer.Typer(
    name="compressm",
    cls=LazyGroup,
    help="State space models that shrink while they train.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"compressm {compressm.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """State space models that shrink while they train."""
