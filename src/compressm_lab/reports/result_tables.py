"""Tables of `python -m compressm_lab.experiments.results`."""

from __future__ import annotations

from statistics import fmean, stdev

from compressm_lab.reports.grid import Grid, duration
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.runs.paper import read_paper

_COMMAND = "python -m compressm_lab.experiments.results"
# The cell of the paper's tables that a variant stands beside: table, method, column.
_BESIDE = {
    "sMNIST": {
        "256 states": ("results", "baseline", "τ = 0"),
        "28 states": ("results", "baseline", "τ = 0.02"),
        "13 states": ("results", "baseline", "τ = 0.04"),
        "τ = 0.02": ("results", "CompreSSM", "τ = 0.02"),
        "τ = 0.04": ("results", "CompreSSM", "τ = 0.04"),
        "τ = 0.02, paper's way": ("results", "CompreSSM", "τ = 0.02"),
        "τ = 0.04, paper's way": ("results", "CompreSSM", "τ = 0.04"),
        "gently to 28": ("results", "CompreSSM", "τ = 0.02"),
        "gently to 13": ("results", "CompreSSM", "τ = 0.04"),
        "Σσ penalty, then cut to 28": ("hnn_vs_compressm", "Hankel nuclear norm", "τ = 0.02"),
        "Σσ penalty of 0.0001, then cut to 28": ("hnn_vs_compressm", "Hankel nuclear norm", "τ = 0.02"),
    },
    "CIFAR10": {
        "384 states": ("results", "baseline", "τ = 0"),
        "57 states": ("results", "baseline", "τ = 0.15"),
        "four cuts to 57": ("results", "CompreSSM", "τ = 0.15"),
    },
}
TASKS = {
    "results-smnist": "sMNIST",
    "results-smnist-falling": "sMNIST",
    "results-smnist-choices": "sMNIST",
    "results-smnist-selection": "sMNIST",
    "results-scifar": "CIFAR10",
}
_TOP = 3  # of the seeds are in the paper's means


def in_paper(measurement: Measurement, variant: str) -> tuple[float, float] | None:
    """Final order and accuracy of what the paper has beside a variant: the mean of its three best seeds."""
    task = TASKS[measurement.name]
    if variant not in _BESIDE[task]:
        return None
    label, method, column = _BESIDE[task][variant]
    order = read_paper(label).value(task, "CompreSSM", column, "order")
    accuracy = read_paper(label).value(task, method, column, "accuracy")
    return None if order is None or accuracy is None else (order.centre, accuracy.centre)


def by_variant(measurement: Measurement) -> dict[str, list[Row]]:
    """The rows of every variant, in the order of the file, after a look at their columns."""
    needed = ("variant", "seed", "steps", "initial_order", "order", "best", "last", "steps_s", "seconds", "cuts_s")
    command = f"{_COMMAND} {measurement.name.removeprefix('results-')}"
    measurement.require(measurement.name, needed=(*needed, "step_s"), words=("variant",), command=command)
    groups: dict[str, list[Row]] = {}
    for row in measurement.rows:
        groups.setdefault(str(row["variant"]), []).append(row)
    return groups


def result_grids(measurement: Measurement) -> list[Grid]:
    """One row a variant: accuracy with its spread over seeds, orders, and times in the mean.

    The best three seeds are so by validation; by test only in results that have no validation.
    """
    heads = ("training", "n → r", "seeds", "test accuracy", "best three", "at the end", "the paper")
    lines = tuple(
        (name, *_cells(rows), _paper(measurement, name), *_times(here(measurement, rows)))
        for name, rows in by_variant(measurement).items()
    )
    caption = (
        f"test accuracy in percent where validation was best since the last cut; {measurement.rows[0]['steps']} steps; "
        f"{_together(here(measurement, measurement.rows))}{_elsewhere(measurement)}; best three seeds by validation; "
        "the paper's are its best three"
    )
    return [Grid(measurement.title, (*heads, "gradient steps", "whole run"), lines, caption)]


def here(measurement: Measurement, rows: list[Row]) -> list[Row]:
    """Those trained on the machine of the result, whose times alone compare."""
    machine = measurement.environment.machine
    return [row for row in rows if row.get("machine", machine) == machine]


def _elsewhere(measurement: Measurement) -> str:
    """Which trainings have no part in the times."""
    others = [row for row in measurement.rows if row not in here(measurement, measurement.rows)]
    named = ", ".join(f"{row['variant']} with seed {row['seed']} on {row['machine']}" for row in others)
    return f", without those of {named}" if named else ""


def _paper(measurement: Measurement, variant: str) -> str:
    found = in_paper(measurement, variant)
    return "" if found is None else f"{found[1]:.1f} at {found[0]:.0f}"


def _together(rows: list[Row]) -> str:
    """How far times can be compared."""
    most = max((int(row.get("together", 0)) for row in rows), default=0)
    if not all("together" in row for row in rows):
        return "how many trainings ran at a time is not known of all, and times are of that"
    if most == 1:
        return "one training at a time"
    return f"up to {most} trainings at a time on one device, which is what their times are of"


def _cells(rows: list[Row]) -> tuple[str, ...]:
    orders = [float(row["order"]) for row in rows]
    start = fmean(float(row["initial_order"]) for row in rows)
    top = sorted(rows, key=lambda row: float(row.get("validation", row["best"])), reverse=True)[:_TOP]
    three = f"{fmean(float(row['best']) for row in top):.1f}" if len(top) == _TOP else ""
    best, last = _values(rows, "best"), _values(rows, "last")
    return f"{start:.0f} → {_spread(orders)}", str(len(rows)), best, three, last


def _times(rows: list[Row]) -> tuple[str, ...]:
    """In the mean; empty where all of them were trained elsewhere."""
    columns = ("steps_s", "seconds")
    return tuple(duration(fmean(float(row[column]) for row in rows)) if rows else "" for column in columns)


def _values(rows: list[Row], column: str) -> str:
    return _spread([float(row[column]) for row in rows], digits=1)


def _spread(values: list[float], digits: int = 0) -> str:
    """mean ± standard deviation, where seeds differ."""
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(set(values)) == 1 else f"{mean} ± {stdev(values):.1f}"
