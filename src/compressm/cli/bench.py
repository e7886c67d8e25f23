"""`compressm bench`: measure on this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from compressm.bench.reduction import Case, measure_reduction
from compressm.cli.paths import PathError, require_picture, require_writable
from compressm.runs.measurement import Measurement, MeasurementError

bench = typer.Typer(help="Measure speed on this machine; results are JSON files with a picture.", no_args_is_help=True)
console = Console()

# Columns of every row, and those of a row that was compared with the plain formulas.
_WORDS = ("system", "device")
_NUMBERS = ("order", "rank", "width", "members", "hankel_s", "reduction_s")
_COMPARED = ("plain_hankel_s", "plain_reduction_s", "speedup")


class Device(StrEnum):
    """Where to measure."""

    cpu = "cpu"
    cuda = "cuda"


class Task(StrEnum):
    """The paper's tasks, by their sizes."""

    smnist = "smnist"
    scifar = "scifar"
    listops = "listops"
    imdb = "imdb"
    aan = "aan"
    pathfinder = "pathfinder"


class Precision(StrEnum):
    """Of the activations; parameters are float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def _count(text: str | int) -> int:
    """Typer's own check does not say what was given."""
    try:
        number = int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an integer, expected at least 1") from None
    if number < 1:
        raise typer.BadParameter(f"{number} is too small, expected at least 1")
    return number


@bench.command()
def reduction(
    device: Annotated[Device, typer.Option(help="Where to measure.")] = Device.cpu,
    order: Annotated[
        list[int] | None,
        typer.Option(
            parser=_count, metavar="INTEGER", help="Orders n to reduce to n/4; again for more. Default: 1 to 1024."
        ),
    ] = None,
    width: Annotated[
        int,
        typer.Option(parser=_count, metavar="INTEGER", help="Channels of the layers, where --order is given."),
    ] = 8,
    repeats: Annotated[int, typer.Option(parser=_count, metavar="INTEGER", help="Repeats; the median counts.")] = 9,
    compare: Annotated[bool, typer.Option(help="Time the paper's plain NumPy/SciPy formulas beside (CPU).")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the result file and the picture.")] = Path("out/bench"),
) -> None:
    """The cost of each stage of one reduction, n = 1 … 1024."""
    result, picture = (out / f"reduction-{device.value}{suffix}" for suffix in (".json", ".png"))
    _require(device, result, picture)
    cases = [Case(n, max(1, n // 4), width) for n in order] if order else None
    with console.status("measuring") as status:
        measurement = measure_reduction(
            cases, device=device.value, repeats=repeats, compare=compare, progress=lambda line: _say(status, line)
        )
    console.print(_reduction_table(measurement))
    console.print(f"result: {measurement.write(result)}", soft_wrap=True)
    if sum(row["width"] == 8 and row["members"] == 1 and row["system"] == "initial" for row in measurement.rows) > 1:
        _draw(measurement, picture)


@bench.command()
def step(
    device: Annotated[Device, typer.Option(help="Where to measure.")] = Device.cpu,
    task: Annotated[
        list[Task] | None,
        typer.Option(
            help="Sizes of which of the paper's models; again for more. Default: sMNIST, on a GPU sCIFAR too."
        ),
    ] = None,
    order: Annotated[
        list[int] | None,
        typer.Option(parser=_count, metavar="INTEGER", help="Orders n; again for more. Default: 256, 28 and 13."),
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Of the activations.")] = Precision.float32,
    repeats: Annotated[int, typer.Option(parser=_count, metavar="INTEGER", help="Repeats; the median counts.")] = 9,
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = Path("out/bench"),
) -> None:
    """A whole training step at the paper's sizes: forward, backward and AdamW on random data."""
    from compressm.bench.train_step import measure_steps, paper_case  # brings in torch's compiler

    result = out / f"step-{device.value}.json"
    _require(device, result)
    sizes = [(name, n) for name in task or [Task.smnist] for n in order or [256, 28, 13]]
    cases = [paper_case(name.value, n, precision=precision.value) for name, n in sizes] if task or order else None
    with console.status("measuring") as status:
        measurement = measure_steps(
            cases, device=device.value, repeats=repeats, progress=lambda line: _say(status, line)
        )
    shown = Table(title="One training step", caption="milliseconds, median")
    for head in ("task", "n", "parameters", "precision", "step"):
        shown.add_column(head, justify="right", no_wrap=True)
    for row in measurement.rows:
        cells = (str(row[name]) for name in ("task", "order", "parameters", "precision"))
        shown.add_row(*cells, f"{1e3 * float(row['step_s']):.3g}")
    console.print(shown)
    console.print(f"result: {measurement.write(result)}", soft_wrap=True)


@bench.command()
def scan(
    device: Annotated[Device, typer.Option(help="Where to measure.")] = Device.cpu,
    repeats: Annotated[int, typer.Option(parser=_count, metavar="INTEGER", help="Repeats; the median counts.")] = 9,
    out: Annotated[Path, typer.Option(help="Folder for the result file.")] = Path("out/bench"),
) -> None:
    """One layer by every path, scan, chunks and convolution, beside the path the cost rule picks."""
    from compressm.bench.scan_paths import PATHS, measure_paths

    result = out / f"scan-{device.value}.json"
    _require(device, result)
    with console.status("measuring") as status:
        measurement = measure_paths(device=device.value, repeats=repeats, progress=lambda line: _say(status, line))
    shown = Table(title="One layer, forward and backward", caption="milliseconds, median")
    for head in ("batch", "length", "n", "H", *(path.name.lower() for path in PATHS), "chosen"):
        shown.add_column(head, justify="right", no_wrap=True)
    for row in measurement.rows:
        sizes = (str(row[name]) for name in ("batch", "length", "order", "width"))
        times = (row.get(f"{path.name.lower()}_s") for path in PATHS)
        cells = ("" if seconds is None else f"{1e3 * float(seconds):.3g}" for seconds in times)
        shown.add_row(*sizes, *cells, str(row["chosen"]).lower())
    console.print(shown)
    console.print(f"result: {measurement.write(result)}", soft_wrap=True)


def _require(device: Device, *paths: Path) -> None:
    """A device that is there and files that can be written, before anything is measured."""
    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device here; allowed: cpu", param_hint="--device")
    try:
        for path in paths:
            require_writable(path)
    except PathError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None


@bench.command()
def table(result: Annotated[Path, typer.Argument(help="A result file of `compressm bench`.")]) -> None:
    """Print a result file as a Markdown table."""
    from compressm.reports.tables import reduction_markdown

    try:
        typer.echo(reduction_markdown(_read_reduction(result)))
    except MeasurementError as error:
        raise _bad_result(result, error) from None


@bench.command()
def draw(
    result: Annotated[Path, typer.Argument(help="A result file of `compressm bench`.")],
    picture: Annotated[
        Path | None, typer.Option(help="The picture to write. Default: beside the result, .png.")
    ] = None,
) -> None:
    """Draw the picture of a result file again."""
    try:
        measurement = _read_reduction(result)
        _draw(measurement, require_picture(picture or result.with_suffix(".png")))
    except MeasurementError as error:
        raise _bad_result(result, error) from None
    except PathError as error:
        raise typer.BadParameter(str(error), param_hint="--picture") from None


def _bad_result(path: Path, error: MeasurementError) -> typer.BadParameter:
    message = str(error)
    return typer.BadParameter(message if str(path) in message else f"{path}: {message}", param_hint="RESULT")


def _read_reduction(path: Path) -> Measurement:
    """With the columns that tables and pictures of a reduction read."""
    measurement = Measurement.read(path)
    for k, row in enumerate(measurement.rows):
        numbers = [*_NUMBERS, *(_COMPARED if "plain_reduction_s" in row else ())]
        missing = [name for name in (*numbers, *_WORDS) if name not in row]
        if missing:
            raise MeasurementError(
                f"{path} is not a result of `compressm bench reduction`: row {k} lacks {', '.join(missing)}"
            )
        for name in (name for name in row if name not in _WORDS):
            if isinstance(row[name], str):
                raise MeasurementError(f"{path}: row {k} has {row[name]!r} as {name}, expected a number")
    return measurement


def _draw(measurement: Measurement, path: Path) -> None:
    from compressm.reports.reduction_cost import draw_reduction_cost  # matplotlib takes a second to import

    console.print(f"picture: {draw_reduction_cost(measurement, path)}", soft_wrap=True)


def _say(status, line: str) -> None:
    """A spinner on a terminal, plain lines elsewhere."""
    if console.is_terminal:
        status.update(f"measuring {line}")
    else:
        console.print(line)


_CAPTION = "milliseconds, H channels; medians; repeats per row are in the result file"


def _reduction_table(measurement: Measurement) -> Table:
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
