"""Tables of the studies, of our own results and of the demo, from their result files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, mean, stdev

from compressm_lab.reports.grid import Grid, duration, grouped
from compressm_lab.runs.measurement import Measurement, MeasurementError, Row
from compressm_lab.runs.paper import read_paper

WINDOW = 10  # steps after a cut over which the loss is averaged
_WHOLE = "128 states"  # what times on IMDB are compared with


def by(column: str, rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of every value of a column, in the order of the file."""
    return grouped(rows, lambda row: str(row[column]))


def _require(measurement: Measurement, name: str, needed: Iterable[str], *words: str) -> None:
    """A result of the study of this name, with these columns."""
    measurement.require(name, needed=needed, words=words, command=f"python studies/{name}.py")


def _mean(rows: Iterable[Row], column: str) -> float:
    return fmean(float(row[column]) for row in rows)


def _spread(values: Iterable[float], digits: int = 3) -> str:
    """Mean ± standard deviation; no ± for one seed."""
    found = list(values)
    centre = f"{fmean(found):.{digits}f}"
    return f"{centre} ± {stdev(found):.{digits}f}" if len(found) > 1 else centre


def one_shot_grids(measurement: Measurement) -> list[Grid]:
    """One table a model, with a row for each order and a column for each way of cutting to it."""
    needed = ("setting", "seed", "way", "order", "rank", "accuracy", "full_accuracy")
    _require(measurement, "one_shot", needed, "setting", "way", "device")
    grids = []
    for setting, rows in by("setting", measurement.rows).items():
        names = list(by("way", rows))
        cells: dict[str, dict[str, list[float]]] = {}
        for row in rows:
            at = cells.setdefault(f"{row['order']} → {row['rank']}", {name: [] for name in names})
            at[str(row["way"])].append(float(row["accuracy"]))
        whole = _spread(_once_a_seed(rows, "full_accuracy"))
        caption = f"test accuracy over {measurement.repeats} seeds; before the cut {whole}"
        lines = tuple((sizes, *(_spread(values) for values in at.values())) for sizes, at in cells.items())
        grids.append(Grid(setting.capitalize(), ("n → r", *names), lines, caption))
    return grids


def hidden_system_grids(measurement: Measurement) -> list[Grid]:
    """One row a seed."""
    errors = ("error", "error_cut", "error_more")
    needed = ("seed", "hidden", "states", "found", "tail", *errors)
    _require(measurement, "hidden_system", needed, "device")
    heads = ("seed", "hidden order", "n → r", "bound / σ₁ at the hidden order", "error", "after the cut", "20 steps on")
    rows = tuple(
        (
            *(str(row[name]) for name in ("seed", "hidden")),
            f"{row['states']} → {row['found']}",
            *(f"{float(row[name]):.1e}" for name in ("tail", *errors)),
        )
        for row in measurement.rows
    )
    return [Grid("The order of a hidden system", heads, rows, "mean squared errors of outputs whose mean square is 1")]


@dataclass(frozen=True)
class Continuity:
    """Of one way to cut: the loss of each seed over the first steps after it, and how that compares with no cut.

    `distance` is the largest |loss − mean of the uncut runs| in standard deviations of the uncut runs.
    """

    states: float
    kept: float
    losses: tuple[float, ...]
    distance: float
    paired: float


def continuity(measurement: Measurement) -> dict[str, Continuity]:
    """By way, the uncut runs among them."""
    ways = require_curves(measurement)
    losses = {way: [_loss_after(row) for row in rows] for way, rows in ways.items()}
    uncut = losses["uncut"]
    centre, spread = mean(uncut), stdev(uncut)
    return {
        way: Continuity(
            states=mean(float(row["states"]) for row in rows),
            kept=mean(float(row["kept"]) for row in rows),
            losses=tuple(losses[way]),
            distance=max(abs(loss - centre) for loss in losses[way]) / spread,
            paired=mean(loss - same for loss, same in zip(losses[way], uncut, strict=True)),
        )
        for way, rows in ways.items()
    }


def loss_continuity_grids(measurement: Measurement) -> list[Grid]:
    """One row a way."""
    heads = ("way", "n → r", "loss", "over the same batches uncut", "farthest from the uncut mean")
    rows = tuple(
        (
            way,
            f"{found.states:.0f} → {found.kept:.0f}",
            _spread(found.losses),
            f"{round(found.paired, 3) + 0:+.3f}",
            f"{found.distance:.2f} sd",
        )
        for way, found in continuity(measurement).items()
    )
    caption = f"training loss, mean of {WINDOW} steps after the cut, over {measurement.repeats} seeds"
    return [Grid("The loss after a cut", heads, rows, caption)]


def require_curves(measurement: Measurement) -> dict[str, list[Row]]:
    """The rows of every way, one a seed, with all columns of a loss around a cut; the same seeds, two at least."""
    needed = ("way", "seed", "states", "kept", *(f"{k:+d}" for k in range(WINDOW + 1)))
    _require(measurement, "loss_continuity", needed, "way", "device")
    ways = by("way", measurement.rows)
    seeds = {way: [row["seed"] for row in rows] for way, rows in ways.items()}
    if "uncut" not in seeds or len(seeds["uncut"]) < 2:
        raise MeasurementError(f"{measurement.name}: {len(seeds.get('uncut', []))} uncut runs; a spread needs 2")
    if any(found != seeds["uncut"] for found in seeds.values()):
        raise MeasurementError(f"{measurement.name}: the seeds differ between ways: {seeds}")
    return ways


def _loss_after(row: Row) -> float:
    return mean(float(row[f"{k:+d}"]) for k in range(1, WINDOW + 1))


def imdb_mamba_grids(measurement: Measurement) -> list[Grid]:
    """One row a variant: sizes and times in the mean over seeds, accuracies of each."""
    sizes = ("initial_order", "order", "channel_order", "complex_layers", "numbers")
    needed = ("variant", "seed", "steps", *sizes, "best", "last", "steps_s", "seconds", "cuts_s", "step_s")
    _require(measurement, "imdb_mamba", needed, "variant")
    groups = by("variant", measurement.rows)
    heads = ("training", "n → r", "states a channel", "numbers", "test accuracy", "at the end", "a step")
    times = ("gradient steps", "speed", "cuts", "recording", "all three", "speed", "whole run")
    lines = tuple((name, *_cells(rows), *_times(rows, groups.get(_WHOLE))) for name, rows in groups.items())
    seeds, steps = len(next(iter(groups.values()))), measurement.rows[0]["steps"]
    caption = f"test accuracy in percent where validation was best, and at the end, of {seeds} seeds; {steps} steps"
    return [Grid("Mamba on IMDB", (*heads, *times), lines, caption)]


def _cells(rows: list[Row]) -> tuple[str, ...]:
    kind = ", complex" if any(row["complex_layers"] for row in rows) else ""
    return (
        f"{_mean(rows, 'initial_order'):.0f} → {_mean(rows, 'order'):.3g}",
        f"{_mean(rows, 'channel_order'):.3g}{kind}",
        f"{_mean(rows, 'numbers') / 1e3:.0f} k",
        _each(rows, "best"),
        _each(rows, "last"),
        duration(_mean(rows, "step_s")),
    )


def _times(rows: list[Row], whole: list[Row] | None) -> tuple[str, ...]:
    steps, cuts, recording = "steps_s", "cuts_s", "recording_s"
    return (
        *(_seconds(rows, steps), _speed(rows, whole, steps), _seconds(rows, cuts), _seconds(rows, recording)),
        *(_seconds(rows, steps, cuts, recording), _speed(rows, whole, steps, cuts, recording)),
        _seconds(rows, "seconds"),
    )


def _seconds(rows: list[Row], *parts: str) -> str:
    taken = _taken(rows, *parts)
    return "" if taken is None else duration(taken)


def _speed(rows: list[Row], whole: list[Row] | None, *parts: str) -> str:
    here, there = _taken(rows, *parts), None if whole is None else _taken(whole, *parts)
    return "" if here is None or there is None else f"{there / here:.2f}×"


def _taken(rows: list[Row], *parts: str) -> float | None:
    """None where a part is not known: results of before recording was counted on its own have none of it."""
    known = all(part in row for row in rows for part in parts)
    return sum(_mean(rows, part) for part in parts) if known else None


def selective_cuts_grids(measurement: Measurement) -> list[Grid]:
    """Three tables a model: the change of outputs, accuracy right after the cut, and later; one row a way."""
    values = ("error", "accuracy", "accuracy_later", "full_accuracy", "full_later")
    needed = ("setting", "seed", "way", "order", "rank", "more", *values)
    _require(measurement, "selective_cuts", needed, "setting", "way", "device")
    tables = []
    for setting, rows in by("setting", measurement.rows).items():
        said = f"{setting.capitalize()}: "
        whole, later = (_spread(_once_a_seed(rows, column)) for column in ("full_accuracy", "full_later"))
        tables += [
            _by_way(rows, "error", f"{said}relative change of a layer's output", f"{measurement.repeats} seeds"),
            _by_way(rows, "accuracy", f"{said}test accuracy right after the cut", f"before it {whole}"),
            _by_way(
                rows, "accuracy_later", f"{said}test accuracy {rows[0]['more']} steps later", f"without a cut {later}"
            ),
        ]
    return tables


def _by_way(rows: list[Row], column: str, title: str, caption: str) -> Grid:
    ranks = list(dict.fromkeys(int(row["rank"]) for row in rows))
    seeds = len({row["seed"] for row in rows})
    lines = []
    for way, own in by("way", rows).items():
        cells = [[float(row[column]) for row in own if row["rank"] == rank] for rank in ranks]
        said = (_spread(cell) if len(cell) == seeds else f"refused {seeds - len(cell)}×" for cell in cells)
        lines.append((way, *said))
    return Grid(title, ("way", *(f"{rows[0]['order']} → {rank}" for rank in ranks)), tuple(lines), caption)


def _once_a_seed(rows: Iterable[Row], column: str) -> Iterable[float]:
    return {row["seed"]: float(row[column]) for row in rows}.values()


def _each(rows: Iterable[Row], column: str) -> str:
    return ", ".join(f"{float(row[column]):.1f}" for row in rows)


# The paper's own code without reduction, seed 42: mean of its test accuracies at steps 35 000 and 40 000.
REFERENCE = {256: 93.35, 28: 89.5}


def setting_grids(measurement: Measurement) -> list[Grid]:
    """One row a variant and order, the mean over seeds of the last two evaluations."""
    needed = ("variant", "order", "seed", "steps", "before", "last", "seconds")
    _require(measurement, "smnist_settings", needed, "variant")
    groups = grouped(measurement.rows, lambda row: (str(row["variant"]), int(row["order"])))
    heads = ("what differs", "n", "each seed", "mean", "the paper's own code")
    lines = []
    for (variant, order), rows in groups.items():
        values = [(float(row["before"]) + float(row["last"])) / 2 for row in rows]
        reference = f"{REFERENCE[order]:.1f}" if order in REFERENCE else ""
        lines.append((variant, str(order), ", ".join(f"{v:.1f}" for v in values), f"{mean(values):.1f}", reference))
    steps = int(measurement.rows[0]["steps"])
    caption = f"test accuracy in percent, mean of the evaluations at {steps * 7 // 8} and {steps} steps"
    return [Grid("sMNIST without compression", heads, tuple(lines), caption)]


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
RESULTS = {
    "results-smnist": "sMNIST",
    "results-smnist-falling": "sMNIST",
    "results-smnist-choices": "sMNIST",
    "results-smnist-selection": "sMNIST",
    "results-scifar": "CIFAR10",
}
_TOP = 3  # of the seeds are in the paper's means


def in_paper(measurement: Measurement, variant: str) -> tuple[float, float] | None:
    """Final order and accuracy of what the paper has beside a variant: the mean of its three best seeds."""
    task = RESULTS[measurement.name]
    if variant not in _BESIDE[task]:
        return None
    label, method, column = _BESIDE[task][variant]
    order = read_paper(label).value(task, "CompreSSM", column, "order")
    accuracy = read_paper(label).value(task, method, column, "accuracy")
    return None if order is None or accuracy is None else (order.centre, accuracy.centre)


def by_variant(measurement: Measurement) -> dict[str, list[Row]]:
    """The rows of every variant, in the order of the file, after a look at their columns."""
    needed = ("variant", "seed", "steps", "initial_order", "order", "best", "last", "steps_s", "seconds", "cuts_s")
    command = f"python studies/results.py {measurement.name.removeprefix('results-')}"
    measurement.require(measurement.name, needed=(*needed, "step_s"), words=("variant",), command=command)
    return by("variant", measurement.rows)


def result_grids(measurement: Measurement) -> list[Grid]:
    """One row a variant: accuracy with its spread over seeds, orders, and times in the mean.

    The best three seeds are so by validation; by test only in results that have no validation.
    """
    heads = ("training", "n → r", "seeds", "test accuracy", "best three", "at the end", "the paper")
    lines = tuple(
        (name, *_result_cells(rows), _paper(measurement, name), *_result_times(here(measurement, rows)))
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


def _result_cells(rows: list[Row]) -> tuple[str, ...]:
    top = sorted(rows, key=lambda row: float(row.get("validation", row["best"])), reverse=True)[:_TOP]
    three = f"{_mean(top, 'best'):.1f}" if len(top) == _TOP else ""
    orders = f"{_mean(rows, 'initial_order'):.0f} → {_spread_if_any(rows, 'order', 0)}"
    return orders, str(len(rows)), _spread_if_any(rows, "best"), three, _spread_if_any(rows, "last")


def _result_times(rows: list[Row]) -> tuple[str, ...]:
    """In the mean; empty where all of them were trained elsewhere."""
    columns = ("steps_s", "seconds")
    return tuple(duration(_mean(rows, column)) if rows else "" for column in columns)


def _spread_if_any(rows: list[Row], column: str, digits: int = 1) -> str:
    """Mean ± standard deviation, where seeds differ."""
    values = [float(row[column]) for row in rows]
    centre = f"{fmean(values):.{digits}f}"
    return centre if len(set(values)) == 1 else f"{centre} ± {stdev(values):.1f}"


def demo_grids(measurement: Measurement) -> list[Grid]:
    """One row a model, over its seeds; the first is what the others are compared with."""
    needed = ("model", "seed", "initial_order", "order", "accuracy", "seconds", "bounds")
    measurement.require("demo", needed=needed, words=("model", "bounds"), command="compressm demo")
    groups = by("model", measurement.rows)
    slowest = mean(float(row["seconds"]) for row in next(iter(groups.values())))
    lines = []
    for model, rows in groups.items():
        seconds = [float(row["seconds"]) for row in rows]
        lines.append(
            (
                model,
                _orders(rows),
                _spread((float(row["accuracy"]) for row in rows), 1),
                _spread(seconds, 1),
                f"{slowest / mean(seconds):.2f}",
                _bounds(rows),
            )
        )
    heads = ("model", "states", "accuracy, %", "seconds", "speed-up", "bound of each cut")
    seeds = len(next(iter(groups.values())))
    return [Grid("Digits, 64 steps a sequence", heads, tuple(lines), f"mean ± standard deviation over {seeds} seeds")]


def demo_says(measurement: Measurement) -> list[str]:
    """What the figures mean, whichever way they fall."""
    groups = by("model", measurement.rows)
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


def _orders(rows: list[Row]) -> str:
    first, last = (mean(float(row[name]) for row in rows) for name in ("initial_order", "order"))
    return f"{last:.0f}" if first == last else f"{first:.0f} → {last:.0f}"


def _bounds(rows: list[Row]) -> str:
    first = str(rows[0]["bounds"])
    return "none: P is measured" if "none" in first else first


GRIDS: dict[str, Callable[[Measurement], list[Grid]]] = {
    "one_shot": one_shot_grids,
    "hidden_system": hidden_system_grids,
    "loss_continuity": loss_continuity_grids,
    "demo": demo_grids,
    "smnist_settings": setting_grids,
    "imdb_mamba": imdb_mamba_grids,
    "selective_cuts": selective_cuts_grids,
    **dict.fromkeys(RESULTS, result_grids),
}
