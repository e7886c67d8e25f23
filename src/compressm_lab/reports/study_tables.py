"""Tables of the studies, `python -m compressm_lab.experiments.NAME`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, stdev

from compressm_lab.reports.grid import Grid
from compressm_lab.runs.measurement import Measurement, MeasurementError, Row

_COMMAND = "python -m compressm_lab.experiments"
WINDOW = 10  # steps after a cut over which the loss is averaged


def one_shot_grids(measurement: Measurement) -> list[Grid]:
    """One table a model, with a row for each order and a column for each way of cutting to it."""
    needed = ("setting", "seed", "way", "order", "rank", "accuracy", "full_accuracy")
    measurement.require("one_shot", needed=needed, words=("setting", "way", "device"), command=f"{_COMMAND}.one_shot")
    return [_one_shot_grid(measurement, setting) for setting in _distinct(measurement.rows, "setting")]


def _one_shot_grid(measurement: Measurement, setting: str) -> Grid:
    rows = [row for row in measurement.rows if row["setting"] == setting]
    names, whole = _distinct(rows, "way"), {row["seed"]: float(row["full_accuracy"]) for row in rows}
    cells: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        at = cells.setdefault(f"{row['order']} → {row['rank']}", {name: [] for name in names})
        at[str(row["way"])].append(float(row["accuracy"]))
    caption = f"test accuracy over {measurement.repeats} seeds; before the cut {_spread(whole.values())}"
    lines = tuple((sizes, *(_spread(values) for values in at.values())) for sizes, at in cells.items())
    return Grid(setting.capitalize(), ("n → r", *names), lines, caption)


def hidden_system_grids(measurement: Measurement) -> list[Grid]:
    """One row a seed."""
    errors = ("error", "error_cut", "error_more")
    needed = ("seed", "hidden", "states", "found", "tail", *errors)
    measurement.require("hidden_system", needed=needed, words=("device",), command=f"{_COMMAND}.hidden_system")
    heads = ("seed", "hidden order", "n → r", "bound / σ₁ at the hidden order", "error", "after the cut", "20 steps on")
    rows = tuple(
        (
            *(str(row[name]) for name in ("seed", "hidden")),
            f"{row['states']} → {row['found']}",
            *(f"{float(row[name]):.1e}" for name in ("tail", *errors)),
        )
        for row in measurement.rows
    )
    return [Grid("The order of a hidden system", heads, rows, "mean squared errors of outputs whose mean square is 1")]


@dataclass(frozen=True)
class Continuity:
    """Of one way to cut: the loss of each seed over the first steps after it, and how that compares with no cut.

    `distance` is the largest |loss − mean of the uncut runs| in standard deviations of the uncut runs.
    """

    states: float
    kept: float
    losses: tuple[float, ...]
    distance: float
    paired: float


def continuity(measurement: Measurement) -> dict[str, Continuity]:
    """By way, the uncut runs among them."""
    require_curves(measurement)
    losses = {way: [_loss_after(row) for row in rows_of(measurement, way)] for way in ways(measurement)}
    uncut = losses["uncut"]
    centre, spread = mean(uncut), stdev(uncut)
    return {
        way: Continuity(
            states=mean(float(row["states"]) for row in rows_of(measurement, way)),
            kept=mean(float(row["kept"]) for row in rows_of(measurement, way)),
            losses=tuple(found),
            distance=max(abs(loss - centre) for loss in found) / spread,
            paired=mean(loss - same for loss, same in zip(found, uncut, strict=True)),
        )
        for way, found in losses.items()
    }


def loss_continuity_grids(measurement: Measurement) -> list[Grid]:
    """One row a way."""
    heads = ("way", "n → r", "loss", "over the same batches uncut", "farthest from the uncut mean")
    rows = tuple(
        (
            way,
            f"{found.states:.0f} → {found.kept:.0f}",
            _spread(found.losses),
            f"{round(found.paired, 3) + 0:+.3f}",
            f"{found.distance:.2f} sd",
        )
        for way, found in continuity(measurement).items()
    )
    caption = f"training loss, mean of {WINDOW} steps after the cut, over {measurement.repeats} seeds"
    return [Grid("The loss after a cut", heads, rows, caption)]


def require_curves(measurement: Measurement) -> None:
    """The columns that tables and pictures of a loss around a cut read; the same seeds in every way, two at least."""
    needed = ("way", "seed", "states", "kept", *(f"{k:+d}" for k in range(WINDOW + 1)))
    measurement.require(
        "loss_continuity", needed=needed, words=("way", "device"), command=f"{_COMMAND}.loss_continuity"
    )
    seeds = {way: [row["seed"] for row in rows_of(measurement, way)] for way in ways(measurement)}
    if "uncut" not in seeds or len(seeds["uncut"]) < 2:
        raise MeasurementError(f"{measurement.name}: {len(seeds.get('uncut', []))} uncut runs; a spread needs 2")
    if any(found != seeds["uncut"] for found in seeds.values()):
        raise MeasurementError(f"{measurement.name}: the seeds differ between ways: {seeds}")


def ways(measurement: Measurement) -> list[str]:
    """In the order of the rows."""
    return _distinct(measurement.rows, "way")


def rows_of(measurement: Measurement, way: str) -> list[Row]:
    """One a seed."""
    return [row for row in measurement.rows if row["way"] == way]


def _loss_after(row: Row) -> float:
    return mean(float(row[f"{k:+d}"]) for k in range(1, WINDOW + 1))


def _distinct(rows: Iterable[Row], column: str) -> list[str]:
    return list(dict.fromkeys(str(row[column]) for row in rows))


def _spread(values: Iterable[float]) -> str:
    found = list(values)
    return f"{mean(found):.3f} ± {stdev(found):.3f}" if len(found) > 1 else f"{found[0]:.3f}"
