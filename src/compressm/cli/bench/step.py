"""`compressm bench step`."""

from __future__ import annotations

from typing import Annotated

import typer

from compressm.cli.bench.options import (
    OUT,
    CompileOption,
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


def step(
    device: DeviceOption = Device.cpu,
    task: Annotated[
        list[Task] | None,
        typer.Option(help="Sizes of which of the paper's models; again for more. Default: sMNIST, on a GPU all."),
    ] = None,
    order: Annotated[
        list[int] | None,
        typer.Option(
            parser=count, metavar="INTEGER", help="Orders n; again for more. Default: the paper's and a quarter of it."
        ),
    ] = None,
    precision: Annotated[
        Precision, typer.Option(help="Of the activations, where --task or --order is given.")
    ] = Precision.float32,
    compiled: CompileOption = False,
    repeats: RepeatsOption = 9,
    out: OutOption = OUT,
) -> None:
    """A whole training step at the paper's sizes: forward, backward and AdamW on random data, beside its floor."""
    from compressm.bench.step_cases import default_cases, paper_case, paper_orders
    from compressm.bench.train_step import measure_steps  # brings in torch's compiler

    result = out / f"step-{device.value}.json"
    require(device, result)
    if task or order:
        sizes = [(name.value, n) for name in task or [Task.smnist] for n in order or paper_orders(name.value)]
        cases = tuple(paper_case(name, n, precision=precision.value, compiled=compiled) for name, n in sizes)
    else:
        cases = default_cases(device.value, compiled=compiled)
    with measuring() as say:
        measurement = measure_steps(cases, device=device.value, repeats=repeats, progress=say)
    report(measurement, result)
