"""Tables of what `compressm bench` measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from compressm_lab.reports.grid import NOTHING, Grid, amount, column, duration
from compressm_lab.runs.groups import grouped
from compressm_lab.runs.measurement import Measurement, MeasurementError, Row


def _several(count: float | str) -> str:
    return f"{count} × " if count != 1 else ""


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
    "step between cuts": ("between_s",),
}
_CUT_COLUMNS = tuple(column for columns in _STAGES.values() for column in columns if column != "between_s")
_CUT_WORDS = ("task", "precision", "gramian", "moments", "ranks", "device", "run")
_MODEL = ("layers", "order", "rank", "width")
_CUT_CAPTION = (
    "medians of warm cuts, in brackets the first cut of a process; on a GPU the first step is recorded anew;"
    " `Compressor.step` between cuts is called every step"
)


def cut_grids(measurement: Measurement) -> list[Grid]:
    """Times of one cut: a table a model, a row a stage, a column for every choice of P and moments."""
    measurement.require("cut", needed=(*_MODEL, *_CUT_WORDS, *_CUT_COLUMNS), words=(*_CUT_WORDS, "layer"))
    title = "One cut: {layers} layer(s) of {width} channels, {order} → {rank} states"
    models = grouped(
        measurement.rows, lambda row: title.format(**row) + (f", {row['layer']}" if "layer" in row else "")
    )
    return [_cut_grid(title, rows) for title, rows in models.items()]


def _cut_grid(title: str, rows: list[Row]) -> Grid:
    variants: dict[str, dict[str, Row]] = {}
    for row in rows:
        name = str(row["moments"]) + (", measured P" if row["gramian"] == "measured" else "")
        name += ", unequal" if row["ranks"] == "unequal" else ""
        variants.setdefault(name, {})[str(row["run"])] = row
    used = [
        stage for stage, names in _STAGES.items() if any(float(row.get(name, 0)) > 0 for row in rows for name in names)
    ]
    cells = tuple((stage, *(_cut_cell(stage, runs) for runs in variants.values())) for stage in used)
    return Grid(title, ("stage", *variants), cells, _CUT_CAPTION)


def _cut_cell(stage: str, runs: dict[str, Row]) -> str:
    times = {run: sum(float(row.get(name, 0)) for name in _STAGES[stage]) for run, row in runs.items()}
    if not any(times.values()):
        return ""
    cold = f" ({duration(times['cold'])})" if "cold" in times else ""
    return (duration(times["warm"]) if "warm" in times else "") + cold


_REDUCTION_NEEDED = ("order", "rank", "width", "members", "system", "device", "hankel_s", "reduction_s")
_COMPARED = ("plain_hankel_s", "plain_reduction_s", "speedup")


def require_reduction(measurement: Measurement) -> None:
    """Refuse rows without the columns of a reduction, or with some of those of the plain formulas but not all."""
    measurement.require(
        "reduction",
        needed=lambda row: (*_REDUCTION_NEEDED, *(_COMPARED if "plain_reduction_s" in row else ())),
        words=("system", "device"),
    )


def reduction_grids(measurement: Measurement) -> list[Grid]:
    """Times of one reduction, a row a size, beside the plain formulas where all rows were compared with them."""
    require_reduction(measurement)
    columns = [
        ("n → r", lambda row: f"{_several(row['members'])}{row['order']} → {row['rank']}"),
        column("channels", "width"),
        column("system"),
        column("σ alone", "hankel_s", duration),
        column("whole reduction", "reduction_s", duration),
    ]
    if all("plain_reduction_s" in row for row in measurement.rows):
        columns += [
            column("σ, plain formulas", "plain_hankel_s", duration),
            column("whole, plain formulas", "plain_reduction_s", duration),
            column("ratio", "speedup", lambda ratio: f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2g}"),
        ]
    return [Grid.of("One reduction", measurement.rows, columns, "median")]


def regulariser_grids(measurement: Measurement) -> list[Grid]:
    """Times of a penalty, a row a model, and of steps with it, found at each of them or at one of `every`."""
    times = ("step_s", "norm_s", "majoriser_s", "ratio", "ratio_every")
    needed = ("task", "layers", "order", "max_phase", "every", *times)
    measurement.require("regulariser", needed=needed, words=("task", "device"))
    # Some measurements have these beside Σσ: the paper's way, and Σσ without a CUDA graph.
    beside = {"autograd_s": "by autograd", "norm_launched_s": "without a graph"}
    columns = [
        column("task"),
        ("n", lambda row: f"{_several(row['layers'])}{row['order']}"),
        column("phases", "max_phase", "{:.3g}".format),
        column("step", "step_s", duration),
        column("Σσ", "norm_s", duration),
        *(
            column(head, name, duration)
            for name, head in beside.items()
            if all(name in row for row in measurement.rows)
        ),
        column("majoriser", "majoriser_s", duration),
        column("with Σσ", "ratio", "{:.2f}×".format),
        column(f"every {measurement.rows[0]['every']}", "ratio_every", "{:.2f}×".format),
    ]
    caption = "median, of value and gradient; on the right steps with the penalty over steps without"
    return [Grid.of("A penalty on Hankel singular values", measurement.rows, columns, caption)]


def scan_grids(measurement: Measurement) -> list[Grid]:
    """Times of a layer, a row a shape, a column a path."""
    needed = ("batch", "length", "order", "width", "chosen")
    measurement.require("scan", needed=needed, words=("chosen", "device"))
    paths = dict.fromkeys(name for row in measurement.rows for name in row if name.endswith("_s"))
    shape = [column("batch"), column("length"), column("n", "order"), column("H", "width")]
    times = [column(path.removesuffix("_s"), path, duration) for path in paths]
    columns = [*shape, *times, column("chosen", show=str.lower)]
    return [Grid.of("One layer, forward and backward", measurement.rows, columns, "median, by every path")]


def peer_grids(measurement: Measurement) -> list[Grid]:
    """Times and errors of scans of other libraries, a table a shape and precision; where one did not run, why."""
    needed = ("peer", "precision", "batch", "length", "order")
    measurement.require("peers", needed=needed, words=("peer", "precision", "device", "timed", "note"))
    title = "h[t] = λ h[t−1] + x[t]: batch {batch}, length {length}, n = {order}, {precision}"
    columns = [
        column("scan", "peer"),
        column("forward", "forward_s", duration),
        column("both", "both_s", duration),
        column("error", "error", "{:.0e}".format),
        column("gradient", "gradient_error", "{:.0e}".format),
        column("note"),
    ]
    caption = "median; both: with backward; errors against a loop in float64"
    tables = grouped(measurement.rows, lambda row: title.format(**row))
    return [Grid.of(title, rows, columns, caption) for title, rows in tables.items()]


def selective_grids(measurement: Measurement) -> list[Grid]:
    """Times of the selective scan, a row an order."""
    needed = ("batch", "length", "channels", "order", "precision", "forward_s", "both_s")
    measurement.require("selective", needed=needed, words=("precision", "device"))
    title = "Selective scan: batch {batch}, length {length}, {channels} channels, {precision}"
    columns = [
        column("n", "order"),
        column("forward", "forward_s", duration),
        column("least", "floor_forward_s", duration),
        column("both", "both_s", duration),
        column("least of both", "floor_both_s", duration),
    ]
    tables = grouped(measurement.rows, lambda row: title.format(**row))
    grids = (Grid.of(title, rows, columns, "median; both: with backward") for title, rows in tables.items())
    return [grid.without_empty("least", "least of both") for grid in grids]


def stream_grids(measurement: Measurement) -> list[Grid]:
    """Times of a token, a row a model: by `step`, by a stream, and on a GPU by one without a recorded graph."""
    needed = ("layer", "order", "batch", "depth", "width", "precision", "step_s", "stream_s")
    measurement.require("stream", needed=needed, words=("layer", "precision", "device"))
    columns = [
        *(column("layer"), column("n", "order"), column("batch"), column("H", "width"), column("precision")),
        column("eager step", "step_s", duration),
        column("Stream, no graph", "unrecorded_s", duration),
        column("Stream", "stream_s", duration),
        ("faster", lambda row: f"{float(row['step_s']) / float(row['stream_s']):.1f}×"),
    ]
    grid = Grid.of("A token of a language model", measurement.rows, columns, "median; depth 4, 256 tokens")
    return [grid.without_empty("Stream, no graph")]


def export_grids(measurement: Measurement) -> list[Grid]:
    """Times of a step before and after a cut, a column a runtime; and the differences of all files."""
    words = ("layer", "model", "what", "precision", "kind", "cut", "orders", "runtime", "reason")
    measurement.require("export", needed=set(words) - {"reason"}, words=words)
    timed = [row for row in measurement.rows if "step_s" in row]
    times = grouped(timed, lambda row: (row["layer"], row["model"], row["width"]))
    files = [row for row in measurement.rows if "difference" in row or "reason" in row]
    heads = grouped(files, lambda row: (row["what"], row["layer"], row["model"], row["precision"], row["kind"]))
    grids = []
    if times:
        columns: list[Any] = [(head, partial(_said, head)) for head in ("layer", "model")]
        columns += [("orders", _cut_orders)]
        columns += [(name, partial(_cut_times, name)) for name in dict.fromkeys(str(row["runtime"]) for row in timed)]
        caption = "median of one step of one sequence on one thread, before → after the cut"
        grids.append(Grid.of("A streamed step", times.values(), columns, caption))
    columns = [(head, partial(_said, head)) for head in ("what", "layer", "model", "precision")]
    columns += [("orders", _cut_orders)]
    columns += [(name, partial(_worst, name)) for name in dict.fromkeys(str(row["runtime"]) for row in files)]
    caption = "the larger of the relative differences before and after the cut; no: the runtime refuses, see the file"
    return [*grids, Grid.of("Differences of exported files", heads.values(), columns, caption)]


def _said(head: str, rows: Sequence[Row]) -> str:
    return str(rows[0][head])


def _cut_orders(rows: Sequence[Row]) -> str:
    before, after = (
        next(str(row["orders"]).split() for row in rows if row["cut"] == cut) for cut in ("before", "after")
    )
    return " → ".join(one[0] if len(set(one)) == 1 else ", ".join(one) for one in (before, after))


def _cut_times(runtime: str, rows: Sequence[Row]) -> str:
    found = {str(row["cut"]): float(row["step_s"]) for row in rows if row["runtime"] == runtime}
    if len(found) < 2:
        return NOTHING
    return f"{1e6 * found['before']:.0f} → {1e6 * found['after']:.0f} µs, {found['before'] / found['after']:.1f}×"


def _worst(runtime: str, rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["runtime"] == runtime]
    if any("reason" in row for row in found):
        return "no"
    return f"{max(float(row['difference']) for row in found):.0e}" if found else NOTHING


def step_grids(measurement: Measurement) -> list[Grid]:
    """Times of a training step, a row a model; floor, launches and memory show where some row has them."""
    words = ("task", "precision", "path", "device", "states")
    measurement.require("step", needed=("task", "order", "precision", "step_s"), words=words)
    columns = [
        *(column("task"), column("n", "order"), column("precision")),
        column("step", "step_s", duration),
        column("floor", "floor_s", duration),
        ("launches", _launches),
        column("memory", "peak_bytes", amount),
    ]
    caption = (
        "median; floor: flops and bytes over measured ceilings; launches: all kernels, each as long as an empty one"
    )
    grid = Grid.of("One training step", measurement.rows, columns, caption)
    return [grid.without_empty("floor", "launches", "memory")]


def _launches(row: Row) -> str:
    known = "kernels" in row and "launch_s" in row
    return duration(float(row["kernels"]) * float(row["launch_s"])) if known else ""


AXES = {"order": "n", "length": "L", "width": "H"}


def loop_grids(measurement: Measurement) -> list[Grid]:
    """Times of a step in every way, a row a model."""
    words = ("model", "precision", "way", "device")
    measurement.require("loop", needed=(*words, "order"), words=(*words, "note"))
    ways = list(dict.fromkeys(str(row["way"]) for row in measurement.rows))
    models = grouped(measurement.rows, lambda row: (row["model"], row["order"], row["precision"]))
    cells = [tuple(map(str, model)) + tuple(_step_cell(rows, way) for way in ways) for model, rows in models.items()]
    notes = dict.fromkeys(
        f"{row['model']}, {row['way']}: {row['note']}" for row in measurement.rows if "note" in row and not _full(row)
    )
    longest: dict[str, float] = {}
    for row in measurement.rows:
        if str(row["way"]).endswith(("compiled", "reduce_overhead")) and "first_s" in row:
            longest[str(row["way"])] = max(float(row["first_s"]), longest.get(str(row["way"]), 0.0))
    notes |= dict.fromkeys(f"first step of {way}: at most {duration(time)}" for way, time in longest.items())
    return [
        Grid("A training step in a user's own loop", ("model", "n", "precision", *ways), tuple(cells), "; ".join(notes))
    ]


def _full(row: Row) -> bool:
    """Tell if a way needed more memory than there is."""
    return str(row.get("note", "")).startswith("OutOfMemoryError")


def _step_cell(rows: list[Row], way: str) -> str:
    (row, *_) = [row for row in rows if row["way"] == way] or [{}]
    return "out of memory" if _full(row) else duration(float(row["step_s"])) if "step_s" in row else NOTHING


def growth_axes(measurement: Measurement) -> dict[str, dict[str, dict[int, Row]]]:
    """The rows of every axis that was measured, by precision, then by size; an unknown axis is refused."""
    needed = ("axis", "order", "length", "width", "depth", "batch", "precision", "device", "step_s", "floor_s")
    measurement.require("growth", needed=needed, words=("axis", "precision", "device", "states"))
    found: dict[str, dict[str, dict[int, Row]]] = {axis: {} for axis in AXES}
    for k, row in enumerate(measurement.rows):
        axis = str(row["axis"])
        if axis not in AXES:
            raise MeasurementError(f"row {k} has {axis!r} as axis, expected one of {', '.join(AXES)}")
        found[axis].setdefault(str(row["precision"]), {})[int(row[axis])] = row
    return {axis: rows for axis, rows in found.items() if rows}


def middle_point(measurement: Measurement, axis: str) -> str:
    """The sizes that stay the same along an axis."""
    row = next(row for row in measurement.rows if row["axis"] == axis)
    others = ", ".join(f"{letter} = {row[name]}" for name, letter in AXES.items() if name != axis)
    return f"{row['depth']} blocks, batch {row['batch']}, {others}"


def growth_grids(measurement: Measurement) -> list[Grid]:
    """Times of a training step against its size: a table an axis, with the floor in every precision."""
    grids = []
    for axis, rows in growth_axes(measurement).items():
        sizes = sorted({size for found in rows.values() for size in found})
        heads = (AXES[axis], *(head for precision in rows for head in (precision, "floor")))
        columns = [(found, column) for found in rows.values() for column in ("step_s", "floor_s")]
        cells = tuple(
            (str(size), *(duration(float(found[size][column])) if size in found else "" for found, column in columns))
            for size in sizes
        )
        caption = f"median; {middle_point(measurement, axis)}"
        grids.append(Grid(f"One training step against the {axis}", heads, cells, caption))
    return grids


PARTS = {"training": "steps", "evaluation": "evaluations", "cuts": "cuts", "recaptures": "recordings"}
COSTS = {"gradient step": "train_s", "evaluation": "evaluate_s", "cut from n": "cut_s", "recording anew": "recapture_s"}
_SPEEDUP_NEEDED = {
    "costs": ("order", *COSTS.values()),
    "schedule": ("steps", "orders", "whole_s", "speedup", *(f"{part}_s" for part in PARTS)),
}


def speedup_rows(measurement: Measurement) -> tuple[list[Row], list[Row]]:
    """Costs by rising order, and the schedules that were predicted; rows without their columns are refused."""
    measurement.require(
        "speedup",
        needed=lambda row: ("what", "recipe", "device", *_SPEEDUP_NEEDED.get(str(row.get("what")), ())),
        words=("what", "recipe", "device", "orders"),
    )
    costs, schedules = ([row for row in measurement.rows if row["what"] == what] for what in _SPEEDUP_NEEDED)
    if not costs:
        raise MeasurementError("not a result of `compressm bench speedup`: no row has costs")
    return sorted(costs, key=lambda row: float(row["order"])), schedules


def speedup_grids(measurement: Measurement) -> list[Grid]:
    """Costs by order, and what schedules of cuts save: a table each."""
    costs, schedules = speedup_rows(measurement)
    columns = [column("n", "order", "{:g}".format), *(column(head, name, duration) for head, name in COSTS.items())]
    recipe = str(measurement.rows[0]["recipe"])
    caption = "medians; an evaluation is of validation and test"
    table = Grid.of(f"{recipe}: costs by order", costs, columns, caption)
    return [table, *(_schedule(row, recipe) for row in schedules)]


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
    "loop": loop_grids,
    "speedup": speedup_grids,
    "scan": scan_grids,
    "stream": stream_grids,
    "export": export_grids,
    "peers": peer_grids,
    "selective": selective_grids,
}
