"""`compressm bench reduction`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from compressm.bench.reduction import Case, measure_reduction
from compressm.cli.bench.options import OUT, Device, DeviceOption, PicturedOutOption, RepeatsOption, count, require
from compressm.cli.bench.terminal import draw_picture, measuring, report
from compressm.runs.measurement import Measurement

_CAPTION = "milliseconds, H channels; medians; repeats per row are in the result file"


def reduction(
    device: DeviceOption = Device.cpu,
    order: Annotated[
        list[int] | None,
        typer.Option(
            parser=count, metavar="INTEGER", help="Orders n to reduce to n/4; again for more. Default: 1 to 1024."
        ),
    ] = None,
    width: Annotated[
        int,
        typer.Option(parser=count, metavar="INTEGER", help="Channels of the layers, where --order is given."),
    ] = 8,
    repeats: RepeatsOption = 9,
    compare: Annotated[bool, typer.Option(help="Time the paper's plain NumPy/SciPy formulas beside (CPU).")] = True,
    out: PicturedOutOption = OUT,
) -> None:
    """The cost of each stage of one reduction, n = 1 … 1024."""
    result, picture = (out / f"reduction-{device.value}{suffix}" for suffix in (".json", ".png"))
    require(device, result, picture)
    cases = [Case(n, max(1, n // 4), width) for n in order] if order else None
    with measuring() as say:
        measurement = measure_reduction(cases, device=device.value, repeats=repeats, compare=compare, progress=say)
    report(measurement, result, tables=[_table(measurement)])
    if sum(row["width"] == 8 and row["members"] == 1 and row["system"] == "initial" for row in measurement.rows) > 1:
        draw_picture(measurement, picture)
    else:
        picture.unlink(missing_ok=True)  # of another result


def _table(measurement: Measurement) -> Table:
    """Narrower than the one for Markdown, and with the Gramians alone."""
    columns = {"P, Q": "gramians_s", "σ": "hankel_s", "all": "reduction_s"}
    columns |= {"plain σ": "plain_hankel_s", "plain all": "plain_reduction_s"}
    shown = {head: name for head, name in columns.items() if any(name in row for row in measurement.rows)}
    table = Table(title="One reduction", caption=_CAPTION)
    for head in ("n → r", "H", "system", *shown, *(["ratio"] if "plain all" in shown else [])):
        table.add_column(head, justify="right", no_wrap=True)
    for row in measurement.rows:
        several = f"{row['members']} × " if row["members"] != 1 else ""
        cells = [f"{several}{row['order']} → {row['rank']}", str(row["width"]), str(row["system"])]
        cells += [f"{1e3 * float(row[name]):.3g}" if name in row else "" for name in shown.values()]
        table.add_row(*cells, *([f"{float(row['speedup']):.1f}×"] if "speedup" in row else []))
    return table
