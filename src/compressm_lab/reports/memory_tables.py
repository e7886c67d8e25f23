"""Tables of the studies of matrix states: recall and language after cuts, and what a token takes."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from compressm_lab.reports.grid import NOTHING, Grid, amount, column, duration
from compressm_lab.reports.study_tables import by, mean_of, require, spread
from compressm_lab.runs.measurement import Measurement, Row


def recall_grids(measurement: Measurement) -> list[Grid]:
    """Accuracies of recall, a table a family; models that are not cut have the rate that is best on validation."""
    needed = ("family", "arm", "order", "rank", "seed", "rate", "pairs", "validation", "accuracy")
    require(measurement, "recall", needed, "family", "arm", "device")

    def of(name: str, digits: int = 3) -> Callable[[list[Row]], str]:
        return lambda rows: spread([float(row[name]) for row in rows], digits) if name in rows[0] else NOTHING

    columns = [
        ("way", lambda rows: str(rows[0]["arm"])),
        ("states", _states),
        ("rate", lambda rows: f"{float(rows[0]['rate']):g}"),
        ("error of the output", of("error")),
        ("right after the cut", of("accuracy_cut")),
        ("at the end", of("accuracy")),
    ]
    grids = []
    for family, rows in by("family", measurement.rows).items():
        cells = [_at_best_rate(own) for arm in by("arm", rows).values() for own in by("rank", arm).values()]
        cells.sort(key=lambda own: (own[0]["arm"] != "uncut", -int(own[0]["rank"])))
        before = [float(row["accuracy_before"]) for row in rows if "accuracy_before" in row]
        said = f"; {fmean(before):.3f} before the cut" if before else ""
        seeds = len({row["seed"] for row in rows})
        caption = f"share of right answers, {rows[0]['pairs']} pairs, {rows[0]['steps']} steps, {seeds} seeds{said}"
        grids.append(Grid.of(family, cells, columns, caption))
    return grids


def language_grids(measurement: Measurement) -> list[Grid]:
    """Perplexities of a byte, a table a family."""
    needed = ("family", "arm", "order", "rank", "perplexity", "perplexity_cut", "perplexity_more", "more", "parameters")
    require(measurement, "language", needed, "family", "arm", "device")
    grids = []
    for family, rows in by("family", measurement.rows).items():
        first = rows[0]
        columns = [
            column("way", "arm"),
            ("states", lambda row: _states([row])),
            ("error of the output", lambda row: f"{float(row['error']):.3f}" if "error" in row else NOTHING),
            column("right after the cut", "perplexity_cut", "{:.3f}".format),
            (f"{first['more']} steps later", lambda row: f"{float(row['perplexity_more']):.3f}"),
        ]
        size = max(int(row["parameters"]) for row in rows)
        before = f"{float(first['perplexity']):.3f} before the cut"
        caption = f"perplexity of a byte; {before}, {size / 1e6:.1f} million parameters"
        rows = sorted(rows, key=lambda row: -int(row["rank"]))
        grids.append(Grid.of(family, rows, columns, f"{caption}, one seed"))
    return grids


def decode_grids(measurement: Measurement) -> list[Grid]:
    """Bytes of a sequence and times of a token, a table a family."""
    needed = ("family", "arm", "order", "rank", "batch", "state_bytes", "weight_bytes", "seconds")
    require(measurement, "language_decode", needed, "family", "arm", "device")
    grids = []
    for family, rows in by("family", measurement.rows).items():
        sizes = {key: own for arm in by("arm", rows).values() for key, own in _by_rank(arm).items()}
        batches = sorted({int(row["batch"]) for row in rows})

        columns = [
            ("states", _states),
            ("kept as", lambda own: {"rows": "fewer rows", "maps": "maps"}[str(own[0]["arm"])]),
            ("weights", lambda own: amount(float(own[0]["weight_bytes"]))),
            ("a sequence", lambda own: amount(mean_of(own, "state_bytes"))),
            *((f"a token of {batch}", _time(batch)) for batch in batches),
        ]
        grids.append(
            Grid.of(family, sizes.values(), columns, "memory of a state, and the time of a step, all sequences")
        )
    return grids


def _time(batch: int) -> Callable[[list[Row]], str]:
    """The time of a step of so many sequences."""

    def shown(rows: list[Row]) -> str:
        found = [float(row["seconds"]) for row in rows if row["batch"] == batch]
        return duration(found[0]) if found else NOTHING

    return shown


def _by_rank(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    return {(str(own[0]["arm"]), rank): own for rank, own in by("rank", rows).items()}


def _states(rows: list[Row]) -> str:
    first = rows[0]
    return f"{first['rank']}" if first["order"] == first["rank"] else f"{first['order']} → {first['rank']}"


def _at_best_rate(rows: list[Row]) -> list[Row]:
    """The rows of the rate with the best mean on validation."""
    return max(by("rate", rows).values(), key=lambda own: mean_of(own, "validation"))


GRIDS: dict[str, Callable[[Measurement], list[Grid]]] = {
    "recall": recall_grids,
    "language": language_grids,
    "language_decode": decode_grids,
}
