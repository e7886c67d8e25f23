"""`compressm bench table` and `compressm bench draw`: result files shown again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compressm.cli.bench.terminal import draw_picture
from compressm.cli.paths import PathError, require_picture
from compressm.runs.measurement import Measurement, MeasurementError


def table(result: Annotated[Path, typer.Argument(help="A result file of a benchmark or study.")]) -> None:
    """Print a result file as Markdown tables."""
    from compressm.reports.tables import grids, markdown

    try:
        measurement = Measurement.read(result)
        typer.echo(markdown(measurement))
        if len(shown := grids(measurement)) == 1 and shown[0].caption:  # several have theirs in their titles
            typer.echo(f"\n({shown[0].caption})")
    except MeasurementError as error:
        raise _bad_result(result, error) from None


def draw(
    result: Annotated[
        Path, typer.Argument(help="A result file of reduction, growth, speedup, loss_continuity or results.")
    ],
    picture: Annotated[
        Path | None, typer.Option(help="The picture to write. Default: beside the result, .png.")
    ] = None,
) -> None:
    """Draw the picture of a result file again."""
    try:
        draw_picture(Measurement.read(result), require_picture(picture or result.with_suffix(".png")))
    except MeasurementError as error:
        raise _bad_result(result, error) from None
    except PathError as error:
        raise typer.BadParameter(str(error), param_hint="--picture") from None


def _bad_result(path: Path, error: MeasurementError) -> typer.BadParameter:
    message = str(error)
    return typer.BadParameter(message if str(path) in message else f"{path}: {message}", param_hint="RESULT")
