"""`compressm bench`: measure on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compressm.cli import INTERRUPTED
from compressm.cli.inspect import BAD_INPUT
from compressm.cli.options import DataOption, OfflineOption, PathError, require_picture, require_writable
from compressm_lab.bench.reduction import Case, measure_reduction
from compressm_lab.cli.opening import task_of
from compressm_lab.data import DataError
from compressm_lab.experiments.recipes import find_recipe
from compressm_lab.reports.grid import Grid
from compressm_lab.reports.measurements import grids
from compressm_lab.runs.measurement import Measurement, MeasurementError
from compressm_lab.runs.records import RunError
from compressm_lab.training.config import ConfigError, Recipe
from compressm_lab.training.plan import Plan

console = Console()
_LONG = 20  # cells that may be broken into lines


@contextmanager
def measuring() -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, plain lines elsewhere."""
    with console.status("measuring") as status:

        def say(line: str) -> None:
            if console.is_terminal:
                status.update(f"measuring {line}")
            else:
                console.print(line)

        yield say


def report(measurement: Measurement, result: Path, *, tables: list[Table] | None = None) -> None:
    """Show its tables and write its file."""
    for table in tables or [_rich(grid) for grid in grids(measurement)]:
        # Wider than the terminal rather than with numbers cut off.
        console.print(table, crop=False)
    console.print(f"result: {measurement.write(result)}", soft_wrap=True)


def draw_picture(measurement: Measurement, path: Path) -> None:
    """Draw it and say where it is."""
    from compressm_lab.reports.measurements import draw  # matplotlib takes a second to import

    console.print(f"picture: {draw(measurement, path)}", soft_wrap=True)


def _rich(grid: Grid) -> Table:
    table = Table(title=escape(grid.title), caption=escape(grid.caption))
    for k, head in enumerate(grid.heads):
        longest = max((len(row[k]) for row in grid.rows), default=0)
        if head == "note" or longest > _LONG:
            table.add_column(head, min_width=min(12, max(len(head), longest)))
        else:
            # Heads may be broken between words, numbers never.
            words = max(map(len, head.split()), default=0)
            table.add_column(head, justify="right", min_width=max(longest, words))
    for row in grid.rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


class Device(StrEnum):
    """Where to measure."""

    cpu = "cpu"
    cuda = "cuda"


class PrecisionChoice(StrEnum):
    """Of the activations; parameters are float32, as is everything in tf32 but products on a GPU."""

    float32 = "float32"
    tf32 = "tf32"
    bfloat16 = "bfloat16"


class PaperTask(StrEnum):
    """The paper's tasks, by their sizes."""

    smnist = "smnist"
    scifar = "scifar"
    listops = "listops"
    imdb = "imdb"
    aan = "aan"
    pathfinder = "pathfinder"


def count(text: str | int) -> int:
    """Typer's own check does not say what was given."""
    try:
        number = int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an integer, expected at least 1") from None
    if number < 1:
        raise typer.BadParameter(f"{number} is too small, expected at least 1")
    return number


DeviceOption = Annotated[Device, typer.Option(help="Where to measure.")]
RepeatsOption = Annotated[int, typer.Option(parser=count, metavar="INTEGER", help="Repeats; the median counts.")]
CompileOption = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Compile the regions around the SSM layers first.")
]
OutOption = Annotated[Path, typer.Option(help="Folder for the result file.")]
PicturedOutOption = Annotated[Path, typer.Option(help="Folder for the result file and the picture.")]
OUT = Path("out/bench")


def require(device: Device, *paths: Path) -> None:
    """A device that is there and files that can be written."""
    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device here; allowed: cpu", param_hint="--device")
    try:
        for path in paths:
            require_writable(path)
    except PathError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None


def cut(
    device: DeviceOption = Device.cpu,
    task: Annotated[
        list[PaperTask] | None,
        typer.Option(help="Which of the paper's models; again for more. Default: sMNIST, on a GPU sCIFAR too."),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(parser=count, metavar="INTEGER", help="States to keep in every layer. Default: as in the paper."),
    ] = None,
    precision: Annotated[
        PrecisionChoice, typer.Option(help="Of the activations, where --task is given.")
    ] = PrecisionChoice.float32,
    repeats: RepeatsOption = 5,
    out: OutOption = OUT,
) -> None:
    """One whole cut in the middle of training: read, balance, truncate, encode, moments, and the first step after."""
    from compressm_lab.bench.cut import (
        cut_cases,
        default_models,
        measure_cuts,  # brings in torch's compiler
    )
    from compressm_lab.bench.train_step import paper_case

    result = out / f"cut-{device.value}.json"
    require(device, result)
    models = (
        [paper_case(name.value, precision=precision.value) for name in task] if task else default_models(device.value)
    )
    with measuring() as say:
        cases = cut_cases(models, rank)
        measurement = measure_cuts(cases, device=device.value, repeats=repeats, progress=say)
    report(measurement, result)


class Axis(StrEnum):
    """What grows."""

    order = "order"
    length = "length"
    width = "width"


def growth(
    device: DeviceOption = Device.cpu,
    axis: Annotated[list[Axis] | None, typer.Option(help="What grows; again for more. Default: all three.")] = None,
    precision: Annotated[
        list[PrecisionChoice] | None,
        typer.Option(help="Of the activations; again for more. Default: float32, on a GPU bfloat16 too."),
    ] = None,
    compiled: CompileOption = False,
    repeats: RepeatsOption = 9,
    out: PicturedOutOption = OUT,
) -> None:
    """How a training step grows with the order n, the length L and the width H."""
    from compressm_lab.bench.growth import measure_growth  # brings in torch's compiler

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
    from compressm_lab.bench.regulariser import ORDERS, default_cases, measure_regulariser

    result = out / f"regulariser-{device.value}.json"
    require(device, result)
    cases = default_cases(device.value, order or ORDERS)
    with measuring() as say:
        measurement = measure_regulariser(cases, device=device.value, repeats=repeats, progress=say)
    report(measurement, result)


def table(result: Annotated[Path, typer.Argument(help="A result file of a benchmark or study.")]) -> None:
    """Print a result file as Markdown tables."""
    from compressm_lab.reports.measurements import grids, markdown

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


def scan(device: DeviceOption = Device.cpu, repeats: RepeatsOption = 9, out: OutOption = OUT) -> None:
    """One layer by every path, scan, chunks and convolution, beside the path the cost rule picks."""
    from compressm_lab.bench.scans import measure_paths

    result = out / f"scan-{device.value}.json"
    require(device, result)
    with measuring() as say:
        measurement = measure_paths(device=device.value, repeats=repeats, progress=say)
    report(measurement, result)


def peers(device: DeviceOption = Device.cpu, repeats: RepeatsOption = 9, out: OutOption = OUT) -> None:
    """The recurrence h ← λh + x beside a PyTorch loop, torch's associative scan and scan packages installed here."""
    from compressm_lab.bench.peers import measure_peers

    result = out / f"peers-{device.value}.json"
    require(device, result)
    with measuring() as say:
        measurement = measure_peers(device=device.value, repeats=repeats, progress=say)
    report(measurement, result)


def selective(device: DeviceOption = Device.cpu, repeats: RepeatsOption = 9, out: OutOption = OUT) -> None:
    """The scan of Mamba layers at orders from 128 to 8, on a GPU beside the least time it could take."""
    from compressm_lab.bench.scans import measure_selective

    result = out / f"selective-{device.value}.json"
    require(device, result)
    with measuring() as say:
        measurement = measure_selective(device=device.value, repeats=repeats, progress=say)
    report(measurement, result)


RecipeArgument = Annotated[str, typer.Argument(help="A recipe by name, or a .yaml file; one that cuts.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe; again for more.")
]
OrderOption = Annotated[
    list[int] | None,
    typer.Option(parser=count, metavar="INTEGER", help="Orders to measure; again for more. Default: halves."),
]
ScheduleOption = Annotated[
    str | None, typer.Option(metavar="STEP:ORDER,...", help="Predict this too, as 0:256,5000:216,10000:176.")
]
CheckOption = Annotated[
    bool,
    typer.Option(
        help="Train the recipe with its cuts and without, beside the prediction for the cuts that came of it."
    ),
]


def speedup(
    recipe: RecipeArgument = "digits",
    settings: SetOption = None,
    order: OrderOption = None,
    schedule: ScheduleOption = None,
    check: CheckOption = True,
    device: DeviceOption = Device.cpu,
    repeats: RepeatsOption = 9,
    data: DataOption = None,
    offline: OfflineOption = False,
    out: PicturedOutOption = OUT,
) -> None:
    """The cost of a step, an evaluation and a cut by order, and the speed-up of training that they predict."""
    from compressm_lab.bench.speedup import NotChecked, measure_speedup

    try:
        wanted = find_recipe(recipe, tuple(settings or ()))
        _require_cuts(recipe, wanted)
        path = None if schedule is None else _path(schedule, wanted)
        result, picture = (out / f"speedup-{wanted.name}-{device.value}{end}" for end in (".json", ".png"))
        require(device, result, picture)
        task = task_of(wanted, data, offline)
    except (ConfigError, DataError) as error:
        raise typer.BadParameter(str(error)) from None
    orders = [*(order or _halves(wanted.model.order)), *(n for _, n in path or ())]
    options: dict[str, Any] = {"check": check, "device": device.value, "repeats": repeats}
    missing: NotChecked | None = None
    try:
        with measuring() as say:
            measurement = measure_speedup(wanted, task, orders=orders, path=path, progress=say, **options)
    except NotChecked as error:
        missing, measurement = error, error.measurement  # beside a result that is whole
        result, picture = (path.with_stem(f"{path.stem}-unchecked") for path in (result, picture))
    except (*BAD_INPUT, ConfigError, DataError, RunError) as error:  # what a model, or the data, cannot be made of
        raise typer.BadParameter(str(error)) from None
    report(measurement, result)
    draw_picture(measurement, picture)
    if missing is not None:
        console.print(f"{missing}; what was measured until then is kept")
        raise typer.Exit(INTERRUPTED if missing.stopped else 1)


def _require_cuts(name: str, recipe: Recipe) -> None:
    """Before anything is measured; a plan refuses cuts after the last step."""
    if recipe.compression is None:
        raise ConfigError(f"{name} does not cut: there is no speed-up to measure")
    if other := [part for part in ("regulariser", "distillation") if getattr(recipe, part) is not None]:
        raise ConfigError(f"{name} has a {other[0]}, whose cost is not counted: --set {other[0]}=null")
    Plan.of(recipe)


def _halves(order: int) -> list[int]:
    """n, n/2, … down to 4 or so."""
    found = [order]
    while found[-1] >= 8:
        found.append(found[-1] // 2)
    return found


def _path(text: str, recipe: Recipe) -> Sequence[tuple[int, int]]:
    try:
        found = [(int(step), int(order)) for step, order in (part.split(":") for part in text.split(","))]
    except ValueError:
        raise ConfigError(f"--schedule {text!r}: expected STEP:ORDER,..., as in 0:256,5000:216") from None
    steps, orders = ([pair[k] for pair in found] for k in (0, 1))
    rising = steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] < recipe.training.steps
    falling = orders == sorted(set(orders), reverse=True) and orders[-1] >= 1
    if not (rising and falling):
        raise ConfigError(
            f"--schedule {text!r}: expected steps that rise from 0 to below {recipe.training.steps}, and orders that "
            "fall, to 1 or more"
        )
    return found


def step(
    device: DeviceOption = Device.cpu,
    task: Annotated[
        list[PaperTask] | None,
        typer.Option(help="Sizes of which of the paper's models; again for more. Default: sMNIST, on a GPU all."),
    ] = None,
    order: Annotated[
        list[int] | None,
        typer.Option(
            parser=count, metavar="INTEGER", help="Orders n; again for more. Default: the paper's and a quarter of it."
        ),
    ] = None,
    precision: Annotated[
        PrecisionChoice, typer.Option(help="Of the activations, where --task or --order is given.")
    ] = PrecisionChoice.float32,
    compiled: CompileOption = False,
    repeats: RepeatsOption = 9,
    out: OutOption = OUT,
) -> None:
    """A whole training step at the paper's sizes: forward, backward and AdamW on random data, beside its floor."""
    from compressm_lab.bench.train_step import (
        default_cases,
        measure_steps,  # brings in torch's compiler
        paper_case,
        paper_orders,
    )

    result = out / f"step-{device.value}.json"
    require(device, result)
    if task or order:
        sizes = [(name.value, n) for name in task or [PaperTask.smnist] for n in order or paper_orders(name.value)]
        cases = tuple(paper_case(name, n, precision=precision.value, compiled=compiled) for name, n in sizes)
    else:
        cases = default_cases(device.value, compiled=compiled)
    with measuring() as say:
        measurement = measure_steps(cases, device=device.value, repeats=repeats, progress=say)
    report(measurement, result)


bench = typer.Typer(help="Measure speed on this machine; results are JSON files with a picture.", no_args_is_help=True)
for command in (
    reduction,
    cut,
    step,
    growth,
    regulariser,
    speedup,
    scan,
    peers,
    selective,
    table,
    draw,
):
    bench.command()(command)
