"""Tables of what `compressm bench` measured."""

from __future__ import annotations

from collections.abc import Callable

from compressm_lab.reports.grid import NOTHING, Grid, amount, duration, grouped
from compressm_lab.runs.measurement import Measurement, MeasurementError, Row

# Head, and the columns of which it is the sum.
_STAGES = {
    "read": ("read_s",),
    "calibrate": ("calibrate_s",),
    "spectrum": ("spectra_s",),
    "balance, cut": ("reduce_s",),
    "encode, write": ("encode_s", "write_s"),
    "moments": ("optimizer_s",),
    "first step": ("first_step_s",),
    "all": ("total_s",),
}
_CUT_COLUMNS = tuple(column for columns in _STAGES.values() for column in columns)
_CUT_WORDS = ("task", "precision", "gramian", "moments", "ranks", "device", "run")
_MODEL = ("layers", "order", "rank", "width")
_CUT_CAPTION = "medians of warm cuts, in brackets the first cut of a process; on a GPU the first step is recorded anew"


def cut_grids(measurement: Measurement) -> list[Grid]:
    """One table a model: a row a stage, a column for every choice of P and moments."""
    measurement.require("cut", needed=(*_MODEL, *_CUT_WORDS, *_CUT_COLUMNS), words=_CUT_WORDS)
    models = grouped(measurement.rows, lambda row: tuple(row[name] for name in _MODEL))
    return [_cut_grid(rows) for rows in models.values()]


def _cut_grid(rows: list[Row]) -> Grid:
    variants: dict[str, dict[str, Row]] = {}
    for row in rows:
        name = str(row["moments"]) + (", measured P" if row["gramian"] == "measured" else "")
        name += ", unequal" if row["ranks"] == "unequal" else ""
        variants.setdefault(name, {})[str(row["run"])] = row
    used = [stage for stage, names in _STAGES.items() if any(float(row[name]) > 0 for row in rows for name in names)]
    cells = tuple((stage, *(_cut_cell(stage, runs) for runs in variants.values())) for stage in used)
    layers, order, rank, width = (rows[0][name] for name in _MODEL)
    title = f"One cut: {layers} layer(s) of {width} channels, {order} → {rank} states"
    return Grid(title, ("stage", *variants), cells, _CUT_CAPTION)


def _cut_cell(stage: str, runs: dict[str, Row]) -> str:
    times = {run: sum(float(row[name]) for name in _STAGES[stage]) for run, row in runs.items()}
    if not any(times.values()):
        return ""
    cold = f" ({duration(times['cold'])})" if "cold" in times else ""
    return (duration(times["warm"]) if "warm" in times else "") + cold


_REDUCTION_NEEDED = ("order", "rank", "width", "members", "system", "device", "hankel_s", "reduction_s")
_COMPARED = ("plain_hankel_s", "plain_reduction_s", "speedup")


def require_reduction(measurement: Measurement) -> None:
    """The columns that tables and pictures of a reduction read; more where it was compared with the plain formulas."""
    measurement.require("reduction", needed=_REDUCTION_NEEDED, words=("system", "device"))
    for k, row in enumerate(measurement.rows):
        missing = [column for column in _COMPARED if column not in row]
        if missing and "plain_reduction_s" in row:
            raise MeasurementError(f"not a result of `compressm bench reduction`: row {k} lacks {', '.join(missing)}")


def reduction_grids(measurement: Measurement) -> list[Grid]:
    """One row a size."""
    require_reduction(measurement)
    compared = all("plain_reduction_s" in row for row in measurement.rows)
    heads = ["n → r", "channels", "system", "σ alone", "whole reduction"]
    heads += ["σ, plain formulas", "whole, plain formulas", "ratio"] if compared else []
    columns = ["hankel_s", "reduction_s", *(["plain_hankel_s", "plain_reduction_s"] if compared else [])]
    rows = []
    for row in measurement.rows:
        several = f"{row['members']} × " if row["members"] != 1 else ""
        cells = [f"{several}{row['order']} → {row['rank']}", str(row["width"]), str(row["system"])]
        cells += [duration(float(row[column])) for column in columns]
        rows.append((*cells, _ratio(float(row["speedup"]))) if compared else tuple(cells))
    return [Grid("One reduction", tuple(heads), tuple(rows), "median")]


def _ratio(value: float) -> str:
    """One digit after the point, or two that say how small it is."""
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


_PENALTY_NEEDED = (
    "task",
    "layers",
    "order",
    "max_phase",
    "every",
    "step_s",
    "norm_s",
    "majoriser_s",
    "ratio",
    "ratio_every",
)
_PENALTY_WORDS = ("task", "device")
# What some measurements have beside Σσ: the paper's way, and Σσ without a CUDA graph.
_BESIDE = {"autograd_s": "by autograd", "norm_launched_s": "without a graph"}


def regulariser_grids(measurement: Measurement) -> list[Grid]:
    """One row a model; steps with the penalty over steps without, found at each of them or at one of `every`."""
    measurement.require("regulariser", needed=_PENALTY_NEEDED, words=_PENALTY_WORDS)
    beside = [name for name in _BESIDE if all(name in row for row in measurement.rows)]
    every = measurement.rows[0]["every"]
    heads = ["task", "n", "phases", "step", "Σσ", *(_BESIDE[name] for name in beside), "majoriser"]
    heads += ["with Σσ", f"every {every}"]
    rows = tuple(_cells(row, beside) for row in measurement.rows)
    return [
        Grid(
            "A penalty on Hankel singular values",
            tuple(heads),
            rows,
            "median, of value and gradient; on the right steps with the penalty over steps without",
        )
    ]


def _cells(row: Row, beside: list[str]) -> tuple[str, ...]:
    columns = ("step_s", "norm_s", *beside, "majoriser_s")
    several = f"{row['layers']} × " if row["layers"] != 1 else ""
    return (
        str(row["task"]),
        f"{several}{row['order']}",
        f"{float(row['max_phase']):.3g}",
        *(duration(float(row[column])) for column in columns),
        f"{float(row['ratio']):.2f}×",
        f"{float(row['ratio_every']):.2f}×",
    )


def scan_grids(measurement: Measurement) -> list[Grid]:
    """One row a shape, one column a path."""
    needed = ("batch", "length", "order", "width", "chosen")
    measurement.require("scan", needed=needed, words=("chosen", "device"))
    paths = list(dict.fromkeys(name for row in measurement.rows for name in row if name.endswith("_s")))
    rows = tuple(
        (
            *(str(row[name]) for name in ("batch", "length", "order", "width")),
            *(_scan_cell(row, path) for path in paths),
            str(row["chosen"]).lower(),
        )
        for row in measurement.rows
    )
    heads = ("batch", "length", "n", "H", *(path.removesuffix("_s") for path in paths), "chosen")
    return [Grid("One layer, forward and backward", heads, rows, "median, by every path")]


def peer_grids(measurement: Measurement) -> list[Grid]:
    """One table a shape and precision, one row a peer; where a peer did not run, why."""
    needed = ("peer", "precision", "batch", "length", "order")
    measurement.require("peers", needed=needed, words=("peer", "precision", "device", "timed", "note"))
    title = "batch {batch}, length {length}, n = {order}, {precision}"
    tables = grouped(measurement.rows, lambda row: title.format(**row))
    return [_peer_grid(title, rows) for title, rows in tables.items()]


def selective_grids(measurement: Measurement) -> list[Grid]:
    """One row an order."""
    needed = ("batch", "length", "channels", "order", "precision", "forward_s", "both_s")
    measurement.require("selective", needed=needed, words=("precision", "device"))
    said = "batch {batch}, length {length}, {channels} channels, {precision}"
    tables = grouped(measurement.rows, lambda row: said.format(**row))
    columns = {"forward": "forward_s", "least": "floor_forward_s", "both": "both_s", "least of both": "floor_both_s"}
    grids = []
    for title, rows in tables.items():
        shown = {head: column for head, column in columns.items() if any(column in row for row in rows)}
        cells = tuple((str(row["order"]), *(_scan_cell(row, column) for column in shown.values())) for row in rows)
        grids.append(Grid(f"Selective scan: {title}", ("n", *shown), cells, "median; both: with backward"))
    return grids


def _peer_grid(title: str, rows: list[Row]) -> Grid:
    cells = tuple(
        (
            str(row["peer"]),
            _scan_cell(row, "forward_s"),
            _scan_cell(row, "both_s"),
            *(f"{float(row[name]):.0e}" if name in row else "" for name in ("error", "gradient_error")),
            str(row.get("note", "")),
        )
        for row in rows
    )
    heads = ("scan", "forward", "both", "error", "gradient", "note")
    return Grid(
        f"h[t] = λ h[t−1] + x[t]: {title}",
        heads,
        cells,
        "median; both: with backward; errors against a loop in float64",
    )


def _scan_cell(row: Row, column: str) -> str:
    return duration(float(row[column])) if column in row else ""


AXES = {"order": "n", "length": "L", "width": "H"}
_STEP_WORDS = ("task", "precision", "path", "device", "states")
_STEP_CAPTION = (
    "median; floor: flops and bytes over measured ceilings; launches: all kernels, each as long as an empty one"
)
_GROWTH_WORDS = ("axis", "precision", "device", "states")

# Head, the columns it needs, and its text. A column shows where some row has what it needs.
_Column = tuple[str, tuple[str, ...], Callable[[Row], str]]
_STEP_COLUMNS: tuple[_Column, ...] = (
    ("floor", ("floor_s",), lambda row: duration(float(row["floor_s"]))),
    ("launches", ("kernels", "launch_s"), lambda row: duration(float(row["kernels"]) * float(row["launch_s"]))),
    ("memory", ("peak_bytes",), lambda row: amount(float(row["peak_bytes"]))),
)


def step_grids(measurement: Measurement) -> list[Grid]:
    """One row a model."""
    measurement.require("step", needed=("task", "order", "precision", "step_s"), words=_STEP_WORDS)
    shown = [column for column in _STEP_COLUMNS if any(_has(row, column[1]) for row in measurement.rows)]
    rows = tuple(
        (
            *(str(row[name]) for name in ("task", "order", "precision")),
            duration(float(row["step_s"])),
            *(text(row) if _has(row, needed) else "" for _, needed, text in shown),
        )
        for row in measurement.rows
    )
    heads = ("task", "n", "precision", "step", *(head for head, _, _ in shown))
    return [Grid("One training step", heads, rows, _STEP_CAPTION)]


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


_SPEEDUP_WORDS = ("what", "recipe", "device", "orders")
PARTS = {"training": "steps", "evaluation": "evaluations", "cuts": "cuts", "recaptures": "recordings"}
_COSTS = ("order", "train_s", "evaluate_s", "cut_s", "recapture_s")
_PREDICTED = ("steps", "orders", "whole_s", "speedup", *(f"{part}_s" for part in PARTS))


def require_speedup(measurement: Measurement) -> None:
    """A result of `compressm bench speedup`, with costs in it."""
    measurement.require("speedup", needed=("what", "recipe", "device"), words=_SPEEDUP_WORDS)
    for k, row in enumerate(measurement.rows):
        needed = _COSTS if row["what"] == "costs" else _PREDICTED
        if missing := [column for column in needed if column not in row]:
            raise MeasurementError(f"not a result of `compressm bench speedup`: row {k} lacks {', '.join(missing)}")
    if not cost_rows(measurement):
        raise MeasurementError("not a result of `compressm bench speedup`: no row has costs")


def cost_rows(measurement: Measurement) -> list[Row]:
    """By order, rising."""
    return sorted((row for row in measurement.rows if row["what"] == "costs"), key=lambda row: float(row["order"]))


def schedule_rows(measurement: Measurement) -> list[Row]:
    """Those that were predicted, the last of them checked."""
    return [row for row in measurement.rows if row["what"] == "schedule"]


def speedup_grids(measurement: Measurement) -> list[Grid]:
    """One table of costs, one of schedules."""
    require_speedup(measurement)
    heads = ("n", "gradient step", "evaluation", "cut from n", "recording anew")
    rows = tuple(
        (f"{float(row['order']):g}", *(duration(float(row[column])) for column in _COSTS[1:]))
        for row in cost_rows(measurement)
    )
    recipe = str(measurement.rows[0]["recipe"])
    costs = Grid(f"{recipe}: costs by order", heads, rows, "medians; an evaluation is of validation and test")
    return [costs, *(_schedule(row, recipe) for row in schedule_rows(measurement))]


def _schedule(row: Row, recipe: str) -> Grid:
    """A row a part of the training: as predicted and, where it was checked, as measured."""
    measured = _times(row, "measured_") if "measured_speedup" in row else [NOTHING] * (3 + len(PARTS))
    parts = ("never cut", "cut", *(f"of it {name}" for name in PARTS.values()), "speed-up")
    rows = tuple(zip(parts, _times(row, ""), measured, strict=True))
    caption = "whole trainings, checkpoints left out; predicted by the formula of app:time"
    return Grid(f"{recipe}, {row['steps']} steps, n = {row['orders']}", ("", "predicted", "measured"), rows, caption)


def _times(row: Row, prefix: str) -> list[str]:
    parts = [float(row[f"{prefix}{part}_s"]) for part in PARTS]
    times = [float(row[f"{prefix}whole_s"]), sum(parts), *parts]
    return [*map(duration, times), f"{float(row[f'{prefix}speedup']):.2f} ×"]


GRIDS: dict[str, Callable[[Measurement], list[Grid]]] = {
    "reduction": reduction_grids,
    "cut": cut_grids,
    "regulariser": regulariser_grids,
    "step": step_grids,
    "growth": growth_grids,
    "speedup": speedup_grids,
    "scan": scan_grids,
    "peers": peer_grids,
    "selective": selective_grids,
}
