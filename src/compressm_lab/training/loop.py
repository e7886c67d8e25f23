"""SIGINT and SIGTERM are heard between two steps; a second one ends the process at once."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from compressm.compression import Cut, save_model
from compressm.compression.distributed import Processes, unwrapped
from compressm.saving.rebuilding import orders_of
from compressm_lab.data.task import Order, Task, TaskKind
from compressm_lab.runs.directory import RunDirectory, Status
from compressm_lab.runs.records import (
    CutRecord,
    Evaluation,
    PenaltyRecord,
    RestoredRecord,
    Spectrum,
    SplitName,
    Timing,
    TruncationRecord,
)
from compressm_lab.training.building import (
    build_compressor,
    build_model,
    build_optimizer,
    build_tracker,
    placed,
    products_in,
)
from compressm_lab.training.clock import Clock
from compressm_lab.training.config import ConfigError, Recipe
from compressm_lab.training.evaluation import evaluate, truncations
from compressm_lab.training.loggers import RunLogger, Silent
from compressm_lab.training.parallel import any_of, distributed, join
from compressm_lab.training.penalty import HeldPenalty, Penalty
from compressm_lab.training.plan import Plan
from compressm_lab.training.resuming import Resumable, checkpoints, is_finished, require_same_recipe
from compressm_lab.training.steps import Learner, Objective, Prepared, make_steps, task_objective


class Stop:
    """Called, it says whether a signal has come; `signal` is its name."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __call__(self) -> bool:
        return self.signal is not None


@contextmanager
def heard() -> Iterator[Stop]:
    """Within it the first signal is remembered; afterwards, and outside the main thread, all is as before."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: dict[signal.Signals, Any] = {}

    def remember(number: int, frame: FrameType | None) -> None:
        stop.signal = signal.Signals(number).name
        for which, handler in before.items():
            signal.signal(which, handler)

    for which in (signal.SIGINT, signal.SIGTERM):
        before[which] = signal.signal(which, remember)
    try:
        yield stop
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


class Interrupted(Exception):  # noqa: N818 - it is not an error
    """A signal came; everything is saved."""

    def __init__(self, signal: str, step: int, directory: Path) -> None:
        super().__init__(f"{signal} at step {step}: saved in {directory}, resume to go on")
        self.step, self.directory = step, directory


class Diverged(RuntimeError):  # noqa: N818 - read as a sentence
    """The loss is not finite."""


def train(
    recipe: Recipe,
    task: Task,
    directory: RunDirectory | Path | str,
    *,
    device: str | torch.device = "cpu",
    resume: bool = False,
    listener: RunLogger | None = None,
    objective: Objective | None = None,
    penalty: Penalty | None = None,
) -> RunDirectory:
    """Train as the recipe says and write everything into the directory; with `resume`, go on from its last checkpoint.

    A run that is finished stays as it is.
    On the CPU a run that was stopped and resumed ends with the same bits as one that was not. Another `objective`
    replaces the loss of the task in training, not in evaluation; `penalty` is what `recipe.regulariser` weighs.
    `compressm_lab.experiments.comparisons` makes both for recipes that ask for them.
    """
    _require_parts(recipe, objective, penalty)
    directory = directory if isinstance(directory, RunDirectory) else RunDirectory(directory)
    plan = Plan.of(recipe)
    if resume and is_finished(directory, recipe):
        return directory
    processes = Processes()
    with products_in(recipe.training.precision), heard() as stop:
        # What cannot be built leaves no folder behind.
        state = _build(recipe, task, torch.device(device), processes, objective, penalty)
        run = Trainer(recipe, plan, directory, listener or Silent(), state)
        if processes.is_first:
            _open(directory, recipe, resume)
        try:
            return run.go(stop, resume)
        except Interrupted:
            raise
        except KeyboardInterrupt:
            run.write_status("interrupted", message="a second signal: not saved")
            raise
        except BaseException as error:
            run.write_status("failed", message=f"{type(error).__name__}: {error}")
            raise


def _open(directory: RunDirectory, recipe: Recipe, resume: bool) -> None:
    if resume:
        require_same_recipe(directory, recipe)
    else:
        directory.begin(recipe.as_dict())


def _build(
    recipe: Recipe,
    task: Task,
    device: torch.device,
    processes: Processes,
    objective: Objective | None,
    penalty: Penalty | None,
) -> Resumable:
    task = placed(task, device)
    torch.manual_seed(recipe.seed)
    model = distributed(build_model(recipe.model, task).to(device), recipe, processes)
    optimizer = build_optimizer(model, recipe.training, device)
    order = Order(len(task.train), recipe.training.batch, recipe.seed)
    learner = Learner(model, optimizer, objective or task_objective(task.kind), task, order, recipe.training, processes)
    clock = Clock(device)
    if recipe.regulariser is not None and penalty is not None:
        learner.penalty = HeldPenalty(model, penalty, recipe.regulariser, clock, processes)

    def validate() -> float:
        with clock.phase("evaluation"):
            return evaluate(learner, task.validation).value

    compressor = build_compressor(recipe, model, optimizer, task, validate)
    tracker = build_tracker(recipe, model, task)
    return Resumable(learner, make_steps(learner, clock), compressor, tracker, clock)


def _require_parts(recipe: Recipe, objective: Objective | None, penalty: Penalty | None) -> None:
    """What the recipe asks for is there, and nothing that it does not weigh."""
    if (recipe.regulariser is None) != (penalty is None):
        given, wanted = ("no penalty", "one") if penalty is None else ("a penalty", "a recipe that weighs it")
        raise ConfigError(f"regulariser is {recipe.regulariser} with {given}, expected {wanted}")
    if recipe.distillation is not None and objective is None:
        raise ConfigError(f"distillation is {recipe.distillation} without an objective, expected that of its teacher")


@dataclass
class Trainer:
    """A recipe under way."""

    recipe: Recipe
    plan: Plan
    directory: RunDirectory
    listener: RunLogger
    state: Resumable
    step: int = 0
    timed: int = 0  # the last step whose time is in a record

    @property
    def is_first(self) -> bool:
        return self.state.learner.processes.is_first

    def go(self, stop: Stop, resume: bool) -> RunDirectory:
        """All that is left of the run."""
        state = self.state
        self._prepare()
        if resume:
            self.step, self.timed = state.load(self.directory)
        join(state.learner.processes, self.recipe.seed, self.step)
        if self.is_first:
            # A run that begins anew writes the spectra of step 0 too.
            self.directory.rewind(self.step or -1)
            self.listener.begins(self.recipe, self.plan, self.step)
        self.write_status("running")
        if self.step == 0 and state.tracker is not None:
            self._record_spectra()
        while self.step < self.plan.steps:
            goal = self.plan.next_after(self.step)
            self._run_to(goal, stop)
            self._require_finite()
            if self.step == goal:
                self._do_what_is_due()
            self._heed(stop)
        self._finish(stop)
        return self.directory

    def _heed(self, stop: Stop) -> None:
        """End, with everything saved, where a signal has come to one of the processes."""
        if any_of(self.state.learner.processes, stop()):
            self._save()
            self.write_status("interrupted", message=stop.signal or "")
            raise Interrupted(stop.signal or "", self.step, self.directory.path)

    def _prepare(self) -> None:
        """What an objective does before the first step; where a run goes on its time has been counted."""
        learner, clock = self.state.learner, self.state.clock
        if isinstance(learner.objective, Prepared):
            with clock.phase("teacher"):
                learner.objective.prepare(learner.task, learner.device, learner.autocast())

    def _run_to(self, goal: int, stop: Stop) -> None:
        try:
            with self.state.clock.phase("steps"):
                self.step = self.state.steps.run(self.step + 1, goal, stop)
        except ValueError as error:  # a layer, or a penalty, met weights that are not finite
            if _all_finite(self.state.learner.model):
                raise
            raise self._diverged("the weights are", f"between steps {self.step} and {goal}") from error

    def _do_what_is_due(self) -> None:
        plan, step = self.plan, self.step
        if step in plan.spectra:
            self._record_spectra()
        if step in plan.evaluations:
            self._record_training()
        if step in plan.cuts or step in plan.judgements:
            self._cut()
        if step in plan.evaluations:
            self._record_penalty()
            self._evaluate("validation")
            self._evaluate("test")
            self._record_timing()
            self.write_status("running")
        if step in plan.checkpoints:
            self._save()

    def _cut(self) -> None:
        state = self.state
        assert state.compressor is not None
        before = self._orders()
        with state.clock.phase("cut"), state.clock.stages():
            events = state.compressor.step(self.step)
        if not events:
            if self.is_first and self.step in self.plan.cuts:
                self.listener.kept(self.step)
            return
        # What follows runs at other orders.
        self._record_timing(before)
        state.steps.renew()
        if self.is_first:
            for event in events:
                kind = CutRecord if isinstance(event, Cut) else RestoredRecord
                self.directory.append(kind(**event.as_dict()))
                self.listener.happened(event)

    def _evaluate(self, split: SplitName) -> None:
        learner = self.state.learner
        with self.state.clock.phase("evaluation"):
            score = evaluate(learner, getattr(learner.task, split))
        self._append(split, score.loss, score.accuracy)

    def _record_training(self) -> None:
        learner, steps = self.state.learner, self.state.steps.totals().steps
        sums = torch.tensor(self.state.steps.totals()[1:], dtype=torch.float64)
        loss, hits, asked = learner.processes.total(sums).tolist()
        if steps:
            accuracy = None if learner.task.kind is TaskKind.REGRESS else hits / asked
            self._append("train", loss / (steps * learner.processes.count), accuracy)
        self.state.steps.clear()

    def _append(self, split: SplitName, loss: float, accuracy: float | None) -> None:
        if not self.is_first:
            return
        clock, rate = self.state.clock, self.recipe.training.rate(self.step)
        record = Evaluation(self.step, split, loss, accuracy, rate, clock.total, clock.in_steps)
        self.directory.append(record)
        self.listener.evaluated(record)

    def _record_penalty(self) -> None:
        penalty = self.state.learner.penalty
        if penalty is not None and self.is_first:
            config = penalty.config
            numbers = (penalty.value, config.beta, penalty.found_at, penalty.evaluations, penalty.seconds)
            self._compare(PenaltyRecord(self.step, config.kind, *numbers))

    def _compare(self, *records: PenaltyRecord | TruncationRecord) -> None:
        self.directory.append(*records)
        for record in records:
            self.listener.compared(record)

    def _truncate(self, stop: Stop) -> None:
        """All of it or, where a run that was stopped had come this far, nothing."""
        if self.recipe.truncation is None or self.directory.records(TruncationRecord):
            return
        with self.state.clock.phase("truncation"):
            found = []
            for record in truncations(self.recipe, self.state.learner, self.step):
                found.append(record)
                self._heed(stop)
        if found and self.is_first:
            self._compare(*found)

    def _record_spectra(self) -> None:
        tracker = self.state.tracker
        assert tracker is not None
        with self.state.clock.phase("spectrum"):
            found = tracker.step(self.step)
        if found is not None and self.is_first:
            for module, sigma in found.items():
                mean = sigma.reshape(-1, sigma.shape[-1]).mean(0).tolist()
                self.directory.append(Spectrum(self.step, module, mean, tracker.bounds[-1][module]))

    def _orders(self) -> dict[str, int]:
        return orders_of(unwrapped(self.state.learner.model))

    def _record_timing(self, orders: dict[str, int] | None = None) -> None:
        """Of the phases since the record before; `orders` are those that the steps ran at, where others now."""
        orders = orders or self._orders()
        done, self.timed = self.step - self.timed, self.step
        seconds = self.state.clock.take()
        if self.is_first:
            self.directory.append(Timing(self.step, done, orders, seconds))

    def _require_finite(self) -> None:
        """Of loss and weights: a finite loss may have had a gradient that was not."""
        totals, model = self.state.steps.totals(), self.state.learner.model
        if self.is_first and totals.steps:
            self.listener.reached(self.step, totals.loss / totals.steps)
        if not math.isfinite(totals.loss) or not _all_finite(model):
            what = "the weights are" if math.isfinite(totals.loss) else "the loss is"
            raise self._diverged(what, f"at step {self.step}")

    def _diverged(self, what: str, when: str) -> Diverged:
        saved = checkpoints(self.directory)
        last = f"the last good checkpoint is {saved[0]}" if saved else "there is no checkpoint yet"
        smaller = "learning rate" if self.recipe.regulariser is None else "learning rate, or beta of the penalty,"
        return Diverged(f"{what} not finite {when}; {last}. A smaller {smaller} may help")

    def _save(self) -> None:
        if self.is_first:
            with self.state.clock.phase("checkpoint"):
                keep = self.recipe.training.keep_checkpoints
                self.state.save(self.directory, self.step, self.timed, keep=keep)

    def _finish(self, stop: Stop) -> None:
        self._truncate(stop)
        if self.state.clock.peek():
            self._record_timing()  # of the last checkpoint
        if self.is_first:
            save_model(unwrapped(self.state.learner.model), self.directory.model)
        self.write_status("finished")

    def write_status(self, state: str, message: str = "") -> None:
        if self.is_first:
            self.directory.write_status(Status(state, self.step, self.plan.steps, message))  # type: ignore[arg-type]


def _all_finite(model: nn.Module) -> bool:
    return bool(torch.stack([weight.isfinite().all() for weight in model.parameters()]).all())
