"""`compressm bench cut`."""

from __future__ import annotations

from typing import Annotated

import typer

from compressm.cli.bench.options import (
    OUT,
    Device,
    DeviceOption,
    OutOption,
    Precision,
    RepeatsOption,
    Task,
    count,
    require,
)
from compressm.cli.bench.terminal import measuring, report


def cut(
    device: DeviceOption = Device.cpu,
    task: Annotated[
        list[Task] | None,
        typer.Option(help="Which of the paper's models; again for more. Default: sMNIST, on a GPU sCIFAR too."),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(parser=count, metavar="INTEGER", help="States to keep in every layer. Default: as in the paper."),
    ] = None,
    precision: Annotated[
        Precision, typer.Option(help="Of the activations, where --task is given.")
    ] = Precision.float32,
    repeats: RepeatsOption = 5,
    out: OutOption = OUT,
) -> None:
    """One whole cut in the middle of training: read, balance, truncate, encode, moments, and the first step after."""
    from compressm.bench.cut import measure_cuts  # brings in torch's compiler
    from compressm.bench.cut_cases import cut_cases, default_models
    from compressm.bench.step_cases import paper_case

    result = out / f"cut-{device.value}.json"
    require(device, result)
    models = (
        [paper_case(name.value, precision=precision.value) for name in task] if task else default_models(device.value)
    )
    with measuring() as say:
        cases = cut_cases(models, rank)
        measurement = measure_cuts(cases, device=device.value, repeats=repeats, progress=say)
    report(measurement, result)
