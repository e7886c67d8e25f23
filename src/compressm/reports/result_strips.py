"""Test accuracies of every variant under each other, a point a seed: for results whose orders say little."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from compressm.reports.canvas import GREY, picture
from compressm.reports.result_charts import RANGE, family, trained_on
from compressm.reports.result_tables import by_variant
from compressm.runs.measurement import Measurement


def draw_strips(measurement: Measurement, path: Path | str) -> Path:
    """Points are seeds and bars their means; what lies far below the best is written at the edge."""
    groups = {variant: sorted(float(row["best"]) for row in rows) for variant, rows in by_variant(measurement).items()}
    best = max(values[-1] for values in groups.values())
    shown = {variant: [value for value in values if value > best - RANGE] for variant, values in groups.items()}
    edge = min(value for values in shown.values() for value in values)
    room = 0.3 if shown != groups else 0.05  # for what is written at the edge
    left, right = edge - room * (best - edge) - 0.1, best + 0.05 * (best - edge) + 0.05
    with picture(path, size=(7.4, 1.3 + 0.3 * len(groups))) as figure:
        (panel,) = figure.axes
        for k, (variant, values) in enumerate(groups.items()):
            _, colour, _ = family(variant)
            panel.plot(shown[variant], [k] * len(shown[variant]), "o", color=colour, ms=6, alpha=0.7, mec="none")
            if len(values) > 1 and len(values) == len(shown[variant]):
                panel.plot(fmean(values), k, "|", color=colour, ms=15, mew=2)
            if below := [value for value in values if value not in shown[variant]]:
                said = ", ".join(f"{value:.1f}" for value in below)
                panel.annotate(f"← {said}", (left, k), (4, 0), textcoords="offset points", va="center", fontsize=8)
        panel.set(xlim=(left, right), xlabel="test accuracy, %", title=measurement.title)
        panel.set_yticks(range(len(groups)), _names(groups))
        panel.set_ylim(len(groups) - 0.5, -0.5)
        figure.supxlabel(trained_on(measurement), x=0.01, ha="left", fontsize=7, color=GREY)
    return Path(path)


def _names(groups: dict[str, list[float]]) -> list[str]:
    """With the number of seeds, where it is not one for all."""
    if len({len(values) for values in groups.values()}) == 1:
        return list(groups)
    return [f"{name} ({len(values)} seed{'s' * (len(values) > 1)})" for name, values in groups.items()]
