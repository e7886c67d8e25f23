"""Tables of the studies, of our own results and of the demo, from their result files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, mean, stdev

from compressm_lab.reports.grid import Grid, amount, column, duration
from compressm_lab.runs.groups import grouped
from compressm_lab.runs.measurement import Measurement, MeasurementError, Row
from compressm_lab.runs.paper import read_paper

WINDOW = 10  # steps after a cut over which the loss is averaged
_WHOLE = "128 states"  # what times on IMDB are compared with
# A head, and what it says of the rows of one group.
_Column = tuple[str, Callable[[list[Row]], str]]


def by(name: str, rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of every value of the column `name`, in the order of the file."""
    return grouped(rows, lambda row: str(row[name]))


def mean_of(rows: Iterable[Row], column: str) -> float:
    """The mean of a column."""
    return fmean(float(row[column]) for row in rows)


def require(measurement: Measurement, name: str, needed: Iterable[str], *words: str) -> None:
    """Refuse what is not a result of the study of this name, with these columns."""
    measurement.require(name, needed=needed, words=words, command=f"python studies/{name}.py")


def spread(values: Iterable[float], digits: int = 3) -> str:
    """Mean ± standard deviation; no ± for one seed."""
    found = list(values)
    centre = f"{fmean(found):.{digits}f}"
    return f"{centre} ± {stdev(found):.{digits}f}" if len(found) > 1 else centre


def _once_a_seed(rows: Iterable[Row], column: str) -> str:
    """Mean ± standard deviation of a column that repeats in all rows of a seed."""
    return spread({row["seed"]: float(row[column]) for row in rows}.values())


def one_shot_grids(measurement: Measurement) -> list[Grid]:
    """Accuracy right after a cut: a table a model, a row an order, a column for each way to cut."""
    needed = ("setting", "seed", "way", "order", "rank", "accuracy", "full_accuracy")
    require(measurement, "one_shot", needed, "setting", "way", "device")
    grids = []
    for setting, rows in by("setting", measurement.rows).items():
        names = list(by("way", rows))
        cells: dict[str, dict[str, list[float]]] = {}
        for row in rows:
            at = cells.setdefault(f"{row['order']} → {row['rank']}", {name: [] for name in names})
            at[str(row["way"])].append(float(row["accuracy"]))
        whole = _once_a_seed(rows, "full_accuracy")
        caption = f"test accuracy over {measurement.repeats} seeds; before the cut {whole}"
        lines = tuple((sizes, *(spread(values) for values in at.values())) for sizes, at in cells.items())
        grids.append(Grid(setting.capitalize(), ("n → r", *names), lines, caption))
    return grids


def deploy_grids(measurement: Measurement) -> list[Grid]:
    """A token in other runtimes, before and after a cut, a row a runtime."""
    pairs = ("difference", "bytes", "seconds")
    needed = ("model", "runtime", "order", "rank", *pairs, *(f"{name}_cut" for name in pairs))
    require(measurement, "deploy", needed, "model", "runtime", "device")

    def change(name: str, show: Callable[[float], str]) -> Callable[[Row], str]:
        return lambda row: f"{show(float(row[name]))} → {show(float(row[f'{name}_cut']))}"

    columns: list[tuple[str, Callable[[Row], str]]] = [
        column("model"),
        column("runs in", "runtime"),
        ("states", lambda row: f"{row['order']} → {row['rank']}"),
        ("largest difference", change("difference", "{:.0e}".format)),
        ("file", change("bytes", amount)),
        ("a token", change("seconds", duration)),
        ("faster", lambda row: f"{float(row['seconds']) / float(row['seconds_cut']):.2f}×"),
    ]
    caption = "logits against PyTorch's of the same model; one sequence, one core, medians"
    return [Grid.of("A token in other runtimes, before and after a cut", measurement.rows, columns, caption)]


def hidden_system_grids(measurement: Measurement) -> list[Grid]:
    """Orders and errors of hidden systems that were found, a row a seed."""
    needed = ("seed", "hidden", "states", "found", "tail", "error", "error_cut", "error_more")
    require(measurement, "hidden_system", needed, "device")
    columns = [
        column("seed"),
        column("hidden order", "hidden"),
        ("n → r", lambda row: f"{row['states']} → {row['found']}"),
        column("bound / σ₁ at the hidden order", "tail", "{:.1e}".format),
        column("error", "error", "{:.1e}".format),
        column("after the cut", "error_cut", "{:.1e}".format),
        column("20 steps on", "error_more", "{:.1e}".format),
    ]
    caption = "mean squared errors of outputs whose mean square is 1"
    return [Grid.of("The order of a hidden system", measurement.rows, columns, caption)]


def error_bound_floor_grids(measurement: Measurement) -> list[Grid]:
    """Violations of error bounds, by the distance of the slowest pole from the unit circle."""
    needed = ("cuts", "violations_of_the_tail", "violations", "largest_share", "largest_floors")
    require(measurement, "error_bound_floor", needed, "systems", "form", "device")
    columns = [
        column("systems"),
        column("cuts"),
        column("error above 2 Σσ", "violations_of_the_tail"),
        column("error above the bound", "violations"),
        column("largest error / bound", "largest_share", "{:.4f}".format),
        column("largest excess / (max(n, κ) ε σ₁ / (1 − ρ))", "largest_floors", "{:.2f}".format),
    ]
    rows = [row for row in measurement.rows if row["form"] == "all"]
    return [Grid.of("The error bound and its rounding", rows, columns, f"{measurement.repeats} random systems")]


@dataclass(frozen=True)
class Continuity:
    """The loss of each seed over the first steps after one way to cut, and how it compares with no cut.

    `distance` is the largest |loss − mean of the uncut runs| in standard deviations of the uncut runs.
    """

    states: float
    kept: float
    losses: tuple[float, ...]
    distance: float
    paired: float


def continuity(measurement: Measurement) -> dict[str, Continuity]:
    """The loss after every way to cut, and of the uncut runs."""
    ways = require_curves(measurement)
    after = [f"{k:+d}" for k in range(1, WINDOW + 1)]
    losses = {way: [mean(float(row[step]) for step in after) for row in rows] for way, rows in ways.items()}
    uncut = losses["uncut"]
    centre, spread = mean(uncut), stdev(uncut)
    return {
        way: Continuity(
            states=mean_of(rows, "states"),
            kept=mean_of(rows, "kept"),
            losses=tuple(losses[way]),
            distance=max(abs(loss - centre) for loss in losses[way]) / spread,
            paired=mean(loss - same for loss, same in zip(losses[way], uncut, strict=True)),
        )
        for way, rows in ways.items()
    }


def loss_continuity_grids(measurement: Measurement) -> list[Grid]:
    """The loss after a cut, a row a way."""
    columns: list[tuple[str, Callable[[tuple[str, Continuity]], str]]] = [
        ("way", lambda item: item[0]),
        ("n → r", lambda item: f"{item[1].states:.0f} → {item[1].kept:.0f}"),
        ("loss", lambda item: spread(item[1].losses)),
        ("over the same batches uncut", lambda item: f"{round(item[1].paired, 3) + 0:+.3f}"),
        ("farthest from the uncut mean", lambda item: f"{item[1].distance:.2f} sd"),
    ]
    caption = f"training loss, mean of {WINDOW} steps after the cut, over {measurement.repeats} seeds"
    return [Grid.of("The loss after a cut", continuity(measurement).items(), columns, caption)]


def require_curves(measurement: Measurement) -> dict[str, list[Row]]:
    """The rows of every way, one a seed, with all columns of a loss around a cut; the same seeds, two at least."""
    needed = ("way", "seed", "states", "kept", *(f"{k:+d}" for k in range(WINDOW + 1)))
    require(measurement, "loss_continuity", needed, "way", "device")
    ways = by("way", measurement.rows)
    seeds = {way: [row["seed"] for row in rows] for way, rows in ways.items()}
    if "uncut" not in seeds or len(seeds["uncut"]) < 2:
        raise MeasurementError(f"{measurement.name}: {len(seeds.get('uncut', []))} uncut runs; a spread needs 2")
    if any(found != seeds["uncut"] for found in seeds.values()):
        raise MeasurementError(f"{measurement.name}: the seeds differ between ways: {seeds}")
    return ways


def imdb_mamba_grids(measurement: Measurement) -> list[Grid]:
    """Mamba on IMDB, a row a variant: sizes and times in the mean over seeds, accuracies of each."""
    sizes = ("initial_order", "order", "channel_order", "complex_layers", "numbers")
    needed = ("variant", "seed", "steps", *sizes, "best", "last", "steps_s", "seconds", "cuts_s", "step_s")
    require(measurement, "imdb_mamba", needed, "variant")
    groups = by("variant", measurement.rows)
    whole, all_three = groups.get(_WHOLE), ("steps_s", "cuts_s", "recording_s")
    columns: list[_Column] = [
        ("training", lambda rows: str(rows[0]["variant"])),
        ("n → r", lambda rows: f"{mean_of(rows, 'initial_order'):.0f} → {mean_of(rows, 'order'):.3g}"),
        ("states a channel", _channel_states),
        ("numbers", lambda rows: f"{mean_of(rows, 'numbers') / 1e3:.0f} k"),
        ("test accuracy", lambda rows: _each(rows, "best")),
        ("at the end", lambda rows: _each(rows, "last")),
        ("a step", lambda rows: duration(mean_of(rows, "step_s"))),
        ("gradient steps", lambda rows: _seconds(rows, "steps_s")),
        ("speed", lambda rows: _speed(rows, whole, "steps_s")),
        ("cuts", lambda rows: _seconds(rows, "cuts_s")),
        ("recording", lambda rows: _seconds(rows, "recording_s")),
        ("all three", lambda rows: _seconds(rows, *all_three)),
        ("speed", lambda rows: _speed(rows, whole, *all_three)),
        ("whole run", lambda rows: _seconds(rows, "seconds")),
    ]
    seeds, steps = len(next(iter(groups.values()))), measurement.rows[0]["steps"]
    caption = f"test accuracy in percent where validation was best, and at the end, of {seeds} seeds; {steps} steps"
    return [Grid.of("Mamba on IMDB", groups.values(), columns, caption)]


def _channel_states(rows: list[Row]) -> str:
    kind = ", complex" if any(row["complex_layers"] for row in rows) else ""
    return f"{mean_of(rows, 'channel_order'):.3g}{kind}"


def _each(rows: Iterable[Row], column: str) -> str:
    return ", ".join(f"{float(row[column]):.1f}" for row in rows)


def _seconds(rows: list[Row], *parts: str) -> str:
    taken = _taken(rows, *parts)
    return "" if taken is None else duration(taken)


def _speed(rows: list[Row], whole: list[Row] | None, *parts: str) -> str:
    here, there = _taken(rows, *parts), None if whole is None else _taken(whole, *parts)
    return "" if here is None or there is None else f"{there / here:.2f}×"


def _taken(rows: list[Row], *parts: str) -> float | None:
    """The sum of the parts; None where one is not known: older results did not count recording on its own."""
    known = all(part in row for row in rows for part in parts)
    return sum(mean_of(rows, part) for part in parts) if known else None


def selective_cuts_grids(measurement: Measurement) -> list[Grid]:
    """Three tables a model: the change of outputs, accuracy right after the cut, and later; one row a way."""
    values = ("error", "accuracy", "accuracy_later", "full_accuracy", "full_later")
    needed = ("setting", "seed", "way", "order", "rank", "more", *values)
    require(measurement, "selective_cuts", needed, "setting", "way", "device")
    tables = []
    for setting, rows in by("setting", measurement.rows).items():
        whole, later = (_once_a_seed(rows, column) for column in ("full_accuracy", "full_later"))
        shown = (
            ("error", "relative change of a layer's output", f"{measurement.repeats} seeds"),
            ("accuracy", "test accuracy right after the cut", f"before it {whole}"),
            ("accuracy_later", f"test accuracy {rows[0]['more']} steps later", f"without a cut {later}"),
        )
        tables += [_by_way(rows, column, f"{setting.capitalize()}: {said}", caption) for column, said, caption in shown]
    return tables


def lti_newcomers_grids(measurement: Measurement) -> list[Grid]:
    """A table a system: relative errors of its cuts; one row a way."""
    needed = ("setting", "seed", "way", "order", "rank", "error")
    require(measurement, "lti_newcomers", needed, "setting", "way", "device")
    seeds = f"{measurement.repeats} seeds"
    return [
        _by_way(rows, "error", f"{setting[0].upper()}{setting[1:]}: relative error", seeds)
        for setting, rows in by("setting", measurement.rows).items()
    ]


def mamba_orders_grids(measurement: Measurement) -> list[Grid]:
    """States of a Mamba channel by way and training: the mean over channels, layers and seeds, and the range."""
    needed = ("seed", "steps", "layer", "way", "states", "mean", "least", "most")
    require(measurement, "mamba_orders", needed, "way")
    steps = list(dict.fromkeys(int(row["steps"]) for row in measurement.rows))

    def said(rows: list[Row]) -> str:
        least, most = min(int(row["least"]) for row in rows), max(int(row["most"]) for row in rows)
        return f"{mean_of(rows, 'mean'):.1f} ({least} to {most})"

    lines = []
    for way, own in by("way", measurement.rows).items():
        lines.append((way, *(said([row for row in own if row["steps"] == step]) for step in steps)))
    heads = ("Hankel values", *(f"after {step} steps" if step else "at the start" for step in steps))
    caption = f"states of a channel, of {measurement.rows[0]['states']}: the mean and the range over channels"
    return [Grid(measurement.title, heads, tuple(lines), caption)]


def _by_way(rows: list[Row], column: str, title: str, caption: str) -> Grid:
    ranks = list(dict.fromkeys(int(row["rank"]) for row in rows))
    seeds = len({row["seed"] for row in rows})
    lines = []
    for way, own in by("way", rows).items():
        cells = [[float(row[column]) for row in own if row["rank"] == rank] for rank in ranks]
        said = (spread(cell) if len(cell) == seeds else f"refused {seeds - len(cell)}×" for cell in cells)
        lines.append((way, *said))
    return Grid(title, ("way", *(f"{rows[0]['order']} → {rank}" for rank in ranks)), tuple(lines), caption)


# The paper's own code without reduction, seed 42: mean of its test accuracies at steps 35 000 and 40 000.
REFERENCE = {256: 93.35, 28: 89.5}


def setting_grids(measurement: Measurement) -> list[Grid]:
    """Accuracies without compression, a row a variant and order: the mean of the last two evaluations."""
    needed = ("variant", "order", "seed", "steps", "before", "last", "seconds")
    require(measurement, "smnist_settings", needed, "variant")
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
    "results-smnist-time": "sMNIST",
    "results-smnist-choices": "sMNIST",
    "results-smnist-selection": "sMNIST",
    "results-scifar": "CIFAR10",
}
_TOP = 3  # of the seeds are in the paper's means


def in_paper(measurement: Measurement, variant: str) -> tuple[float, float] | None:
    """Final order and accuracy of what the paper has beside a variant: the mean of its three best seeds."""
    task = RESULTS.get(measurement.name, "")
    if variant not in _BESIDE.get(task, {}):
        return None
    label, method, column = _BESIDE[task][variant]
    order = read_paper(label).value(task, "CompreSSM", column, "order")
    accuracy = read_paper(label).value(task, method, column, "accuracy")
    return None if order is None or accuracy is None else (order.centre, accuracy.centre)


def by_variant(measurement: Measurement) -> dict[str, list[Row]]:
    """The rows of every variant, in the order of the file; missing columns are refused."""
    needed = ("variant", "seed", "steps", "initial_order", "order", "best", "last", "steps_s", "seconds", "cuts_s")
    study, _, task = measurement.name.partition("-")
    command = f"python studies/{study}.py {task}"
    measurement.require(measurement.name, needed=(*needed, "step_s"), words=("variant",), command=command)
    return by("variant", measurement.rows)


def result_grids(measurement: Measurement) -> list[Grid]:
    """Our own results, a row a variant: accuracy with its spread over seeds, orders, and times in the mean.

    The top three seeds are so by test, as the paper counts; means are of all seeds.
    """
    groups = by_variant(measurement)
    columns: list[_Column] = [
        ("training", lambda rows: str(rows[0]["variant"])),
        ("n → r", lambda rows: f"{mean_of(rows, 'initial_order'):.0f} → {_spread_if_any(rows, 'order', 0)}"),
        ("seeds", lambda rows: str(len(rows))),
        ("test accuracy", lambda rows: _spread_if_any(rows, "best")),
        ("top three by test", _top_three),
        ("at the end", lambda rows: _spread_if_any(rows, "last")),
        ("the paper", lambda rows: _paper(measurement, str(rows[0]["variant"]))),
        ("gradient steps", lambda rows: _mean_time(here(measurement, rows), "steps_s")),
        ("whole run", lambda rows: _mean_time(here(measurement, rows), "seconds")),
    ]
    caption = (
        f"test accuracy in percent where validation was best since the last cut; {measurement.rows[0]['steps']} steps; "
        f"{together_of(measurement)}; the top three seeds by test are "
        "counted as the paper counts its own"
    )
    return [Grid.of(measurement.title, groups.values(), columns, caption)]


def here(measurement: Measurement, rows: list[Row]) -> list[Row]:
    """Rows trained on the machine of the result, whose times alone compare."""
    machine = measurement.environment.machine
    return [row for row in rows if row.get("machine", machine) == machine]


def together_of(measurement: Measurement) -> str:
    """A clause on how many trainings ran at a time, and where else."""
    return f"{_together(here(measurement, measurement.rows))}{_elsewhere(measurement)}"


def _elsewhere(measurement: Measurement) -> str:
    """The trainings that have no part in the times."""
    others = [row for row in measurement.rows if row not in here(measurement, measurement.rows)]
    named = ", ".join(f"{row['variant']} with seed {row['seed']} on {row['machine']}" for row in others)
    return f", without those of {named}" if named else ""


def _paper(measurement: Measurement, variant: str) -> str:
    found = in_paper(measurement, variant)
    return "" if found is None else f"{found[1]:.1f} at {found[0]:.0f}"


def _together(rows: list[Row]) -> str:
    """A clause on how far times can be compared."""
    if not all("together" in row for row in rows):
        return "how many trainings ran at a time is not known of all, and times are of that"
    most = max((int(row["together"]) for row in rows), default=0)
    if most == 1:
        return "one training at a time"
    return f"up to {most} trainings at a time on one device, which is what their times are of"


def _top_three(rows: list[Row]) -> str:
    top = sorted((float(row["best"]) for row in rows), reverse=True)[:_TOP]
    return f"{fmean(top):.1f}" if len(top) == _TOP else ""


def _mean_time(rows: list[Row], column: str) -> str:
    """The mean of a time; empty where all rows were trained elsewhere."""
    return duration(mean_of(rows, column)) if rows else ""


def _spread_if_any(rows: list[Row], column: str, digits: int = 1) -> str:
    """Mean ± standard deviation, where seeds differ."""
    values = [float(row[column]) for row in rows]
    centre = f"{fmean(values):.{digits}f}"
    return centre if len(set(values)) == 1 else f"{centre} ± {stdev(values):.1f}"


def demo_grids(measurement: Measurement) -> list[Grid]:
    """The models of the demo, over their seeds; the others are compared with the first."""
    needed = ("model", "seed", "initial_order", "order", "accuracy", "seconds", "bounds")
    measurement.require("demo", needed=needed, words=("model", "bounds"), command="compressm demo")
    groups = list(by("model", measurement.rows).values())
    slowest = mean_of(groups[0], "seconds")
    columns: list[_Column] = [
        ("model", lambda rows: str(rows[0]["model"])),
        ("states", _orders),
        ("accuracy, %", lambda rows: spread((float(row["accuracy"]) for row in rows), 1)),
        ("seconds", lambda rows: spread((float(row["seconds"]) for row in rows), 1)),
        ("speed-up", lambda rows: f"{slowest / mean_of(rows, 'seconds'):.2f}"),
        ("bound of each cut", _bounds),
    ]
    caption = f"mean ± standard deviation over {len(groups[0])} seeds"
    return [Grid.of("Digits, 64 steps a sequence", groups, columns, caption)]


def _orders(rows: list[Row]) -> str:
    first, last = (mean_of(rows, name) for name in ("initial_order", "order"))
    return f"{last:.0f}" if first == last else f"{first:.0f} → {last:.0f}"


def _bounds(rows: list[Row]) -> str:
    first = str(rows[0]["bounds"])
    return "none: P is measured" if "none" in first else first


def demo_says(measurement: Measurement) -> list[str]:
    """Sentences on what the figures mean, whichever way they fall."""
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
        f"large one it is {lost:+.1f} points."
    ]


def kills_grids(measurement: Measurement) -> list[Grid]:
    """Trainings that were killed and resumed: a row a guard, with the phases in which the kills came."""
    needed = ("training", "guard", "kill", "phase", "same", "differs")
    require(measurement, "kills", needed, "guard", "phase", "differs", "device")

    def same(rows: list[Row]) -> str:
        ends = {row["training"]: row["same"] for row in rows}
        return f"{sum(map(int, ends.values()))} of {len(ends)}"

    def phases(rows: list[Row]) -> str:
        return ", ".join(f"{name} {len(found)}" for name, found in sorted(by("phase", rows).items()))

    columns: list[_Column] = [
        ("snapshots", lambda rows: {"none": "no guard"}.get(str(rows[0]["guard"]), f"in {rows[0]['guard']}")),
        ("kills", lambda rows: str(len(rows))),
        ("killed in", phases),
        ("resumed bit for bit", same),
    ]
    caption = f"{same(measurement.rows)} trainings, {len(measurement.rows)} kills"
    return [Grid.of(measurement.title, by("guard", measurement.rows).values(), columns, caption)]


def demo_spectra_grids(measurement: Measurement) -> list[Grid]:
    """The states of one layer through a training, a row a snapshot: how many, and how strong."""
    require(measurement, "demo-spectra", ("seed", "step", "order", "sigma"), "sigma")

    def sigma(row: Row) -> list[float]:
        return [float(value) for value in str(row["sigma"]).split()]

    columns: list[tuple[str, Callable[[Row], str]]] = [
        column("step"),
        column("states", "order"),
        ("largest σ", lambda row: f"{max(sigma(row)):.3g}"),
        ("smallest σ", lambda row: f"{min(sigma(row)):.3g}"),
        ("sum", lambda row: f"{sum(sigma(row)):.3g}"),
    ]
    caption = "Hankel singular values before a cut at that step, states after it"
    return [Grid.of(measurement.title, measurement.rows, columns, caption)]


GRIDS: dict[str, Callable[[Measurement], list[Grid]]] = {
    "one_shot": one_shot_grids,
    "hidden_system": hidden_system_grids,
    "deploy": deploy_grids,
    "error_bound_floor": error_bound_floor_grids,
    "loss_continuity": loss_continuity_grids,
    "demo": demo_grids,
    "demo-spectra": demo_spectra_grids,
    "kills": kills_grids,
    "smnist_settings": setting_grids,
    "imdb_mamba": imdb_mamba_grids,
    "lti_newcomers": lti_newcomers_grids,
    "selective_cuts": selective_cuts_grids,
    "mamba_orders": mamba_orders_grids,
    **dict.fromkeys(RESULTS, result_grids),
}
