"""Accuracy against the final order: small from the start, and cut in several ways, beside the paper's points."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

from matplotlib.axes import Axes

from compressm_lab.reports.panels import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, picture
from compressm_lab.reports.result_tables import by_variant, here, in_paper
from compressm_lab.runs.measurement import Measurement, Row

_GENTLY = ("cut gently", GREEN, "D")
# What a variant is called in the picture, and how it looks, by the first of these words in its label.
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
RANGE = 12.0  # points of accuracy that are shown below the best


def draw_results(measurement: Measurement, path: Path | str) -> Path:
    """One point a variant, with its spread over seeds; hollow ones are the paper's.

    Beside it accuracy against time, where trainings had the machine to themselves.
    """
    alone = all(row.get("together", 2) == 1 for row in measurement.rows)
    with picture(path, columns=1 + alone, size=(5.2 if alone else 6.4, 4.4)) as figure:
        panel = figure.axes[0]
        _draw_orders(panel, measurement)
        if alone:
            _draw_times(figure.axes[1], measurement)
            figure.suptitle(measurement.title)
        else:
            panel.set_title(measurement.title)
        figure.supxlabel(trained_on(measurement), x=0.01, ha="left", fontsize=7, color=GREY)
    return Path(path)


def _draw_orders(panel: Axes, measurement: Measurement) -> None:
    groups = by_variant(measurement)
    lowest = max(_mean(rows, "best") for rows in groups.values()) - RANGE
    tolerances = any(variant.startswith("τ") for variant in groups)
    beside, most = False, max(map(len, groups.values()))
    for (name, colour, marker), variants in _families(groups).items():
        once = " (1 seed)" if max(len(groups[variant]) for variant in variants) == 1 < most else ""
        accuracies = {variant: _mean(groups[variant], "best") for variant in variants}
        below = ", ".join(f"{value:.0f} %" for value in accuracies.values() if value < lowest)
        shown = [groups[variant] for variant, value in accuracies.items() if value >= lowest]
        _points(panel, shown, f"{name}{once}" + (f" (far below: {below})" if below else ""), colour, marker)
        paper = sorted({found for variant in variants if (found := in_paper(measurement, variant))})
        if paper and (name != _GENTLY[0] or not tolerances):  # the paper's are those of its tolerances
            panel.plot(*zip(*paper, strict=True), marker, color=colour, mfc="white", ms=7, ls=":", lw=0.8)
            beside = True
    if beside:
        panel.plot([], [], "o", color=GREY, mfc="white", label="hollow: the paper, its best three seeds")
    orders = _apart(sorted({round(_mean(rows, "order")) for rows in groups.values()}))
    panel.set(xscale="log", xlabel="states at the end", ylabel="test accuracy, %")
    panel.set_xticks(orders, [str(order) for order in orders])
    panel.minorticks_off()
    panel.legend(fontsize=8)


def _draw_times(panel: Axes, measurement: Measurement) -> None:
    """Every training by itself; names stand beside their first."""
    longest = max(float(row["seconds"]) for row in here(measurement, measurement.rows))
    for variant, everywhere in by_variant(measurement).items():
        rows = here(measurement, everywhere)
        if not rows:
            continue
        _, colour, marker = family(variant)
        times, accuracies = ([float(row[column]) for row in rows] for column in ("seconds", "best"))
        panel.plot(times, accuracies, marker, color=colour, ms=7)
        place, side = ((-9, 0), "right") if times[0] > 0.75 * longest else ((9, 0), "left")
        panel.annotate(variant, (times[0], accuracies[0]), place, textcoords="offset points", va="center", ha=side)
    panel.set(xlabel="whole run, seconds", xlim=(0, None))


def _families(groups: dict[str, list[Row]]) -> dict[tuple[str, str, str], list[str]]:
    """Variants that one line joins, by rising order."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for variant in sorted(groups, key=lambda variant: _mean(groups[variant], "order")):
        found.setdefault(family(variant), []).append(variant)
    return found


def family(variant: str) -> tuple[str, str, str]:
    """Name, colour and marker of what belongs together."""
    for word, family in _FAMILIES.items():
        if word in variant:
            return family
    return _START


def _points(panel: Axes, groups: list[list[Row]], name: str, colour: str, marker: str) -> None:
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


def trained_on(measurement: Measurement) -> str:
    """For below a picture."""
    where, counts = measurement.environment, {len(rows) for rows in by_variant(measurement).values()}
    few, most = min(counts), max(counts)
    seeds = f"{most} seed{'s' * (most > 1)}" if few == most else f"{few} to {most} seeds"
    others = sorted({str(row.get("machine", where.machine)) for row in measurement.rows} - {where.machine})
    beside = f" and {', '.join(others)}" if others else ""
    return f"{seeds}, {where.machine}{beside}, {where.date[:10]}, {where.commit}"


def _mean(rows: list[Row], column: str) -> float:
    return fmean(float(row[column]) for row in rows)


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
