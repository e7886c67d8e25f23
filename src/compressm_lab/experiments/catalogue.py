"""Tables and figures of the paper by label, and four ablations of our own, each with the arms that it needs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from compressm.errors import did_you_mean
from compressm_lab.experiments import paper
from compressm_lab.experiments.engine import Campaign
from compressm_lab.experiments.kept import Kept
from compressm_lab.experiments.paper import QUICK, QUICK_DEEP, QUICK_MAMBA, SMNIST, Setting
from compressm_lab.experiments.recipes import Arm
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.paper import Compared, Exhibit, paper_labels, read_paper
from compressm_lab.runs.run import read_run
from compressm_lab.training.config import ConfigError

# Pictures of runs on the disk that a report knows how to draw.
Picture = Literal["outcome", "curves", "spectra", "hankel", "timer", "seeds"]
Arms = tuple[Arm, ...]
_SEEDS, _MANY, _QUICK_SEEDS = 5, 10, 2
_QUICK = (
    "Quick: scikit-learn's 8 × 8 digits in the place of every data set, {steps} steps, orders from {order} down. It "
    "shows that every part works, not what the paper claims."
)


@dataclass(frozen=True)
class Experiment:
    """A table or figure: the trainings it is made of, how many seeds of each, and the picture that shows them.

    `measures` names a benchmark instead of trainings. `head`: the share of training that pictures of spectra show.
    """

    label: str
    title: str
    arms: Arms
    seeds: int
    picture: Picture = "outcome"
    quantity: Literal["accuracy", "best"] = "accuracy"
    measures: str = ""
    head: float = 1.0

    def only(self, words: Sequence[str]) -> Experiment:
        """Keep the arms whose task, method or folder is one of the words, and those that they wait for."""
        named = {word: [arm for arm in self.arms if word in (arm.task, arm.method, arm.folder)] for word in words}
        if unknown := [word for word, found in named.items() if not found]:
            known = list(dict.fromkeys(word for arm in self.arms for word in (arm.task, arm.method)))
            folders = [arm.folder for arm in self.arms]
            raise ConfigError(
                f"{unknown[0]!r} is no part of {self.label}; expected {', '.join(known)}, or the folder of an arm, such"
                f" as {folders[0]}{did_you_mean(unknown[0], [*known, *folders])}"
            )
        chosen = {id(arm): arm for found in named.values() for arm in found}
        first = {arm.folder for one in chosen.values() for arm in (one.beside, one.teacher) if arm is not None}
        return replace(self, arms=tuple(arm for arm in self.arms if id(arm) in chosen or arm.folder in first))

    def plan(self, folder: Path, seeds: int | None = None) -> Campaign:
        """Plan its trainings below `folder`/runs, where other experiments may share them."""
        return Campaign(self.arms, range(seeds or self.seeds), folder / "runs")


def exhibit(shown: Experiment, plan: Campaign, *, quick: bool) -> Exhibit:
    """Put all runs on the disk, finished or not, into the cells of the paper's table or figure."""
    kept = Kept() if quick else Kept.read()
    cells = [_cell(shown, plan, kept, *pair, quick=quick) for pair in plan.resolved()]
    stated = read_paper(shown.label) if shown.label in paper_labels() else None
    recipes = [arm.read(0) for arm in shown.arms if quick and arm.known]
    steps = max((recipe.training.steps for recipe in recipes), default=0)
    order = max((recipe.model.order for recipe in recipes), default=0)
    note = _QUICK.format(steps=steps, order=order) if quick else ""
    return Exhibit(shown.label, shown.title, shown.picture, shown.quantity, tuple(cells), stated, note, shown.head)


def _cell(shown: Experiment, plan: Campaign, kept: Kept, arm: Arm, resolved: Arm | None, *, quick: bool) -> Compared:
    """The cell of an arm: its runs on the disk, and kept rows of the seeds that have no finished run there."""
    seeds = plan.seeds_of(arm)
    resolved = resolved or kept.filled(arm, seeds)
    folders = [] if resolved is None else [plan.folder(resolved, seed) for seed in seeds]
    runs = tuple(read_run(RunDirectory(folder)) for folder in folders if (folder / "status.json").is_file())
    finished = {run.seed for run in runs if run.finished}
    rows = () if resolved is None else kept.of(resolved, [seed for seed in seeds if seed not in finished])
    teachers = [plan.finished_run(arm.teacher, seed) for seed in seeds] if arm.teacher else []
    # The folder of an arm whose order is not known yet is not its own.
    word = arm.folder if arm.known else arm.task
    command = ["compressm", "reproduce", shown.label, "--only", word, *(["--quick"] if quick else [])]
    missing = "" if runs or rows else f"not trained: {shlex.join(command)}"
    before = tuple(filter(None, teachers))
    return Compared(arm.task, arm.method, arm.column, runs, missing, arm.truncated, before, rows)


Build = Callable[[bool], Arms]  # True: the quick version
_SMNIST, _DEEP, _LISTOPS = (SMNIST, QUICK), (paper.CIFAR10, QUICK_DEEP), (paper.LISTOPS, QUICK_DEEP)
_MAMBA, _MAMBA_CIFAR = (paper.MAMBA_IMDB, QUICK_MAMBA), (paper.MAMBA_CIFAR, QUICK_MAMBA)
_TASKS = (paper.CIFAR10, paper.LISTOPS, paper.AAN, paper.IMDB, paper.PATHFINDER, SMNIST)
_MADE: dict[str, Callable[[bool], Experiment]] = {}


def _on(sizes: tuple[Setting, Setting], *builds: Callable[[Setting], Arms]) -> Build:
    """Build the arms of a task, at full size or quick, by one or several functions."""
    return lambda quick: tuple(arm for build in builds for arm in build(sizes[quick]))


def _both(*builds: Build) -> Build:
    return lambda quick: tuple(arm for build in builds for arm in build(quick))


def _sizes(sizes: tuple[Setting, Setting], orders: tuple[int, ...], quick_orders: tuple[int, ...] = (16,)) -> Build:
    """Build models that are never cut."""
    return lambda quick: paper.sizes(sizes[quick], quick_orders if quick else orders)


def _add(label: str, seeds: int, build: Build, title: str = "", **options: Any) -> None:
    """Add a table or figure; one of the paper has the title that its label has there."""

    def make(quick: bool) -> Experiment:
        wanted = min(seeds, _QUICK_SEEDS) if quick else seeds
        return Experiment(label, title or read_paper(label).title, build(quick), wanted, **options)

    _MADE[label] = make


def _results(quick: bool) -> Arms:
    # As many seeds as the paper has: ten for sMNIST.
    full = (*(replace(task, seeds=_SEEDS) for task in _TASKS if task is not SMNIST), SMNIST)
    settings = (QUICK, QUICK_DEEP) if quick else full
    return tuple(arm for setting in settings for arm in paper.tolerances(setting))


_nuclear = _on(_SMNIST, paper.tolerances, paper.nuclear_norm)
_distillation = _on(_DEEP, paper.tolerances, paper.distillation)
_MAMBA_SIZES = ((8, 16, 32, 64, 128), (4, 16, 32))
_add("results", _MANY, _results)
_add("results-max", _MANY, _results, quantity="best")
_add("red-perf-all", _MANY, _results)
_add("speedup", _SEEDS, _on(_DEEP, paper.tolerances))
_add("combined", _MANY, _both(_nuclear, _distillation))
_add("hnn_vs_compressm", _MANY, _nuclear)
_add("knowledge-distillation", _MANY, _distillation)
_add("pragmatic", _SEEDS, _both(_on(_SMNIST, paper.pragmatic), _on(_DEEP, paper.pragmatic)))
_add("hankel_analysis", 1, lambda q: paper.every_step(_SMNIST[q], 8, 100 if q else 25_000), picture="hankel")
_add("hank_mnist", 1, _sizes(_SMNIST, (64,)), picture="hankel")
_add("hank_imdb", 1, _sizes((paper.IMDB, QUICK), (64,)), picture="hankel")
_add("hank_cifar", 1, _sizes(_DEEP, (57,)), picture="hankel")
_add("hank_listops", 1, _sizes(_LISTOPS, (56,)), picture="hankel")
_add("sanity", _MANY, _on(_SMNIST, paper.selections, paper.references), picture="curves")
_add("sanity_hankel", 1, _on(_SMNIST, paper.selections), picture="spectra", head=0.25)
_add("num_red", _MANY, _on(_SMNIST, paper.numbers, paper.references), picture="curves")
_add("num_red_hankel", 1, lambda q: paper.numbers(_SMNIST[q])[:4], picture="spectra", head=0.25)
_add("red_window", _MANY, _on(_SMNIST, paper.windows, paper.references), picture="curves")
_add("red_window_hankel", 1, lambda q: paper.windows(_SMNIST[q])[:4], picture="spectra")
_add("timer", 1, lambda q: paper.timer(_SMNIST[q], 8, 8), picture="timer")
_add("reduction-complexity", 1, lambda q: (), measures="reduction")
_add("mamba-cifar", _SEEDS, _sizes(_MAMBA_CIFAR, *_MAMBA_SIZES))
_add("mamba-imdb", _SEEDS, _both(_on(_MAMBA, paper.mamba_cuts), _sizes(_MAMBA, *_MAMBA_SIZES)), picture="seeds")
_add("mamba-speedup", _SEEDS, _both(lambda q: paper.mamba_cuts(_MAMBA[q])[::2], _sizes(_MAMBA, (16, 128), (4, 32))))
_add("fold", _MANY, _on(_SMNIST, paper.folds), "Ours: conjugate modes folded or not", picture="curves")
_add("gramian", _MANY, _on(_SMNIST, paper.gramians), "Ours: Gramians for white noise or measured", picture="curves")
_add("moments", _MANY, _on(_SMNIST, paper.moments), "Ours: what happens to the optimizer's moments", picture="curves")
_add(
    "policy",
    _MANY,
    _on(_LISTOPS, paper.policies),
    "Ours: a tolerance for every layer, or one budget of as many states",
    picture="curves",
)


def experiment_names() -> list[str]:
    """Labels of the paper, in their order of dependence, then our own."""
    return list(_MADE)


def find_experiment(name: str, *, quick: bool = False) -> Experiment:
    """Find an experiment by its label; `quick` is a size that a CPU trains in minutes."""
    if name not in _MADE:
        hint = did_you_mean(name, experiment_names())
        raise ConfigError(
            f"{name!r} is not a table or figure; expected LIST or one of {', '.join(experiment_names())}{hint}"
        )
    return _MADE[name](quick)
