"""`compressm bench speedup`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from compressm.cli import INTERRUPTED
from compressm.cli.bench.options import OUT, Device, DeviceOption, PicturedOutOption, RepeatsOption, count, require
from compressm.cli.bench.terminal import console, draw_picture, measuring, report
from compressm.cli.inspect import BAD_INPUT, DataOption, OfflineOption
from compressm.data import DataError, Store, Task, make
from compressm.experiments.catalogue import find_recipe
from compressm.training.config import ConfigError, Recipe
from compressm.training.plan import Plan

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
    from compressm.bench.speedup import NotChecked, measure_speedup

    try:
        wanted = find_recipe(recipe, tuple(settings or ()))
        _require_cuts(recipe, wanted)
        path = None if schedule is None else _path(schedule, wanted)
        result, picture = (out / f"speedup-{wanted.name}-{device.value}{end}" for end in (".json", ".png"))
        require(device, result, picture)
        task = _task(wanted, data, offline)
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
    except BAD_INPUT as error:  # what a model, or the data, cannot be made of
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


def _task(recipe: Recipe, data: Path | None, offline: bool) -> Task:
    options = {key: value for key, value in recipe.task.items() if key != "name"}
    store = Store(offline=offline) if data is None else Store(data, offline=offline)
    return make(recipe.task["name"], **options).load(store)


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
