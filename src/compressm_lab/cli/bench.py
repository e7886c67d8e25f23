"""`compressm bench`: measure on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.markup import escape
from rich.table import Table

from compressm.cli import INTERRUPTED, in_words
from compressm.cli.inspect import BAD_INPUT
from compressm.cli.options import DataOption, OfflineOption, PathError, require_picture, require_writable
from compressm_lab.bench.reduction import Case, measure_reduction
from compressm_lab.cli.opening import task_of
from compressm_lab.cli.terminal import SetOption, console, integer_option, require_unused, say, status
from compressm_lab.data import DataError
from compressm_lab.experiments.recipes import find_recipe
from compressm_lab.reports.grid import Grid
from compressm_lab.reports.measurements import grids, markdown
from compressm_lab.runs.measurement import Measurement, MeasurementError
from compressm_lab.runs.records import RunError
from compressm_lab.training.config import ConfigError, Recipe
from compressm_lab.training.plan import Plan

_LONG = 20  # cells that may be broken into lines

Device = Literal["cpu", "cuda"]
# Precisions of the activations. Parameters are float32, and in tf32 everything but the products on a GPU.
PrecisionChoice = StrEnum("PrecisionChoice", "float32 tf32 bfloat16")
PaperTask = StrEnum("PaperTask", "smnist scifar listops imdb aan pathfinder")
Axis = StrEnum("Axis", "order length width")
LoopWay = StrEnum(
    "LoopWay",
    "eager compiled reduce_overhead captured laboratory plain plain_compiled plain_reduce_overhead transformers",
)
_GRAPHS = {"captured", "laboratory", "reduce_overhead", "plain_reduce_overhead"}
LoopModel = StrEnum("LoopModel", "smnist scifar mamba")

DeviceOption = Annotated[Device, typer.Option(help="Where to measure.")]
RepeatsOption = Annotated[int, integer_option("Repeats; the median counts.")]
CompileOption = Annotated[bool, typer.Option("--compile/--no-compile", help="Compile the blocks of the model first.")]
OutOption = Annotated[Path, typer.Option(help="Folder for the result file.")]
PicturedOutOption = Annotated[Path, typer.Option(help="Folder for the result file and the picture.")]
OUT = Path("out/bench")


def report(measurement: Measurement, result: Path, *, shown: list[Grid] | None = None) -> None:
    """Print a measurement's tables and write its result file."""
    for grid in shown or grids(measurement):
        # Wider than the terminal rather than with numbers cut off.
        console.print(as_table(grid), crop=False)
    say(f"result: {measurement.write(result)}")


def draw_picture(measurement: Measurement, path: Path) -> None:
    """Draw a measurement and say where the picture is."""
    from compressm_lab.reports.measurements import draw  # matplotlib takes a second to import

    say(f"picture: {draw(measurement, path)}")


def as_table(grid: Grid) -> Table:
    """The grid as a table of a terminal."""
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


def require(device: Device, result: Path, *, pictured: bool = False) -> Path:
    """The result file, once the device is known to be there and all files can be written."""
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device here; allowed: cpu", param_hint="--device")
    try:
        if pictured:
            require_writable(result.with_suffix(".png"))
        return require_writable(result)
    except PathError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None


def _measure(
    name: str,
    measure: Callable[..., Measurement],
    device: Device,
    out: Path,
    *,
    pictured: bool = False,
    **options: object,
) -> None:
    """Measure, then print the tables and write the result file, with a picture beside it where `pictured`."""
    result = require(device, out / f"{name}-{device}.json", pictured=pictured)
    with status("measuring") as progress:
        measurement = measure(device=device, progress=progress, **options)
    report(measurement, result)
    if pictured:
        draw_picture(measurement, result.with_suffix(".png"))


def reduction(
    device: DeviceOption = "cpu",
    order: Annotated[
        list[int] | None, integer_option("Orders n to reduce to n/4; again for more. Default: 1 to 1024.")
    ] = None,
    width: Annotated[int, integer_option("Channels of the layers, where --order is given.")] = 8,
    repeats: RepeatsOption = 9,
    compare: Annotated[bool, typer.Option(help="Time the paper's plain NumPy/SciPy formulas beside (CPU).")] = True,
    out: PicturedOutOption = OUT,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Measure the cost of each stage of one reduction, n = 1 … 1024."""
    if not order:
        require_unused(context, "it is for --order", "width")
    result = require(device, out / f"reduction-{device}.json", pictured=True)
    cases = [Case(n, max(1, n // 4), width) for n in order] if order else None
    with status("measuring") as progress:
        measurement = measure_reduction(cases, device=device, repeats=repeats, compare=compare, progress=progress)
    report(measurement, result, shown=[_reduction_grid(measurement)])
    picture = result.with_suffix(".png")
    if sum(row["width"] == 8 and row["members"] == 1 and row["system"] == "initial" for row in measurement.rows) > 1:
        draw_picture(measurement, picture)
    else:
        picture.unlink(missing_ok=True)  # of another result


def _reduction_grid(measurement: Measurement) -> Grid:
    """A table narrower than the one for Markdown, with the Gramians alone."""
    columns = {"P, Q": "gramians_s", "σ": "hankel_s", "all": "reduction_s"}
    columns |= {"plain σ": "plain_hankel_s", "plain all": "plain_reduction_s"}
    shown = {head: name for head, name in columns.items() if any(name in row for row in measurement.rows)}
    ratio = ("ratio",) if "plain all" in shown else ()
    rows = []
    for row in measurement.rows:
        several = f"{row['members']} × " if row["members"] != 1 else ""
        cells = [f"{several}{row['order']} → {row['rank']}", str(row["width"]), str(row["system"])]
        cells += [f"{1e3 * float(row[name]):.3g}" if name in row else "" for name in shown.values()]
        cells += [f"{float(row['speedup']):.1f}×" if "speedup" in row else "" for _ in ratio]
        rows.append(tuple(cells))
    caption = "milliseconds, H channels; medians; repeats per row are in the result file"
    return Grid("One reduction", ("n → r", "H", "system", *shown, *ratio), tuple(rows), caption)


def cut(
    device: DeviceOption = "cpu",
    task: Annotated[
        list[PaperTask] | None,
        typer.Option(help="Which of the paper's models; again for more. Default: sMNIST, on a GPU sCIFAR too."),
    ] = None,
    rank: Annotated[int | None, integer_option("States to keep in every layer. Default: as in the paper.")] = None,
    precision: Annotated[
        PrecisionChoice, typer.Option(help="Precision of the activations, where --task is given.")
    ] = PrecisionChoice.float32,
    repeats: RepeatsOption = 5,
    out: OutOption = OUT,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Measure a whole cut in the middle of training: read, balance, truncate, encode, moments, and the next step."""
    from compressm_lab.bench.cut import cut_cases, default_cases, default_models, measure_cuts  # brings in a compiler
    from compressm_lab.bench.train_step import paper_case

    if not task:
        require_unused(context, "it is for --task", "precision")
    chosen = [paper_case(name.value, precision=precision.value) for name in task or ()]
    cases = default_cases(device) if not chosen and rank is None else cut_cases(chosen or default_models(device), rank)
    _measure("cut", measure_cuts, device, out, cases=cases, repeats=repeats)


def step(
    device: DeviceOption = "cpu",
    task: Annotated[
        list[PaperTask] | None,
        typer.Option(help="Sizes of which of the paper's models; again for more. Default: sMNIST, on a GPU all."),
    ] = None,
    order: Annotated[
        list[int] | None, integer_option("Orders n; again for more. Default: the paper's and a quarter of it.")
    ] = None,
    precision: Annotated[
        PrecisionChoice, typer.Option(help="Precision of the activations, where --task or --order is given.")
    ] = PrecisionChoice.float32,
    compiled: CompileOption = False,
    repeats: RepeatsOption = 9,
    out: OutOption = OUT,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Measure a training step at the paper's sizes: forward, backward and AdamW on random data, beside its floor."""
    # Brings in torch's compiler.
    from compressm_lab.bench.train_step import default_cases, measure_steps, paper_case, paper_orders

    if not (task or order):
        require_unused(context, "it is for --task or --order", "precision")
    cases = default_cases(device, compiled=compiled)
    if task or order:
        sizes = [(name.value, n) for name in task or [PaperTask.smnist] for n in order or paper_orders(name.value)]
        cases = tuple(paper_case(name, n, precision=precision.value, compiled=compiled) for name, n in sizes)
    _measure("step", measure_steps, device, out, cases=cases, repeats=repeats)


def loop(
    device: DeviceOption = "cpu",
    way: Annotated[
        list[LoopWay] | None, typer.Option(help="Ways to run the loop; again for more. Default: all that are here.")
    ] = None,
    model: Annotated[list[LoopModel] | None, typer.Option(help="Models; again for more. Default: all.")] = None,
    repeats: RepeatsOption = 9,
    out: OutOption = OUT,
) -> None:
    """Measure a training step in a user's own loop: eager, compiled, captured, beside the model in plain PyTorch."""
    from compressm_lab.bench.loop import loop_cases, measure_loops  # brings in torch's compiler

    chosen = [name.value for name in way or ()]
    if device == "cpu" and (only := [name for name in chosen if name in _GRAPHS]):
        raise typer.BadParameter(f"{only[0]} needs CUDA graphs: use --device cuda", param_hint="--way")
    cases = loop_cases(device, [name.value for name in model or ()])
    if not cases:
        raise typer.BadParameter("a CPU runs smnist and mamba: use --device cuda", param_hint="--model")
    keep = partial(Measurement.write, path=out / f"loop-{device}.json")  # what is there after a kill
    _measure("loop", measure_loops, device, out, cases=cases, ways=chosen, repeats=repeats, keep=keep)


def growth(
    device: DeviceOption = "cpu",
    axis: Annotated[list[Axis] | None, typer.Option(help="What grows; again for more. Default: all three.")] = None,
    precision: Annotated[
        list[PrecisionChoice] | None,
        typer.Option(help="Precision of the activations; again for more. Default: float32, on a GPU bfloat16 too."),
    ] = None,
    compiled: CompileOption = False,
    repeats: RepeatsOption = 9,
    out: PicturedOutOption = OUT,
) -> None:
    """Measure how a training step grows with the order n, the length L and the width H."""
    from compressm_lab.bench.train_step import measure_growth  # brings in torch's compiler

    axes, precisions = [name.value for name in axis or Axis], [name.value for name in precision or ()]
    options = {"axes": axes, "precisions": precisions, "repeats": repeats, "compiled": compiled}
    _measure("growth", measure_growth, device, out, pictured=True, **options)


def regulariser(
    device: DeviceOption = "cpu",
    order: Annotated[list[int] | None, integer_option("Orders n; again for more. Default: 32 to 512.")] = None,
    repeats: RepeatsOption = 9,
    out: OutOption = OUT,
) -> None:
    """Measure value and gradient of a penalty on Hankel singular values, beside a plain step of the sMNIST model."""
    from compressm_lab.bench.regulariser import ORDERS, default_cases, measure_regulariser

    cases = default_cases(device, order or ORDERS)
    _measure("regulariser", measure_regulariser, device, out, cases=cases, repeats=repeats)


def scan(device: DeviceOption = "cpu", repeats: RepeatsOption = 9, out: OutOption = OUT) -> None:
    """Measure one layer by every path, scan, chunks and convolution, beside the path the cost rule picks."""
    from compressm_lab.bench.scans import measure_paths

    _measure("scan", measure_paths, device, out, repeats=repeats)


def peers(device: DeviceOption = "cpu", repeats: RepeatsOption = 9, out: OutOption = OUT) -> None:
    """Measure h ← λh + x beside a PyTorch loop, torch's associative scan and the scan packages installed here."""
    from compressm_lab.bench.peers import measure_peers

    _measure("peers", measure_peers, device, out, repeats=repeats)


def selective(device: DeviceOption = "cpu", repeats: RepeatsOption = 9, out: OutOption = OUT) -> None:
    """Measure the scan of Mamba layers at orders from 128 to 8, on a GPU beside the least time it could take."""
    from compressm_lab.bench.scans import measure_selective

    _measure("selective", measure_selective, device, out, repeats=repeats)


def stream(device: DeviceOption = "cpu", repeats: RepeatsOption = 9, out: OutOption = OUT) -> None:
    """Measure a token of streaming language models by `step` and by `Stream`, before and after a cut."""
    from compressm_lab.bench.stream import measure_streams

    _measure("stream", measure_streams, device, out, repeats=repeats)


def export(repeats: RepeatsOption = 9, out: OutOption = OUT) -> None:
    """Export every layer and model to every runtime, check the files there, and time a step before and after a cut."""
    from compressm_lab.bench.export import measure_export

    _measure("export", measure_export, "cpu", out, repeats=repeats)


def speedup(
    recipe: Annotated[str, typer.Argument(help="A recipe by name, or a .yaml file; one that cuts.")] = "digits",
    settings: SetOption = None,
    order: Annotated[list[int] | None, integer_option("Orders to measure; again for more. Default: halves.")] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="STEP:ORDER,...", help="Predict this too, as 0:256,5000:216,10000:176.")
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Train the recipe with its cuts and without, and show both beside the prediction.")
    ] = True,
    device: DeviceOption = "cpu",
    repeats: RepeatsOption = 9,
    data: DataOption = None,
    offline: OfflineOption = False,
    out: PicturedOutOption = OUT,
) -> None:
    """Measure the cost of a step, an evaluation and a cut by order, and predict the speed-up of training."""
    from compressm_lab.bench.speedup import NotChecked, measure_speedup

    missing: NotChecked | None = None
    # Whatever a model, or the data, cannot be made of is the recipe's fault.
    try:
        wanted = find_recipe(recipe, tuple(settings or ()))
        _require_cuts(recipe, wanted)
        path = None if schedule is None else _path(schedule, wanted)
        result = require(device, out / f"speedup-{wanted.name}-{device}.json", pictured=True)
        task = task_of(wanted, data, offline)
        orders = [*(order or _halves(wanted.model.order)), *(n for _, n in path or ())]
        with status("measuring") as progress:
            measurement = measure_speedup(
                wanted, task, orders=orders, path=path, check=check, device=device, repeats=repeats, progress=progress
            )
    except NotChecked as error:
        missing, measurement = error, error.measurement
        result = result.with_stem(f"{result.stem}-unchecked")  # beside a result that is whole
    except (*BAD_INPUT, ConfigError, DataError, RunError) as error:
        raise typer.BadParameter(in_words(error)) from None
    report(measurement, result)
    draw_picture(measurement, result.with_suffix(".png"))
    if missing is not None:
        console.print(f"{missing}; what was measured until then is kept")
        raise typer.Exit(INTERRUPTED if missing.stopped else 1)


def _require_cuts(name: str, recipe: Recipe) -> None:
    """Refuse a recipe whose speed-up cannot be measured; a plan refuses cuts after the last step."""
    if recipe.compression is None:
        raise ConfigError(f"{name} does not cut: there is no speed-up to measure")
    if other := [part for part in ("regulariser", "distillation") if getattr(recipe, part) is not None]:
        raise ConfigError(f"{name} has a {other[0]}, whose cost is not counted: --set {other[0]}=null")
    Plan.of(recipe)


def _halves(order: int) -> list[int]:
    """The orders n, n/2, … down to 4 or so."""
    return [order, *_halves(order // 2)] if order >= 8 else [order]


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


def table(result: Annotated[Path, typer.Argument(help="A result file of a benchmark or study.")]) -> None:
    """Print a result file as Markdown tables."""
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


bench = typer.Typer(help="Measure speed on this machine; results are JSON files with a picture.", no_args_is_help=True)
_COMMANDS = (
    reduction,
    cut,
    step,
    loop,
    growth,
    regulariser,
    speedup,
    scan,
    peers,
    selective,
    stream,
    export,
    table,
    draw,
)
for command in _COMMANDS:
    bench.command()(command)
