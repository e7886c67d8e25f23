"""The table of `compressm demo`, and what it says."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean, stdev

from compressm_lab.reports.grid import Grid
from compressm_lab.runs.measurement import Measurement, Row


def demo_grids(measurement: Measurement) -> list[Grid]:
    """One row a model, over its seeds; the first is what the others are compared with."""
    needed = ("model", "seed", "initial_order", "order", "accuracy", "seconds", "bounds")
    measurement.require("demo", needed=needed, words=("model", "bounds"), command="compressm demo")
    groups = by_model(measurement)
    slowest = mean(float(row["seconds"]) for row in next(iter(groups.values())))
    lines = []
    for model, rows in groups.items():
        seconds = [float(row["seconds"]) for row in rows]
        lines.append(
            (
                model,
                _orders(rows),
                _spread(float(row["accuracy"]) for row in rows),
                _spread(seconds),
                f"{slowest / mean(seconds):.2f}",
                _bounds(rows),
            )
        )
    heads = ("model", "states", "accuracy, %", "seconds", "speed-up", "bound of each cut")
    seeds = len(next(iter(groups.values())))
    return [Grid("Digits, 64 steps a sequence", heads, tuple(lines), f"mean ± standard deviation over {seeds} seeds")]


def demo_says(measurement: Measurement) -> list[str]:
    """What the figures mean, whichever way they fall."""
    groups = by_model(measurement)
    if missing := [model for model in ("large", "small", "compressed") if model not in groups]:
        return [f"Not trained to the end: {', '.join(missing)}."]
    found = {model: {row["seed"]: float(row["accuracy"]) for row in rows} for model, rows in groups.items()}
    large, small, compressed = (found[model] for model in ("large", "small", "compressed"))
    gained, lost = (mean(compressed.values()) - mean(other.values()) for other in (small, large))
    seeds = [seed for seed in compressed if seed in small]
    ahead = sum(compressed[seed] > small[seed] for seed in seeds)
    word = "better" if gained > 0 else "no better"
    return [
        f"With the same {groups['small'][0]['order']} states at the end, the model that began large is {word} than the "
        f"one that began small: {gained:+.1f} points on the mean, ahead in {ahead} of {len(seeds)} seeds. Against the "
        f"large one it is {lost:+.1f} points.",
    ]


def by_model(measurement: Measurement) -> dict[str, list[Row]]:
    """Rows of each model, in the order of the file."""
    groups: dict[str, list[Row]] = {}
    for row in measurement.rows:
        groups.setdefault(str(row["model"]), []).append(row)
    return groups


def _orders(rows: list[Row]) -> str:
    first, last = (mean(float(row[name]) for row in rows) for name in ("initial_order", "order"))
    return f"{last:.0f}" if first == last else f"{first:.0f} → {last:.0f}"


def _bounds(rows: list[Row]) -> str:
    first = str(rows[0]["bounds"])
    return "none: P is measured" if "none" in first else first


def _spread(values: Iterable[float]) -> str:
    values = list(values)
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")
