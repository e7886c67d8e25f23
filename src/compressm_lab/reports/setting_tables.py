"""The table of `python -m compressm_lab.experiments.smnist_settings`."""

from __future__ import annotations

from statistics import mean

from compressm_lab.reports.grid import Grid
from compressm_lab.runs.measurement import Measurement, Row

# The paper's own code without reduction, seed 42: mean of its test accuracies at steps 35 000 and 40 000.
REFERENCE = {256: 93.35, 28: 89.5}


def setting_grids(measurement: Measurement) -> list[Grid]:
    """One row a variant and order, the mean over seeds of the last two evaluations."""
    needed = ("variant", "order", "seed", "steps", "before", "last", "seconds")
    measurement.require(
        "smnist_settings",
        needed=needed,
        words=("variant",),
        command="python -m compressm_lab.experiments.smnist_settings",
    )
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in measurement.rows:
        groups.setdefault((str(row["variant"]), int(row["order"])), []).append(row)
    heads = ("what differs", "n", "each seed", "mean", "the paper's own code")
    lines = []
    for (variant, order), rows in groups.items():
        values = [(float(row["before"]) + float(row["last"])) / 2 for row in rows]
        reference = f"{REFERENCE[order]:.1f}" if order in REFERENCE else ""
        lines.append((variant, str(order), ", ".join(f"{v:.1f}" for v in values), f"{mean(values):.1f}", reference))
    steps = int(measurement.rows[0]["steps"])
    caption = f"test accuracy in percent, mean of the evaluations at {steps * 7 // 8} and {steps} steps"
    return [Grid("sMNIST without compression", heads, tuple(lines), caption)]
