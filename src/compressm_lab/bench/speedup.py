"""Predict how much faster cuts make a training, from the cost of steps, evaluations and cuts by order (app:time).

T_base = E (s t_train(n₀) + t_eval(n₀))
T_red = Σₖ Eₖ (s t_train(nₖ) + t_eval(nₖ)) + Σᵢ (t_cut(nᵢ₋₁) + t_recapture)          S = T_base / T_red
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from compressm.compression import CompressionError
from compressm.compression.distributed import Processes
from compressm.control import ControlError
from compressm_lab.bench.timing import Progress, seconds, silent, threads_for
from compressm_lab.data.task import Order, Task
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.runs.run import Run, read_run
from compressm_lab.training import Diverged, Interrupted, Recipe, train
from compressm_lab.training.building import build_compressor, build_model, build_optimizer, placed, products_in
from compressm_lab.training.clock import Clock
from compressm_lab.training.config import POLICIES, CompressionConfig, WhenConfig
from compressm_lab.training.evaluation import evaluate
from compressm_lab.training.plan import Plan
from compressm_lab.training.steps import Learner, Steps, make_steps, task_objective


@dataclass(frozen=True)
class Costs:
    """Seconds at the orders that were measured, rising; between orders interpolated linearly, outside as at the end.

    `train` is one gradient step, `evaluate` one evaluation, `cut` one cut from that order; `recapture` is what a CUDA
    graph takes to be recorded anew, in the place of the paper's compilation, and 0 on a CPU.
    """

    orders: tuple[float, ...]
    train: tuple[float, ...]
    evaluate: tuple[float, ...]
    cut: tuple[float, ...]
    recapture: float = 0.0

    def __post_init__(self) -> None:
        lengths = {len(column) for column in (self.orders, self.train, self.evaluate, self.cut)}
        if len(lengths) != 1 or list(self.orders) != sorted(set(self.orders)):
            raise ValueError(f"costs of orders {self.orders}: expected rising orders and one value for each")

    def at(self, column: Sequence[float], order: float) -> float:
        """The value of one of the columns at any order."""
        return float(np.interp(order, self.orders, column))


@dataclass(frozen=True)
class Leg:
    """A part of training at one order: so many gradient steps and evaluations."""

    order: float
    steps: int
    evaluations: float


@dataclass(frozen=True)
class Prediction:
    """Seconds of the training that is never cut, and of the one that is, by what it does."""

    whole: float
    training: float
    evaluation: float
    cuts: float
    recapture: float

    @property
    def reduced(self) -> float:
        return self.training + self.evaluation + self.cuts + self.recapture

    @property
    def speed_up(self) -> float:
        return self.whole / self.reduced


def predict(costs: Costs, stretches: Sequence[Leg]) -> Prediction:
    """Predict the seconds of a training whose order falls from stretch to stretch."""
    first = stretches[0].order
    steps = sum(stretch.steps for stretch in stretches)
    evaluations = sum(stretch.evaluations for stretch in stretches)
    return Prediction(
        whole=steps * costs.at(costs.train, first) + evaluations * costs.at(costs.evaluate, first),
        training=sum(stretch.steps * costs.at(costs.train, stretch.order) for stretch in stretches),
        evaluation=sum(stretch.evaluations * costs.at(costs.evaluate, stretch.order) for stretch in stretches),
        cuts=sum(costs.at(costs.cut, stretch.order) for stretch in stretches[:-1]),
        recapture=costs.recapture * (len(stretches) - 1),
    )


def stretches_of(path: Sequence[tuple[int, float]], steps: int, evaluations: Sequence[int]) -> list[Leg]:
    """Split a training at the (step, order from there on) of `path`; a cut comes before the evaluation of its step."""
    ends = [step for step, _ in path[1:]] + [steps]
    found = []
    for (begin, order), end in zip(path, ends, strict=True):
        inside = [step for step in evaluations if begin <= step < end or step == end == steps]
        found.append(Leg(order, end - begin, len(inside)))
    return found


_SAMPLE_S = 0.2  # of gradient steps in a row
_REDUCTION = ("cut", "spectrum", "optimizer")


class NotChecked(Exception):  # noqa: N818 - read as a sentence
    """The trainings of the check did not come to their end; `measurement` is all but the check."""

    def __init__(self, measurement: Measurement, why: Exception) -> None:
        stopped = isinstance(why, Interrupted)
        super().__init__("stopped before the check was done" if stopped else f"the check failed: {why}")
        self.measurement, self.stopped = measurement, stopped


@dataclass
class Bench:
    """A recipe at one order, ready to take steps; a sample of them is so long that a clock can tell."""

    learner: Learner
    steps: Steps
    recipe: Recipe
    done: int = 0
    together: int = 1

    @classmethod
    def of(cls, recipe: Recipe, task: Task, order: int, device: torch.device) -> Bench:
        """Build model, optimizer and steps as training does."""
        torch.manual_seed(recipe.seed)
        recipe = replace(recipe, model=replace(recipe.model, order=order), spectra=None)
        model = build_model(recipe.model, task).to(device)
        optimizer = build_optimizer(model, recipe.training, device)
        drawn = Order(len(task.train), recipe.training.batch, recipe.seed)
        objective = task_objective(task.kind)
        learner = Learner(model, optimizer, objective, task, drawn, recipe.training, Processes())
        return cls(learner, make_steps(learner, Clock(device)), recipe)

    def run(self, count: int) -> None:
        """Take so many gradient steps."""
        self.steps.run(self.done + 1, self.done + count, lambda: False)
        self.done += count

    def warm_up(self) -> None:
        """Run until steps are recorded on a GPU; an evaluation, too, is slow the first time."""
        self.run(5)
        self.evaluation_seconds()
        self.together = max(1, round(_SAMPLE_S / max(1e-6, seconds(lambda: self.run(2), self.learner.device) / 2)))

    def step_seconds(self) -> float:
        """The time of one step, in the mean over a sample."""
        return seconds(lambda: self.run(self.together), self.learner.device) / self.together

    def evaluation_seconds(self) -> float:
        """The time to evaluate validation and test, as a training does it."""
        splits = (self.learner.task.validation, self.learner.task.test)
        return seconds(lambda: [evaluate(self.learner, split) for split in splits], self.learner.device)


def measure_costs(
    recipe: Recipe, task: Task, orders: Sequence[int], device: torch.device, *, repeats: int, progress: Progress
) -> Costs:
    """Measure all orders in turns: what else a machine does falls on all alike. A cut from the smallest leaves half."""
    task, rising = placed(task, device), sorted(set(orders))
    below = dict(zip(rising, [max(1, rising[0] // 2), *rising], strict=False))
    # (step, evaluation, cut) of every turn.
    found: dict[int, list[tuple[float, float, float]]] = {order: [] for order in rising}
    with products_in(recipe.training.precision):
        _cut_seconds(recipe, task, rising[0], below[rising[0]], device)  # what libraries load at a first cut
        benches = {order: Bench.of(recipe, task, order, device) for order in rising}
        for bench in benches.values():
            bench.warm_up()
        for turn in range(repeats):
            progress(f"{recipe.name}, n = {', '.join(map(str, rising))}, turn {turn + 1} of {repeats}")
            for order, bench in benches.items():
                cut = _cut_seconds(recipe, task, order, below[order], device)
                found[order].append((bench.step_seconds(), bench.evaluation_seconds(), cut))
        recapture = statistics.median(_recapture(bench) for bench in benches.values())
    middle = [tuple(map(statistics.median, zip(*turns, strict=True))) for turns in found.values()]
    steps, evaluations, cuts = zip(*middle, strict=True)
    return Costs(tuple(map(float, rising)), steps, evaluations, cuts, recapture)


def measure_speedup(
    recipe: Recipe,
    task: Task,
    *,
    orders: Sequence[int],
    path: Sequence[tuple[int, int]] | None = None,
    check: bool = True,
    device: str = "cpu",
    repeats: int = 9,
    progress: Progress = silent,
) -> Measurement:
    """A row an order, then one for the schedule of `path`, (step, order from there on), and one for the check.

    Raises NotChecked, with what was measured, if a training of the check is stopped, diverges or cannot be cut.
    """
    where = torch.device(device)
    title = f"{recipe.name}: what a step, an evaluation and a cut cost, and the speed-up that follows"
    named: Row = {"recipe": recipe.name, "device": device}
    with threads_for(where):
        costs = measure_costs(recipe, task, orders, where, repeats=repeats, progress=progress)
        rows: list[Row] = []
        for order, step, evaluation, cut in zip(costs.orders, costs.train, costs.evaluate, costs.cut, strict=True):
            found: Row = {"order": order, "train_s": step, "evaluate_s": evaluation, "cut_s": cut}
            rows.append({"what": "costs", **named, **found, "recapture_s": costs.recapture})
        if path is not None:
            rows.append({"what": "schedule", **named, **_predicted(recipe, costs, path)})
        if check:
            progress(f"{recipe.name}, trained with its cuts and without")
            try:
                rows.append({"what": "schedule", **named, **_checked(recipe, task, costs, where)})
            except (Interrupted, Diverged, CompressionError, ControlError) as error:
                raise NotChecked(Measurement("speedup", title, repeats, rows), error) from None
        return Measurement("speedup", title, repeats, rows)


def _predicted(recipe: Recipe, costs: Costs, path: Sequence[tuple[int, float]]) -> Row:
    plan = Plan.of(recipe)
    stretches = stretches_of(path, plan.steps, plan.evaluations)
    found = predict(costs, stretches)
    return {
        "orders": " → ".join(f"{stretch.order:g}" for stretch in stretches),
        "steps": sum(stretch.steps for stretch in stretches),
        "whole_s": found.whole,
        "training_s": found.training,
        "evaluation_s": found.evaluation,
        "cuts_s": found.cuts,
        "recaptures_s": found.recapture,
        "speedup": found.speed_up,
    }


def _checked(recipe: Recipe, task: Task, costs: Costs, where: torch.device) -> Row:
    """Train the recipe with its cuts and without; predict the time of the cuts that came of it."""
    runs = []
    plain = replace(recipe, spectra=None)  # the formula does not count spectra
    for one in (plain, replace(plain, compression=None)):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(read_run(train(one, task, Path(folder) / "run", device=where)))
    return _predicted(recipe, costs, _mean_path(runs[0])) | _measured(*runs)


def _recapture(bench: Bench) -> float:
    """The extra time of four steps when the graph is recorded anew among them; 0 without a graph."""
    if bench.learner.device.type != "cuda":
        return 0.0
    times = []
    for _ in range(3):
        bench.steps.renew()
        times.append(seconds(lambda: bench.run(4), bench.learner.device) - 4 * bench.step_seconds())
    return max(0.0, statistics.median(times))


def _cut_seconds(recipe: Recipe, task: Task, order: int, rank: int, device: torch.device) -> float:
    """The time of one cut, as the recipe cuts, of a model that has trained a little."""
    options = recipe.compression or CompressionConfig(rho=1.0, when=WhenConfig(steps=(1,)))
    plain = dict.fromkeys((*POLICIES, "loss_batches"), None) | {"order": rank}
    cut = replace(options, **plain, gate=1.0, rollback=None, when=WhenConfig(steps=(1,)))  # type: ignore[arg-type]
    bench = Bench.of(replace(recipe, compression=cut), task, order, device)
    bench.run(2)
    parts = bench.learner.model, bench.learner.optimizer, task
    compressor = build_compressor(bench.recipe, *parts, evaluate=lambda: 0.0, loss=lambda model: 0.0)
    assert compressor is not None
    return seconds(lambda: compressor.step(1), device)


def _mean_path(run: Run) -> list[tuple[int, float]]:
    """The steps at which orders changed, each with the mean order over layers from there on."""
    paths = run.order_paths.values()
    found = []
    for step in sorted({step for path in paths for step, _ in path}):
        orders = [[order for begin, order in path if begin <= step][-1] for path in paths]
        found.append((step, sum(orders) / len(orders)))
    return found


def _measured(reduced: Run, whole: Run) -> Row:
    """The times of real trainings, checkpoints left out."""
    wanted = ("steps", "data", "evaluation", *_REDUCTION, "capture")
    spent, before = (
        {phase: sum(timing.seconds.get(phase, 0.0) for timing in run.timings) for phase in wanted}
        for run in (reduced, whole)
    )
    total, base = sum(spent.values()), sum(before.values())
    return {
        "measured_whole_s": base,
        "measured_training_s": spent["steps"] + spent["data"],
        "measured_evaluation_s": spent["evaluation"],
        "measured_cuts_s": sum(spent[phase] for phase in _REDUCTION),
        "measured_recaptures_s": spent["capture"],
        "measured_speedup": base / total,
    }
