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


def best_with_no_more_states(groups: dict[str, list[Row]], way: str) -> str:
    """The way with the best mean accuracy among those that end with no more states than `way`; itself on the front."""
    orders = {name: mean_of(rows, "order") for name, rows in groups.items()}
    rivals = [way, *(name for name, order in orders.items() if order <= orders[way])]
    return max(rivals, key=lambda name: mean_of(groups[name], "best"))


def below_the_front(groups: dict[str, list[Row]], way: str) -> float:
    """The points of accuracy that the best way with no more states has more; 0 on the front."""
    return mean_of(groups[best_with_no_more_states(groups, way)], "best") - mean_of(groups[way], "best")


def best_other(groups: dict[str, list[Row]]) -> str:
    """The most accurate of the ways to a small model that are not automatic; the first way of a result is uncut."""
    others = [name for name in list(groups)[1:] if not name.startswith("automatic")]
    return max(others, key=lambda name: mean_of(groups[name], "best"))


def automatic_grids(measurement: Measurement) -> list[Grid]:
    """A row a way: its order at the end, its accuracy, and the way from there up to the front."""
    groups = by_variant(measurement)
    below = {name: below_the_front(groups, name) for name in groups}
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
    """A row a task whose result is in the folder: uncut, automatic at 1 %, and what is best beside it."""
    found = [Measurement.read(path) for name in AUTOMATIC if (path := results / f"{name}.json").exists()]
    lines = [
        (measurement.title.partition(":")[0], *_summed_up(groups))
        for measurement in found
        if _RECOMMENDED in (groups := by_variant(measurement))
    ]
    heads = ("task", "seeds", "uncut", "automatic, 1 %", "its states", "best other small model", "below the front")
    return Grid("Automatic cuts on all tasks", heads, tuple(lines), "test accuracy in percent")


def _summed_up(groups: dict[str, list[Row]]) -> tuple[str, ...]:
    whole, other, front = next(iter(groups)), best_other(groups), best_with_no_more_states(groups, _RECOMMENDED)

    def of(name: str, word: str = "best") -> str:
        return spread((float(row[word]) for row in groups[name]), 1)

    below = "on it" if front == _RECOMMENDED else f"{below_the_front(groups, _RECOMMENDED):.1f} ({front})"
    beside = f"{of(other)} ({other})"
    seeds = str(len(groups[_RECOMMENDED]))
    return seeds, f"{of(whole)} ({whole})", of(_RECOMMENDED), of(_RECOMMENDED, "order"), beside, below


GRIDS = dict.fromkeys(AUTOMATIC, automatic_grids) | dict.fromkeys(ADVICE, advice_grids)
