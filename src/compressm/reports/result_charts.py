"""Accuracy against the final order: small from the start, and cut in several ways, beside the paper's points."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

from compressm.reports.canvas import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, picture
from compressm.reports.result_tables import by_variant, in_paper
from compressm.runs.measurement import Measurement, Row

_GENTLY = ("cut gently", GREEN, "D")
# What a variant is called in the picture, and how it looks, by how its label begins or ends.
_FAMILIES = {
    "paper's way": ("cut with τ, in the paper's way", ORANGE, "s"),
    "τ": ("cut with τ", BLUE, "o"),
    "gently": _GENTLY,
    "four cuts": ("cut four times", GREEN, "D"),
    "Σσ": ("Σσ penalty, then cut", PURPLE, "v"),
    "largest": ("largest σ kept", GREEN, "D"),
    "random": ("random states kept", ORANGE, "s"),
    "smallest": ("smallest σ kept", RED, "v"),
    "taught": ("taught by the whole model", RED, "^"),
}
_START = ("from the start", GREY, "o")
_RANGE = 10.0  # points of accuracy that are shown below the best


def draw_results(measurement: Measurement, path: Path | str) -> Path:
    """One point a variant, with its spread over seeds; hollow ones are the paper's."""
    groups = by_variant(measurement)
    lowest = max(_mean(rows, "best") for rows in groups.values()) - _RANGE
    families: dict[tuple[str, str, str], list[str]] = {}
    for variant in sorted(groups, key=lambda variant: _mean(groups[variant], "order")):
        families.setdefault(_family(variant), []).append(variant)
    tolerances = any(variant.startswith("τ") for variant in groups)
    with picture(path, size=(6.4, 4.4)) as figure:
        (panel,) = figure.axes
        for (name, colour, marker), variants in families.items():
            accuracies = {variant: _mean(groups[variant], "best") for variant in variants}
            below = ", ".join(f"{value:.0f} %" for value in accuracies.values() if value < lowest)
            shown = [groups[variant] for variant, value in accuracies.items() if value >= lowest]
            _points(panel, shown, f"{name} (far below: {below})" if below else name, colour, marker)
            paper = sorted({found for variant in variants if (found := in_paper(measurement, variant))})
            if paper and (name != _GENTLY[0] or not tolerances):  # the paper's are those of its tolerances
                panel.plot(*zip(*paper, strict=True), marker, color=colour, mfc="white", ms=7, ls=":", lw=0.8)
        panel.plot([], [], "o", color=GREY, mfc="white", label="hollow: the paper, its best three seeds")
        orders = _apart(sorted({round(_mean(rows, "order")) for rows in groups.values()}))
        panel.set(xscale="log", xlabel="states at the end", ylabel="test accuracy, %", title=measurement.title)
        panel.set_xticks(orders, [str(order) for order in orders])
        panel.minorticks_off()
        panel.legend(fontsize=8)
        figure.supxlabel(_below(measurement), x=0.01, ha="left", fontsize=7, color=GREY)
    return Path(path)


def _family(variant: str) -> tuple[str, str, str]:
    for word, family in _FAMILIES.items():
        if variant.startswith(word) or variant.endswith(word):
            return family
    return _START


def _points(panel, groups: list[list[Row]], name: str, colour: str, marker: str) -> None:
    orders, accuracies = ([_mean(rows, column) for rows in groups] for column in ("order", "best"))
    spreads = [stdev(float(row["best"]) for row in rows) if len(rows) > 1 else 0.0 for rows in groups]
    panel.errorbar(orders, accuracies, spreads, marker=marker, color=colour, lw=1, ms=6, capsize=3, label=name)


def _apart(orders: list[int]) -> list[int]:
    """Those that can be read beside each other on a logarithmic axis."""
    shown: list[int] = []
    for order in orders:
        if not shown or order > 1.25 * shown[-1]:
            shown.append(order)
    return shown


def _below(measurement: Measurement) -> str:
    here, seeds = measurement.environment, len({row["seed"] for row in measurement.rows})
    return f"{seeds} seeds, {here.accelerator or here.processor}, {here.date[:10]}, {here.commit}"


def _mean(rows: list[Row], column: str) -> float:
    return fmean(float(row[column]) for row in rows)
