"""Tables of the study of automatic cuts: every way, and how far it lies below the front of orders and accuracies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from compressm_lab.reports.grid import Grid, column
from compressm_lab.reports.study_tables import by_variant, mean_of, spread, together_of
from compressm_lab.runs.measurement import Measurement, Row

_ENDS = ("", "-s5", "-s4d")
_TASKS = ("digits", "smnist", "scifar", "listops", *(f"{name}{end}" for name in ("fashion", "forda") for end in _ENDS))
AUTOMATIC: Final = tuple(f"automatic-{name}" for name in _TASKS)
_RECOMMENDED = "automatic, 1 %"
ADVICE: Final = tuple(f"{name}-advice" for name in AUTOMATIC)


def below_the_front(groups: dict[str, list[Row]]) -> dict[str, float]:
    """By how much the best way with no more states at the end is better, in the mean over seeds; 0 on the front."""
    orders, accuracies = ({name: mean_of(rows, word) for name, rows in groups.items()} for word in ("order", "best"))
    found = {}
    for name, order in orders.items():
        rivals = [accuracies[other] for other, fewer in orders.items() if fewer <= order]
        found[name] = max(rivals) - accuracies[name]
    return found


def automatic_grids(measurement: Measurement) -> list[Grid]:
    """A row a way: its order at the end, its accuracy, and the way from there up to the front."""
    groups = by_variant(measurement)
    below = below_the_front(groups)
    columns: list[tuple[str, Callable[[str], str]]] = [
        ("training", lambda name: name),
        ("states at the end", lambda name: spread((float(row["order"]) for row in groups[name]), 1)),
        ("seeds", lambda name: str(len(groups[name]))),
        ("test accuracy", lambda name: spread((float(row["best"]) for row in groups[name]), 1)),
        ("at the end", lambda name: spread((float(row["last"]) for row in groups[name]), 1)),
        ("below the front", lambda name: f"{below[name]:.1f}" if below[name] else "on it"),
    ]
    caption = (
        f"test accuracy in percent where validation was best since the last cut; {measurement.rows[0]['steps']} steps; "
        f"{together_of(measurement)}; below the front: how much better the best way with no more states is"
    )
    return [Grid.of(measurement.title, list(groups), columns, caption)]


def advice_grids(measurement: Measurement) -> list[Grid]:
    """A row a seed: what `inspect` recommended for the uncut model, and what trainings gave."""
    needed = ("variant", "seed", "order", "small_from_the_start", "whole", "small", "cut", "advice")
    command = "python studies/automatic.py TASK --advice"
    measurement.require(measurement.name, needed=needed, words=("variant", "advice"), command=command)
    columns = [
        column("seed"),
        column("states recommended", "order", "{:.1f}".format),
        column("small from the start will do", "small_from_the_start", lambda value: "yes" if value else "no"),
        column("uncut", "whole", "{:.1f}".format),
        column("small from the start", "small", "{:.1f}".format),
        column("best cut to that size", "cut", "{:.1f}".format),
    ]
    return [Grid.of(measurement.title, measurement.rows, columns, "test accuracy in percent")]


def summary_grid(results: Path) -> Grid:
    """A row a task whose result is in the folder: uncut, automatic at 1 %, and the best with no more states."""
    lines = []
    for path in (results / f"{name}.json" for name in AUTOMATIC):
        groups = by_variant(Measurement.read(path)) if path.exists() else {}
        if _RECOMMENDED not in groups:
            continue
        whole, own = next(iter(groups)), groups[_RECOMMENDED]
        below = below_the_front(groups)[_RECOMMENDED]
        fewer = [name for name in groups if mean_of(groups[name], "order") <= mean_of(own, "order")]
        best = max(fewer, key=lambda name: mean_of(groups[name], "best"))
        accuracies = (spread((float(row["best"]) for row in groups[name]), 1) for name in (whole, _RECOMMENDED))
        states = spread((float(row["order"]) for row in own), 1)
        title = Measurement.read(path).title.partition(":")[0]
        front = f"{below:.1f} ({best})" if below else "on it"
        lines.append((title, str(len(own)), whole, *accuracies, states, front))
    heads = ("task", "seeds", "uncut", "its test accuracy", "automatic, 1 %", "states at the end", "below the front")
    return Grid("Automatic cuts on all tasks", heads, tuple(lines), "test accuracy in percent")


GRIDS = dict.fromkeys(AUTOMATIC, automatic_grids) | dict.fromkeys(ADVICE, advice_grids)
