"""The training loop: run steps up to the next due one, then cut, evaluate, record and save as the plan says; resume."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from compressm.compression import Compressor, Cut, Decision, HankelTracker, Restored, save_model
from compressm.compression.distributed import Processes, unwrapped
from compressm.control import ControlError
from compressm.errors import CompressionError, LostProcessError, SavingError
from compressm.saving.checkpoints import load_checkpoint, save_checkpoint
from compressm.saving.rebuilding import orders_of
from compressm_lab.data.task import Order, Task
from compressm_lab.runs import records
from compressm_lab.runs.directory import RunDirectory, RunState, Status, recipe_digest
from compressm_lab.runs.lock import LockLostError
from compressm_lab.runs.records import RunError
from compressm_lab.runs.run import read_run
from compressm_lab.training import building
from compressm_lab.training.clock import Clock, load
from compressm_lab.training.config import ConfigError, Recipe
from compressm_lab.training.evaluation import evaluate, loss_on, truncations
from compressm_lab.training.loggers import RunLogger, Silent
from compressm_lab.training.penalty import HeldPenalty, Penalty
from compressm_lab.training.plan import Plan
from compressm_lab.training.resuming import require_records, require_same_files, warn_if_moved
from compressm_lab.training.steps import (
    Learner,
    Objective,
    Steps,
    distributed,
    join,
    make_steps,
    naming_lost,
    training_objective,
)

_NAME = re.compile(r"step-(\d+)\.pt")


def is_finished(directory: RunDirectory, recipe: Recipe) -> bool:
    """Tell if the run in the folder is finished; a run of another recipe, and a damaged one, are refused."""
    if directory.finished:
        require_same_recipe(directory, recipe)
        run = read_run(directory)
        _ = run.penalties, run.truncations, run.decisions  # as a report reads them
    return directory.finished


def require_same_recipe(directory: RunDirectory, recipe: Recipe) -> None:
    """Refuse to continue a run of another recipe."""
    mine = json.loads(json.dumps(recipe.as_dict()))
    if changed := "; ".join(differences(directory.config(), mine)):
        raise ConfigError(f"{directory.path} is a run of another recipe: {changed}")


def require_recipe_of(checkpoint: Path, extra: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another recipe, or one edited since; earlier versions did not store it there."""
    trained = extra.get("recipe")
    if trained is not None and (changed := "; ".join(differences(json.loads(trained), config))):
        raise ConfigError(f"{checkpoint} was trained by another recipe than config.json says: {changed}")


def differences(stored: Any, mine: Any, key: str = "") -> Iterator[str]:
    """Describe each value that differs between two recipes, given as plain values."""
    if isinstance(stored, dict) and isinstance(mine, dict):
        for name in sorted({*stored, *mine}):
            yield from differences(stored.get(name), mine.get(name), f"{key}.{name}".strip("."))
    elif stored != mine:
        yield f"{key} was {stored!r:.200} and is {mine!r:.200}"


def checkpoints(directory: RunDirectory) -> list[Path]:
    """Checkpoints of a run, newest first; a file in the place of their folder is refused."""
    if directory.checkpoints.exists() and not directory.checkpoints.is_dir():
        raise RunError(f"{directory.checkpoints} is a file, expected the folder of checkpoints: move it away")
    return sorted((path for path in directory.checkpoints.glob("*.pt") if _NAME.fullmatch(path.name)), reverse=True)


@dataclass
class Stop:
    """The name of the first signal that came; calling it tells if one has."""

    signal: str = ""

    def __call__(self) -> bool:
        return bool(self.signal)


@contextmanager
def catching_signals() -> Iterator[Stop]:
    """A context that remembers the first SIGINT, SIGTERM or SIGHUP; a second one ends the process at once.

    Outside the main thread nothing is caught, and a SIGHUP that nohup ignores stays ignored.
    """
    stop = Stop()
    before: dict[signal.Signals, Any] = {}

    def remember(number: int, frame: FrameType | None) -> None:
        if stop.signal:
            # Not at the first signal: Python drops one that comes while its handler is taken away.
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)
            return
        stop.signal = signal.Signals(number).name
        said = f"{stop.signal}: saves and stops after the present step or cut; once more stops now, without saving"
        with suppress(OSError):
            os.write(2, f"\n{said}\n".encode())

    if threading.current_thread() is threading.main_thread():
        hang_up = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has none
        heard = signal.getsignal(hang_up) is not signal.SIG_IGN
        for which in (signal.SIGINT, signal.SIGTERM, *([hang_up] if heard else [])):
            before[which] = signal.signal(which, remember)
    try:
        yield stop
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


class Interrupted(Exception):  # noqa: N818 - it is not an error
    """A run that a signal stopped; everything is saved."""

    def __init__(self, signal: str, step: int, directory: Path) -> None:
        super().__init__(f"{signal} at step {step}: saved in {directory}, resume to go on")
        self.step, self.directory = step, directory


class Diverged(RuntimeError):  # noqa: N818 - read as a sentence
    """A loss, or weights, that are not finite."""


class CutError(RuntimeError):
    """A cut, or a spectrum, that the weights do not allow as training has left them."""


def train(
    recipe: Recipe,
    task: Task,
    directory: RunDirectory | Path | str,
    *,
    device: str | torch.device = "cpu",
    resume: bool = False,
    take_over: bool = False,
    logger: RunLogger | None = None,
    objective: Objective | None = None,
    penalty: Penalty | None = None,
) -> RunDirectory:
    """Train as the recipe says and write everything into the directory; with `resume`, go on from its last checkpoint.

    A finished run stays as it is. On the CPU a run that was stopped and resumed ends with the same bits as one that was
    not. `objective` replaces the loss of the task in training, not in evaluation; `penalty` is weighed by
    `recipe.regulariser`. `compressm_lab.experiments.comparisons` makes both for recipes that ask for them.

    A folder in which another process trains is refused by a `RunLockedError`; one of a process of this machine that has
    ended is taken over, and, with `take_over`, one of another machine that has been silent for two minutes.
    """
    if (recipe.regulariser is None) != (penalty is None):
        given, wanted = ("no penalty", "one") if penalty is None else ("a penalty", "a recipe that weighs it")
        raise ConfigError(f"regulariser is {recipe.regulariser} with {given}, expected {wanted}")
    if recipe.distillation is not None and objective is None:
        raise ConfigError(f"distillation is {recipe.distillation} without an objective, expected that of its teacher")
    directory = directory if isinstance(directory, RunDirectory) else RunDirectory(directory)
    plan = Plan.of(recipe)
    if resume and is_finished(directory, recipe):
        return directory
    processes = Processes()
    with processes.together("looking for another process in the folder"):
        if processes.is_first:
            directory.require_free(take_over=take_over)
    with building.products_in(recipe.training.precision), catching_signals() as stop, ExitStack() as held:
        # A run that cannot be built leaves no folder behind.
        parts = _build(recipe, task, torch.device(device), objective, penalty)
        run = Trainer(recipe, directory, *parts, plan, logger or Silent())
        with processes.together("taking the lock of the folder"):
            if run.is_first:
                if taken := held.enter_context(directory.locked(take_over=take_over)):
                    run.logger.took_over(taken)
                _enter(directory, recipe, task, resume)
        # Another process may have finished it in the meantime.
        if processes.as_first(directory.finished):
            return directory
        try:
            with naming_lost(processes):
                return run.go(stop, resume)
        except (Interrupted, LockLostError):
            raise
        except KeyboardInterrupt:
            run.write_last_status("interrupted", "a second signal: not saved")
            raise
        except BaseException as error:
            run.write_last_status("failed", _why(error))
            raise


def _why(error: BaseException) -> str:
    """The words of an error of ours; others, which may say little, have their name before them."""
    ours = type(error).__module__.partition(".")[0] in ("compressm", "compressm_lab")
    return str(error) if ours else f"{type(error).__name__}: {error}"


def _enter(directory: RunDirectory, recipe: Recipe, task: Task, resume: bool) -> None:
    """Begin a new run, or check the recipe and the files of the one that resumes."""
    checkpoints(directory)
    if resume:
        require_same_recipe(directory, recipe)
        require_same_files(directory, task)
        if not (directory.path / "environment.json").exists():  # a report asks for it
            directory.describe_here()
    else:
        directory.write_task(task.notes())
        directory.begin(recipe.as_dict())


def _build(
    recipe: Recipe, task: Task, device: torch.device, objective: Objective | None, penalty: Penalty | None
) -> tuple[Learner, Steps, Compressor | None, HankelTracker | None, Clock]:
    """Build the parts of a `Trainer`."""
    processes, clock = Processes(), Clock(device)
    task = building.placed(task, device)
    torch.manual_seed(recipe.seed)
    model = distributed(building.build_model(recipe.model, task).to(device), recipe, processes)
    optimizer = building.build_optimizer(model, recipe.training, device)
    order = Order(len(task.train), recipe.training.batch, recipe.seed)
    objective = objective or training_objective(task, recipe.training, device)
    learner = Learner(model, optimizer, objective, task, order, recipe.training, processes)
    if recipe.regulariser is not None and penalty is not None:
        learner.penalty = HeldPenalty(model, penalty, recipe.regulariser, clock, processes)

    def validate() -> float:
        with clock.phase("evaluation"):
            return evaluate(learner, task.validation).value

    judging = cache(lambda: building.held_out(recipe, task))

    def trial_loss(model: nn.Module) -> float:
        return loss_on(learner, model, judging())

    compressor = building.build_compressor(recipe, model, optimizer, task, validate, trial_loss)
    tracker = building.build_tracker(recipe, model, task)
    return learner, make_steps(learner, clock), compressor, tracker, clock


@dataclass
class Trainer:
    """A run in progress; `timed` is the last step whose time is in a record.

    `accepted` turns true when nothing is left to check of a run that resumes: its status is not written before.
    """

    recipe: Recipe
    directory: RunDirectory
    learner: Learner
    steps: Steps
    compressor: Compressor | None
    tracker: HankelTracker | None
    clock: Clock
    plan: Plan
    logger: RunLogger
    step: int = 0
    timed: int = 0
    accepted: bool = False

    @property
    def is_first(self) -> bool:
        """Tell if this process is the one that writes."""
        return self.learner.processes.is_first

    def go(self, stop: Stop, resume: bool) -> RunDirectory:
        """Train to the last step, from the newest checkpoint where the run resumes."""
        learner, self.accepted = self.learner, not resume
        learner.prepare(self.clock)
        if resume:  # the times of the checkpoint replace that of preparing
            self._load()
        join(learner.processes, self.recipe.seed, self.step)
        self.accepted = True
        if self.is_first:
            # A new run writes the spectra of step 0 too.
            self.directory.rewind(self.step or -1)
            self.logger.begins(self.recipe, self.plan, self.step)
        self.write_status("running")
        if self.step == 0 and self.tracker is not None:
            self._record_spectra()
        while self.step < self.plan.steps:
            goal = self._goal()
            self._run_to(goal, stop)
            self._require_finite()
            if self.step == goal:
                self._do_what_is_due()
            self._end_if_signalled(stop)
        self._finish(stop)
        return self.directory

    def _goal(self) -> int:
        """The next step at which something happens; a schedule of cuts may find its steps during training."""
        goal, due = self.plan.next_after(self.step), None if self.compressor is None else self.compressor.due
        return goal if due is None or due <= self.step else min(goal, due)

    def _is_cut_due(self) -> bool:
        if self.compressor is None:
            return False
        due = self.compressor.due
        found = bool(self.plan.found) and due is not None and due <= self.step
        return found or self.step in self.plan.cuts or self.step in self.plan.judgements

    def _end_if_signalled(self, stop: Stop) -> None:
        """Save and raise `Interrupted` if a signal has come to one of the processes."""
        if self.learner.in_any_process(stop()):
            self._save()
            self.write_status("interrupted", message=stop.signal)
            raise Interrupted(stop.signal, self.step, self.directory.path)

    def _run_to(self, goal: int, stop: Stop) -> None:
        try:
            with self.clock.phase("steps"):
                self.step = self.steps.run(self.step + 1, goal, stop)
        except ValueError as error:  # a layer, or a penalty, met weights that are not finite
            if _all_finite(self.learner.model):
                raise
            raise self._diverged("the weights are", f"between steps {self.step} and {goal}") from error

    def _do_what_is_due(self) -> None:
        plan, step = self.plan, self.step
        if step in plan.spectra:
            self._record_spectra()
        if step in plan.evaluations:
            self._record_training()
        if self._is_cut_due():
            self._cut()
        if step in plan.evaluations:
            if (penalty := self.learner.penalty) is not None:
                self._log(penalty.record(step))
            self._evaluate("validation")
            self._evaluate("test")
            self._record_timing()
            self.write_status("running")
        if step in plan.checkpoints:
            self._save()

    def _cut(self) -> None:
        assert self.compressor is not None
        before = self._orders()
        with self.clock.phase("cut"), self.clock.stages(), self._allowed("cut"):
            events = self.compressor.step(self.step)
        if not events:
            ended = any(isinstance(event, Restored) for event in self.compressor.history)
            if self.is_first and self.step in self.plan.cuts and not ended:
                self.logger.kept(self.step)
            return
        # The steps that follow run at other orders.
        if any(not isinstance(event, Decision) for event in events):
            self._record_timing(before)
            self.steps.renew()
        if self.is_first:
            for event in events:
                self.directory.append(_RECORDS[type(event)](**event.as_dict()))
                self.logger.happened(event)

    def _evaluate(self, split: records.SplitName) -> None:
        with self.clock.phase("evaluation"):
            score = evaluate(self.learner, getattr(self.learner.task, split))
        self._log_evaluation(split, *score)

    def _record_training(self) -> None:
        learner, (steps, *sums) = self.learner, self.steps.totals()
        loss, hits, asked = learner.processes.total(torch.tensor(sums, dtype=torch.float64)).tolist()
        if steps:
            accuracy = None if learner.task.kind.is_regression else hits / asked
            self._log_evaluation("train", loss / (steps * learner.processes.count), accuracy)
        self.steps.clear()

    def _log_evaluation(
        self, split: records.SplitName, loss: float, accuracy: float | None, *errors: float | None
    ) -> None:
        rate, seconds = self.recipe.training.rate(self.step), (self.clock.total, self.clock.in_steps)
        self._log(records.Evaluation(self.step, split, loss, accuracy, rate, *seconds, *errors))

    def _log(self, *found: records.Record) -> None:
        """Write records, and tell the logger, on the first process."""
        if not self.is_first:
            return
        self.directory.append(*found)
        for record in found:
            if isinstance(record, records.Evaluation):
                self.logger.evaluated(record)
            elif isinstance(record, records.PenaltyRecord):
                self.logger.compared(record)

    def _record_spectra(self) -> None:
        assert self.tracker is not None
        with self.clock.phase("spectrum"), self._allowed("spectrum"):
            found = self.tracker.step(self.step)
        for module, sigma in (found or {}).items():
            mean = sigma.reshape(-1, sigma.shape[-1]).mean(0).tolist()
            self._log(records.Spectrum(self.step, module, mean, self.tracker.bounds[-1][module]))

    def _orders(self) -> dict[str, int]:
        return orders_of(unwrapped(self.learner.model))

    def _record_timing(self, orders: dict[str, int] | None = None) -> None:
        """Record the phases since the last record; `orders` are those of the steps, if the model has others now."""
        orders = orders or self._orders()
        done, self.timed = self.step - self.timed, self.step
        wall, cpu, gpu = self.clock.take()
        self._log(records.Timing(self.step, done, orders, wall, cpu, gpu, load()))

    def _require_finite(self) -> None:
        """Check loss and weights: the gradient of a finite loss may not have been finite."""
        totals = self.steps.totals()
        if self.is_first and totals.steps:
            self.logger.reached(self.step, totals.loss / totals.steps)
        if not math.isfinite(totals.loss) or not _all_finite(self.learner.model):
            what = "the weights are" if math.isfinite(totals.loss) else "the loss is"
            raise self._diverged(what, f"at step {self.step}")

    @contextmanager
    def _allowed(self, what: str) -> Iterator[None]:
        """A context in which layers that cannot be cut, or have no spectrum, end the run by a `CutError`."""
        try:
            yield
        except LostProcessError:
            raise
        except (CompressionError, ControlError, torch.linalg.LinAlgError) as error:
            raise CutError(
                f"no {what} can be made at step {self.step}: {error}; {self._last_saved}."
                " If training diverges, a smaller learning rate may help"
            ) from error

    @property
    def _last_saved(self) -> str:
        saved = checkpoints(self.directory)
        return f"the last good checkpoint is {saved[0]}" if saved else "there is no checkpoint yet"

    def _diverged(self, what: str, when: str) -> Diverged:
        smaller = "learning rate" if self.recipe.regulariser is None else "learning rate, or beta of the penalty,"
        return Diverged(f"{what} not finite {when}; {self._last_saved}. A smaller {smaller} may help")

    def _save(self) -> None:
        if self.is_first:
            with self.clock.phase("checkpoint"):
                self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        """Write a checkpoint and remove the oldest ones."""
        self.directory.sync()
        path = self.directory.checkpoints / f"step-{self.step:08d}.pt"
        tracker, penalty = None, self.learner.penalty
        if self.tracker is not None:
            # The systems to compare with next; spectra are in the run's files.
            state = self.tracker.state_dict()
            before = _moved(state["before"], torch.device("cpu"))
            tracker = {"steps": [], "spectra": [], "bounds": [], "before": before}
        extra = {
            "timed": self.timed,
            "totals": list(self.steps.totals()),
            "seconds": [self.clock.total, self.clock.in_steps],
            "phases": self.clock.peek()._asdict(),
            "tracker": tracker,
            "penalty": None if penalty is None else penalty.state_dict(),
            "recipe": json.dumps(self.recipe.as_dict()),
            "processes": self.learner.processes.count,
            "records": self.directory.digests(),
        }
        with self.directory.writing(path):
            save_checkpoint(path, **self._parts(), step=self.step, extra=extra)
            _remove(*checkpoints(self.directory)[self.recipe.training.keep_checkpoints :])

    def _load(self) -> None:
        """Continue from the newest checkpoint that is whole, if there is one; newer ones are removed."""
        problems: dict[Path, str] = {}
        for path in checkpoints(self.directory):
            try:
                found = load_checkpoint(path, **self._parts())
            except SavingError as error:
                problems[path] = str(error)
                continue
            require_recipe_of(path, found.extra, json.loads(json.dumps(self.recipe.as_dict())))
            history = [] if self.compressor is None else self.compressor.history
            require_records(self.directory, self.recipe, found.step, found.extra, history)
            if self.is_first:
                count = self.learner.processes.count
                warn_if_moved(self.directory, self.learner.device, count, found.extra.get("processes"))
            self.step, self.timed = found.step, found.extra["timed"]
            self._restore(found.extra)
            if self.is_first and problems:
                with self.directory.writing(self.directory.checkpoints):
                    _remove(*problems)
                warnings.warn(f"removed what cannot be read: {'; '.join(problems.values())}", stacklevel=2)
            return
        if problems:
            raise SavingError(f"no checkpoint of {self.directory.path} can be read: {'; '.join(problems.values())}")

    def _parts(self) -> dict[str, Any]:
        return {"model": self.learner.model, "optimizer": self.learner.optimizer, "compressor": self.compressor}

    def _restore(self, extra: Any) -> None:
        self.steps.restore(*extra["totals"])
        building.keep_rates_on_(self.learner.optimizer, self.learner.device)
        total, in_steps = extra["seconds"]
        # Earlier versions counted seconds of the wall clock alone.
        phases = extra["phases"]
        self.clock.restore(total, in_steps, phases if "wall" in phases else {"wall": phases})
        if self.learner.penalty is not None:
            self.learner.penalty.load_state_dict(extra["penalty"])
        if self.tracker is not None and extra["tracker"] is not None:
            before = _moved(extra["tracker"]["before"], self.learner.device)
            # Earlier versions kept the last step, without its spectra.
            self.tracker.load_state_dict({**extra["tracker"], "steps": [], "before": before})

    def _finish(self, stop: Stop) -> None:
        """Cut and evaluate copies, unless a run that was stopped has done so, and save the model."""
        if self.recipe.truncation is not None and not self._has_truncations(self.recipe.truncation.orders):
            found = []
            with self.clock.phase("truncation"), self._allowed("truncation"):
                for record in truncations(self.recipe, self.learner, self.step):
                    found.append(record)
                    self._end_if_signalled(stop)
            if self.is_first:
                self.directory.replace(records.TruncationRecord, found)
                for record in found:
                    self.logger.compared(record)
        if self.clock.peek().wall:
            self._record_timing()  # of the last checkpoint
        if self.is_first:
            with self.directory.writing(self.directory.model):
                save_model(unwrapped(self.learner.model), self.directory.model)
        self.write_status("finished")

    def _has_truncations(self, orders: Sequence[int]) -> bool:
        """Tell if every copy is recorded with both splits; a full disk may have cut the file off."""
        found = self.directory.records(records.TruncationRecord)
        wanted = {(order, split) for order in orders for split in ("validation", "test")}
        return len(found) == len(wanted) and {(record.order, record.split) for record in found} == wanted

    def write_status(self, state: RunState, message: str = "") -> None:
        if self.is_first:
            self.directory.write_status(self._status(state, message))

    def write_last_status(self, state: RunState, message: str) -> None:
        """Write the status of a run that ends by an error; one that may not go on keeps the status it had."""
        if self.is_first and self.accepted:
            with suppress(LockLostError):
                self.directory.write_last_status(self._status(state, message))

    def _status(self, state: RunState, message: str) -> Status:
        found = Status(state, self.step, self.plan.steps, message, recipe_digest(self.recipe.as_dict()))
        if state != "finished":
            return found
        records = {name: digest for name, (_, digest) in self.directory.digests().items()}
        return replace(found, model=self.directory.saved_model(), records=records)


_RECORDS: dict[type, Any] = {Cut: records.CutRecord, Restored: records.RestoredRecord, Decision: records.DecisionRecord}


def _all_finite(model: nn.Module) -> bool:
    return bool(torch.stack([weight.isfinite().all() for weight in model.parameters()]).all())


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _moved(systems: dict[str, dict[str, Any]], device: torch.device) -> dict[str, dict[str, Any]]:
    return {name: {key: value.to(device) for key, value in parts.items()} for name, parts in systems.items()}
