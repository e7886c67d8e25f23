"""Training steps beside their floors, `compressm bench step`, and how they grow, `compressm bench growth`."""

from __future__ import annotations

from collections.abc import Callable

from compressm.reports.grid import Grid, amount, duration
from compressm.runs.measurement import Measurement, MeasurementError, Row

AXES = {"order": "n", "length": "L", "width": "H"}
_STEP_WORDS = ("task", "precision", "path", "device", "states")
_CAPTION = "median; floor: flops and bytes over measured ceilings; launches: all kernels, each as long as an empty one"
_GROWTH_WORDS = ("axis", "precision", "device", "states")

# Head, the columns it needs, and its text. A column shows where some row has what it needs.
_Column = tuple[str, tuple[str, ...], Callable[[Row], str]]
_COLUMNS: tuple[_Column, ...] = (
    ("floor", ("floor_s",), lambda row: duration(float(row["floor_s"]))),
    ("launches", ("kernels", "launch_s"), lambda row: duration(float(row["kernels"]) * float(row["launch_s"]))),
    ("memory", ("peak_bytes",), lambda row: amount(float(row["peak_bytes"]))),
)


def step_grids(measurement: Measurement) -> list[Grid]:
    """One row a model."""
    measurement.require("step", needed=("task", "order", "precision", "step_s"), words=_STEP_WORDS)
    shown = [column for column in _COLUMNS if any(_has(row, column[1]) for row in measurement.rows)]
    rows = tuple(
        (
            *(str(row[name]) for name in ("task", "order", "precision")),
            duration(float(row["step_s"])),
            *(text(row) if _has(row, needed) else "" for _, needed, text in shown),
        )
        for row in measurement.rows
    )
    heads = ("task", "n", "precision", "step", *(head for head, _, _ in shown))
    return [Grid("One training step", heads, rows, _CAPTION)]


def growth_grids(measurement: Measurement) -> list[Grid]:
    """One table an axis, with a step and its floor in every precision."""
    require_growth(measurement)
    return [_growth_grid(measurement, axis) for axis in AXES if any(row["axis"] == axis for row in measurement.rows)]


def require_growth(measurement: Measurement) -> None:
    """The columns that tables and pictures of growth read."""
    needed = ("axis", "order", "length", "width", "depth", "batch", "precision", "device", "step_s", "floor_s")
    measurement.require("growth", needed=needed, words=_GROWTH_WORDS)
    for k, row in enumerate(measurement.rows):
        if row["axis"] not in AXES:
            raise MeasurementError(f"row {k} has {row['axis']!r} as axis, expected one of {', '.join(AXES)}")


def growth_rows(measurement: Measurement, axis: str) -> dict[str, dict[int, Row]]:
    """Of one axis: the rows by precision, then by size."""
    found: dict[str, dict[int, Row]] = {}
    for row in measurement.rows:
        if row["axis"] == axis:
            found.setdefault(str(row["precision"]), {})[int(row[axis])] = row
    return found


def middle_point(measurement: Measurement, axis: str) -> str:
    """What stays the same along an axis."""
    row = next(row for row in measurement.rows if row["axis"] == axis)
    others = ", ".join(f"{letter} = {row[name]}" for name, letter in AXES.items() if name != axis)
    return f"{row['depth']} blocks, batch {row['batch']}, {others}"


def _growth_grid(measurement: Measurement, axis: str) -> Grid:
    rows = growth_rows(measurement, axis)
    sizes = sorted({size for found in rows.values() for size in found})
    heads = (AXES[axis], *(head for precision in rows for head in (precision, "floor")))
    cells = tuple((str(size), *(cell for found in rows.values() for cell in _pair(found.get(size)))) for size in sizes)
    return Grid(f"One training step against the {axis}", heads, cells, f"median; {middle_point(measurement, axis)}")


def _pair(row: Row | None) -> tuple[str, str]:
    return ("", "") if row is None else (duration(float(row["step_s"])), duration(float(row["floor_s"])))


def _has(row: Row, columns: tuple[str, ...]) -> bool:
    return all(column in row for column in columns)
