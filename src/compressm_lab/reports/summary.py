"""One table over all tasks: the paper, its authors' code, and ours, in the paper's setting and with our own choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from compressm_lab.experiments import paper
from compressm_lab.experiments.kept import Kept
from compressm_lab.experiments.paper import Setting
from compressm_lab.experiments.recipes import Arm
from compressm_lab.reports.grid import NOTHING, Grid, order, plus_minus, steps
from compressm_lab.reports.study_tables import REFERENCE
from compressm_lab.runs.groups import Statistic
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.runs.paper import PaperItem, read_paper

_TOP = 3
_SEEDS = range(10)
_HEADS = ("task", "training", "the paper", "its authors' code", "ours in its setting", "ours with our own choices")


@dataclass(frozen=True)
class _Line:
    """A row: an arm of the paper's table, and the variant of one of our result files that stands beside it."""

    arm: Arm
    training: str
    steps: int
    result: str
    variant: str


def _lines(setting: Setting, taus: Sequence[float], result: str = "", cut: str = "") -> list[_Line]:
    """A model that is never cut, small ones from the start, models cut by τ, and by us; `cut` is of our variants."""

    def line(arm: Arm, training: str, variant: str) -> _Line:
        return _Line(arm, training, setting.steps, result, variant)

    finals = {tau: setting.finals[setting.taus.index(tau)] for tau in taus}
    sizes = [(setting.whole(), setting.order)]
    sizes += [(setting.uncut(final, f"τ = {tau:g}"), final) for tau, final in finals.items()]
    never = [line(arm, f"{states} states", f"{states} states") for arm, states in sizes]
    cuts = [line(setting.compressed(tau), f"cut, τ = {tau:g}", cut.format(final)) for tau, final in finals.items()]
    ours = [line(setting.ours(tau, final), f"our cuts to {final}", "") for tau, final in finals.items()]
    return never + cuts + ours


def summary_grid(results: Path, kept: Kept | None = None) -> Grid:
    """Accuracies of every method in the paper's setting and in ours; `results` is the folder of our result files."""
    kept = Kept.read() if kept is None else kept
    stated = read_paper("results")
    lines = [
        *_lines(paper.SMNIST, (0.02, 0.04), "results-smnist-falling", "gently to {}"),
        *_lines(paper.CIFAR10, (0.15,), "results-scifar", "four cuts to {}"),
        *_lines(paper.IMDB, (0.15, 0.07, 0.03)),
        *_lines(paper.LISTOPS, (0.15, 0.07)),
    ]
    # The paper has no cell for our own cuts: they have a row where they are trained.
    shown = [line for line in lines if line.arm.method != paper.OUR_WAY or kept.of(line.arm, _SEEDS)]
    rows = [*(_row(line, stated, kept, results) for line in shown), *_after_40_000(results)]
    return Grid("Results", _HEADS, tuple(rows))


def _row(line: _Line, stated: PaperItem, kept: Kept, results: Path) -> tuple[str, ...]:
    arm = line.arm
    accuracy, states = (stated.value(arm.task, arm.method, arm.column, name) for name in ("accuracy", "order"))
    theirs = plus_minus(accuracy, digits=1) + (f" at {order(states)}" if states else "")
    path = results / f"{line.result}.json"
    own = Measurement.read(path).rows if line.result and path.exists() else []
    ours = [row for row in own if row["variant"] == line.variant]
    in_its_setting = _counted(kept.of(arm, _SEEDS), line.steps)
    return arm.task, line.training, theirs, NOTHING, in_its_setting, _counted(ours, line.steps)


def _counted(rows: Sequence[Row], steps_of_paper: int) -> str:
    """The top three by test, the order after cuts, and the mean of all seeds; of up to three seeds the mean alone."""
    if not rows:
        return NOTHING
    tests = sorted((float(row["best"]) for row in rows), reverse=True)
    every, done = plus_minus(Statistic.of(tests), digits=1), int(rows[0]["steps"])
    said = ["1 seed" if len(tests) == 1 else f"{len(tests)} seeds"]
    if len(tests) > _TOP:
        said = [f"{every} of {said[0]}"]
    if done != steps_of_paper:
        said.append(f"{steps(done)} steps")
    cut = any(row["order"] != row["initial_order"] for row in rows)
    at = f" at {order(Statistic.of(float(row['order']) for row in rows))}" if cut else ""
    top = f"{fmean(tests[:_TOP]):.1f}" if len(tests) > _TOP else every
    return f"{top}{at} ({', '.join(said)})"


def _after_40_000(results: Path) -> list[tuple[str, ...]]:
    """The numbers known of the authors' code, which was run with 40 000 steps and without cuts."""
    path = results / "smnist_settings.json"
    if not path.exists():
        return []
    rows = Measurement.read(path).rows

    def ours(variant: str, states: int) -> str:
        own = [row for row in rows if (row["variant"], row["order"]) == (variant, states)]
        found = Statistic.of((float(row["before"]) + float(row["last"])) / 2 for row in own)
        return NOTHING if found is None else f"{plus_minus(found, digits=1)} ({found.count} seeds)"

    return [
        ("sMNIST, 40 000 steps", f"{n} states", NOTHING, f"{theirs:.1f} (1 seed)", NOTHING, ours("recipe", n))
        for n, theirs in REFERENCE.items()
    ]
