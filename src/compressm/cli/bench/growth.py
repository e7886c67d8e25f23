"""`compressm bench growth`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from compressm.cli.bench.options import (
    OUT,
    CompileOption,
    Device,
    DeviceOption,
    PicturedOutOption,
    Precision,
    RepeatsOption,
    require,
)
from compressm.cli.bench.terminal import draw_picture, measuring, report


class Axis(StrEnum):
    """What grows."""

    order = "order"
    length = "length"
    width = "width"


def growth(
    device: DeviceOption = Device.cpu,
    axis: Annotated[list[Axis] | None, typer.Option(help="What grows; again for more. Default: all three.")] = None,
    precision: Annotated[
        list[Precision] | None,
        typer.Option(help="Of the activations; again for more. Default: float32, on a GPU bfloat16 too."),
    ] = None,
    compiled: CompileOption = False,
    repeats: RepeatsOption = 9,
    out: PicturedOutOption = OUT,
) -> None:
    """How a training step grows with the order n, the length L and the width H."""
    from compressm.bench.growth import measure_growth  # brings in torch's compiler

    result, picture = (out / f"growth-{device.value}{suffix}" for suffix in (".json", ".png"))
    require(device, result, picture)
    with measuring() as say:
        measurement = measure_growth(
            [name.value for name in axis or Axis],
            device=device.value,
            precisions=[name.value for name in precision] if precision else None,
            repeats=repeats,
            compiled=compiled,
            progress=say,
        )
    report(measurement, result)
    draw_picture(measurement, picture)
