"""`compressm bench regulariser`."""

from __future__ import annotations

from typing import Annotated

import typer

from compressm.cli.bench.options import OUT, Device, DeviceOption, OutOption, RepeatsOption, count, require
from compressm.cli.bench.terminal import measuring, report


def regulariser(
    device: DeviceOption = Device.cpu,
    order: Annotated[
        list[int] | None,
        typer.Option(parser=count, metavar="INTEGER", help="Orders n; again for more. Default: 32 to 512."),
    ] = None,
    repeats: RepeatsOption = 9,
    out: OutOption = OUT,
) -> None:
    """Value and gradient of a penalty on Hankel singular values, beside a plain step of the sMNIST model."""
    from compressm.bench.regulariser import ORDERS, default_cases, measure_regulariser

    result = out / f"regulariser-{device.value}.json"
    require(device, result)
    cases = default_cases(device.value, order or ORDERS)
    with measuring() as say:
        measurement = measure_regulariser(cases, device=device.value, repeats=repeats, progress=say)
    report(measurement, result)
