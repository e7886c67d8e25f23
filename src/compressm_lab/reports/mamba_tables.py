"""Tables of the studies of Mamba layers."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean, stdev

from compressm_lab.reports.grid import Grid, duration
from compressm_lab.runs.measurement import Measurement, Row

_COMMAND = "python -m compressm_lab.experiments"
_WHOLE = "128 states"  # what times are compared with


def imdb_mamba_grids(measurement: Measurement) -> list[Grid]:
    """One row a variant: sizes and times in the mean over seeds, accuracies of each."""
    sizes = ("initial_order", "order", "channel_order", "complex_layers", "numbers")
    needed = ("variant", "seed", "steps", *sizes, "best", "last", "steps_s", "seconds", "cuts_s", "step_s")
    measurement.require("imdb_mamba", needed=needed, words=("variant",), command=f"{_COMMAND}.imdb_mamba")
    groups: dict[str, list[Row]] = {}
    for row in measurement.rows:
        groups.setdefault(str(row["variant"]), []).append(row)
    heads = ("training", "n → r", "states a channel", "numbers", "test accuracy", "at the end", "a step")
    times = ("gradient steps", "speed", "cuts", "recording", "all three", "speed", "whole run")
    lines = tuple((name, *_cells(rows), *_times(rows, groups.get(_WHOLE))) for name, rows in groups.items())
    seeds, steps = len(next(iter(groups.values()))), measurement.rows[0]["steps"]
    caption = f"test accuracy in percent where validation was best, and at the end, of {seeds} seeds; {steps} steps"
    return [Grid("Mamba on IMDB", (*heads, *times), lines, caption)]


def _cells(rows: list[Row]) -> tuple[str, ...]:
    kind = ", complex" if any(row["complex_layers"] for row in rows) else ""
    return (
        f"{_mean(rows, 'initial_order'):.0f} → {_mean(rows, 'order'):.3g}",
        f"{_mean(rows, 'channel_order'):.3g}{kind}",
        f"{_mean(rows, 'numbers') / 1e3:.0f} k",
        _each(rows, "best"),
        _each(rows, "last"),
        duration(_mean(rows, "step_s")),
    )


def _times(rows: list[Row], whole: list[Row] | None) -> tuple[str, ...]:
    steps, cuts, recording = "steps_s", "cuts_s", "recording_s"
    return (
        *(_seconds(rows, steps), _speed(rows, whole, steps), _seconds(rows, cuts), _seconds(rows, recording)),
        *(_seconds(rows, steps, cuts, recording), _speed(rows, whole, steps, cuts, recording)),
        _seconds(rows, "seconds"),
    )


def _seconds(rows: list[Row], *parts: str) -> str:
    taken = _taken(rows, *parts)
    return "" if taken is None else duration(taken)


def _speed(rows: list[Row], whole: list[Row] | None, *parts: str) -> str:
    here, there = _taken(rows, *parts), None if whole is None else _taken(whole, *parts)
    return "" if here is None or there is None else f"{there / here:.2f}×"


def _taken(rows: list[Row], *parts: str) -> float | None:
    """None where a part is not known: results of before recording was counted on its own have none of it."""
    known = all(part in row for row in rows for part in parts)
    return sum(_mean(rows, part) for part in parts) if known else None


def selective_cuts_grids(measurement: Measurement) -> list[Grid]:
    """Three tables a model: the change of outputs, accuracy right after the cut, and later; one row a way."""
    values = ("error", "accuracy", "accuracy_later", "full_accuracy", "full_later")
    needed = ("setting", "seed", "way", "order", "rank", "more", *values)
    measurement.require(
        "selective_cuts", needed=needed, words=("setting", "way", "device"), command=f"{_COMMAND}.selective_cuts"
    )
    tables = []
    for setting in dict.fromkeys(str(row["setting"]) for row in measurement.rows):
        rows = [row for row in measurement.rows if row["setting"] == setting]
        said = f"{setting.capitalize()}: "
        whole, later = (_spread(_once_a_seed(rows, column)) for column in ("full_accuracy", "full_later"))
        tables += [
            _by_way(rows, "error", f"{said}relative change of a layer's output", f"{measurement.repeats} seeds"),
            _by_way(rows, "accuracy", f"{said}test accuracy right after the cut", f"before it {whole}"),
            _by_way(
                rows, "accuracy_later", f"{said}test accuracy {rows[0]['more']} steps later", f"without a cut {later}"
            ),
        ]
    return tables


def _by_way(rows: list[Row], column: str, title: str, caption: str) -> Grid:
    ranks = list(dict.fromkeys(int(row["rank"]) for row in rows))
    seeds = len({row["seed"] for row in rows})
    lines = []
    for way in dict.fromkeys(str(row["way"]) for row in rows):
        cells = [[float(row[column]) for row in rows if row["way"] == way and row["rank"] == rank] for rank in ranks]
        lines.append(
            (way, *(_spread(cell) if len(cell) == seeds else f"refused {seeds - len(cell)}×" for cell in cells))
        )
    return Grid(title, ("way", *(f"{rows[0]['order']} → {rank}" for rank in ranks)), tuple(lines), caption)


def _once_a_seed(rows: Iterable[Row], column: str) -> Iterable[float]:
    return {row["seed"]: float(row[column]) for row in rows}.values()


def _spread(values: Iterable[float]) -> str:
    found = list(values)
    return f"{fmean(found):.3f} ± {stdev(found):.3f}" if len(found) > 1 else f"{found[0]:.3f}"


def _mean(rows: Iterable[Row], column: str) -> float:
    return fmean(float(row[column]) for row in rows)


def _each(rows: Iterable[Row], column: str) -> str:
    return ", ".join(f"{float(row[column]):.1f}" for row in rows)
