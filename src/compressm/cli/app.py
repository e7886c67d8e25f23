"""All commands."""

from __future__ import annotations

from typing import Annotated

import typer

import compressm
from compressm.cli import compress, inspect
from compressm_lab.cli import data, demo, report, reproduce, train
from compressm_lab.cli.bench import bench

app = typer.Typer(
    name="compressm",
    help="State space models that shrink while they train.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.command)
app.command("reproduce")(reproduce.command)
app.command("report")(report.report)
app.command("inspect")(inspect.command)
app.command("compress")(compress.command)
app.command("data")(data.data)
app.command("demo")(demo.command)
app.add_typer(bench, name="bench")


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
