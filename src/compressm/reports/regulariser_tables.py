"""What a penalty costs beside a step, `compressm bench regulariser`."""

from __future__ import annotations

from compressm.reports.grid import Grid, duration
from compressm.runs.measurement import Measurement, Row

_NEEDED = ("task", "layers", "order", "max_phase", "every", "step_s", "norm_s", "majoriser_s", "ratio", "ratio_every")
_WORDS = ("task", "device")
# What some measurements have beside Σσ: the paper's way, and Σσ without a CUDA graph.
_BESIDE = {"autograd_s": "by autograd", "norm_launched_s": "without a graph"}


def regulariser_grids(measurement: Measurement) -> list[Grid]:
    """One row a model; steps with the penalty over steps without, found at each of them or at one of `every`."""
    measurement.require("regulariser", needed=_NEEDED, words=_WORDS)
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
