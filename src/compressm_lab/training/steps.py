"""Gradient steps: objectives by the kind of a task, a plain loop, replays of a CUDA graph, and several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from compressm.compression.distributed import Processes, is_of_collective
from compressm.running import CapturedStep
from compressm_lab.data.task import IGNORED, Batch, Order, Task, TaskKind
from compressm_lab.training.building import batch_on, set_rate
from compressm_lab.training.clock import Clock
from compressm_lab.training.config import ConfigError, Recipe, TrainingConfig
from compressm_lab.training.penalty import HeldPenalty


class StepResult(NamedTuple):
    """The mean loss of a batch, the number of right answers, and the number of answers."""

    loss: Tensor
    hits: Tensor
    asked: Tensor


# The loss of a model on a batch, which training minimises; comparisons with other methods bring their own.
Objective = Callable[[nn.Module, Batch], StepResult]


@runtime_checkable
class Prepared(Protocol):
    """An objective with work before the first step, as running a teacher on all examples."""

    def prepare(self, task: Task, device: torch.device, autocast: AbstractContextManager[object]) -> None:
        """Do the work; within `autocast` models compute as in training."""


def task_objective(kind: TaskKind, class_weights: Tensor | None = None, floor: float | None = None) -> Objective:
    """The loss of a kind of task: cross-entropy of classes, weighed if there are weights, or mean squared error.

    With a floor the loss of a class is −log(p + floor) of its probability p.
    """
    return _regress if kind.is_regression else partial(_classify, class_weights=class_weights, floor=floor)


def training_objective(task: Task, config: TrainingConfig, device: torch.device) -> Objective:
    """The loss of a task in training, with the class weights and the floor of the recipe."""
    given, floor = config.class_weights, config.floor
    if task.kind.is_regression:
        for name, value in (("class_weights", given), ("floor", floor)):
            if value is not None:
                raise ConfigError(f"training.{name} is {value}, and {task.name} has no classes: leave it out")
    if given is None:
        return task_objective(task.kind, floor=floor)
    if isinstance(given, tuple):
        if len(given) != task.classes:
            names = f", {', '.join(task.labels)}" if task.labels else ""
            raise ConfigError(
                f"training.class_weights has {len(given)} numbers, expected one for each of the {task.classes} classes"
                f"{names}"
            )
        return task_objective(task.kind, torch.tensor(given, dtype=torch.float32, device=device), floor)
    targets = task.train.targets
    counts = torch.bincount(targets[targets != IGNORED].flatten(), minlength=task.classes).float()
    # A class that training data lack is never asked for.
    return task_objective(task.kind, (counts.sum() / (task.classes * counts.clamp(min=1))).to(device), floor)


def _raised(answers: Tensor) -> Tensor:
    """The answers in float32 at least."""
    return answers.to(torch.promote_types(answers.dtype, torch.float32))


def _classify(
    model: nn.Module, batch: Batch, class_weights: Tensor | None = None, floor: float | None = None
) -> StepResult:
    logits, targets = _raised(model(batch.inputs, batch.lengths)), batch.targets
    rows, wanted = logits.flatten(0, -2), targets.flatten()
    if floor is None:
        loss = functional.cross_entropy(rows, wanted, weight=class_weights, ignore_index=IGNORED)
    else:
        loss = functional.nll_loss((rows.softmax(-1) + floor).log(), wanted, class_weights, ignore_index=IGNORED)
    return StepResult(loss, (logits.detach().argmax(-1) == targets).sum(), (targets != IGNORED).sum())


def _regress(model: nn.Module, batch: Batch) -> StepResult:
    if batch.lengths is None:
        loss = functional.mse_loss(_raised(model(batch.inputs, None)), batch.targets)
        asked = torch.full((), len(batch.targets), device=loss.device)
    else:
        errors, where = answer_errors(model, batch)
        asked = where.sum()
        loss = errors.square().sum() / asked.clamp(min=1)
    return StepResult(loss, torch.zeros((), device=loss.device), asked)


def answer_errors(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The errors of a regression, 0 where nothing is asked, and where something is: where targets are numbers."""
    answers = _raised(model(batch.inputs, batch.lengths))
    asked = batch.targets.isfinite()
    # NaN would pass through a product with 0, and into the gradient.
    return torch.where(asked, answers - batch.targets.nan_to_num(0.0), 0.0), asked


class Totals(NamedTuple):
    """Sums over the steps since `Steps.clear`."""

    steps: int
    loss: float
    hits: float
    asked: float


@dataclass
class Learner:
    """Everything that a gradient step reads or changes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: Objective
    task: Task
    order: Order
    config: TrainingConfig
    processes: Processes = field(default_factory=Processes)
    penalty: HeldPenalty | None = None

    def prepare(self, clock: Clock) -> None:
        """Let the objective do its work before the first step."""
        if isinstance(self.objective, Prepared):
            with clock.phase("teacher"):
                self.objective.prepare(self.task, self.device, self.autocast())

    def learn(self, indices: Tensor) -> StepResult:
        """Make one step on these training examples; the result is that before it."""
        batch = batch_on(self.device, self.task, self.task.train, indices)
        with self.autocast():
            outcome = self.objective(self.model, batch)
        if self.penalty is None:
            outcome.loss.backward()
        else:
            self.penalty.weigh(outcome.loss).backward()
            self.penalty.add_()
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return outcome._replace(loss=outcome.loss.detach())

    def autocast(self) -> torch.autocast | nullcontext[None]:
        """A context that computes in bfloat16 if the recipe asks for it."""
        if self.config.precision != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def in_any_process(self, flag: bool) -> bool:
        """Tell if the flag is set in any of the processes, so that all stop together."""
        return flag if self.processes.count == 1 else bool(self.processes.total(torch.tensor(float(flag))) > 0)

    def share(self, rows: Tensor) -> Tensor:
        """The part of a batch that this process learns from."""
        return rows[..., self.processes.index :: self.processes.count]


class Steps:
    """Steps in a plain loop; sums of their results stay on the device until `totals` reads them."""

    def __init__(self, learner: Learner, clock: Clock) -> None:
        self.learner, self.clock = learner, clock
        self._done = 0
        self._sums = torch.zeros(3, dtype=torch.float64, device=learner.device)

    def run(self, first: int, last: int, stopped: Callable[[], bool]) -> int:
        """Run steps first … last; returns the last one that was made, an earlier one if it was stopped."""
        self.learner.model.train()
        for step in range(first, last + 1):
            self._hold_penalty(step, last)
            self._eager(step)
            if self.learner.in_any_process(stopped()):
                return step
        return last

    def renew(self) -> None:
        """Drop everything that belongs to the sizes before a cut."""
        if self.learner.penalty is not None:
            self.learner.penalty.renew()

    def totals(self) -> Totals:
        """Sums since `clear`, with those of the checkpoint that was restored."""
        return Totals(self._done, *self._sums.tolist())

    def clear(self) -> None:
        """Set all sums to 0."""
        self.restore(0, 0.0, 0.0, 0.0)

    def restore(self, steps: int, *sums: float) -> None:
        """Continue from the sums of a checkpoint."""
        self._done = steps
        self._sums.copy_(torch.tensor(sums, dtype=torch.float64))

    def _hold_penalty(self, step: int, last: int) -> int:
        """Hold the gradient of the penalty for this step; returns the last step up to `last` that adds the same."""
        penalty = self.learner.penalty
        return last if penalty is None else min(last, penalty.ready(step))

    def _eager(self, step: int) -> None:
        learner = self.learner
        set_rate(learner.optimizer, learner.config.rate(step))
        indices = learner.share(learner.order.at(step)).to(learner.device)
        self._learn(indices)
        self._done += 1

    def _learn(self, indices: Tensor) -> None:
        self._sums += torch.stack([part.double() for part in self.learner.learn(indices)])


def make_steps(learner: Learner, clock: Clock) -> Steps:
    """A CUDA graph if one process has its data on a GPU, a plain loop otherwise."""
    graph = learner.task.train.inputs.device.type == "cuda" and learner.processes.count == 1
    return (GraphSteps if graph else Steps)(learner, clock)


_AHEAD = 10_000  # steps whose indices are on the GPU at once
_TOGETHER = 64  # replays that wait for the GPU at once: few, so that a signal takes effect soon


class GraphSteps(Steps):
    """Steps that run as they are until everything is compiled and allocated, and are replayed from then on."""

    def __init__(self, learner: Learner, clock: Clock) -> None:
        super().__init__(learner, clock)
        device, size = learner.device, learner.share(learner.order.rows(1, 1)).shape[-1]
        self._rows = torch.zeros(_AHEAD, size, dtype=torch.int64, device=device)
        self._rates = torch.zeros(_AHEAD, device=device)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self._loaded = (0, 0)  # first and last step whose rows are on the GPU
        self._step = CapturedStep(self._next)

    def renew(self) -> None:
        """Drop the recording, whose sizes are wrong now, and its memory."""
        super().renew()
        self._step.forget()

    def run(self, first: int, last: int, stopped: Callable[[], bool]) -> int:
        self.learner.model.train()
        step = first
        while step <= last:
            alike = self._hold_penalty(step, last)
            self._load(step)
            end = step
            if self._step.is_recorded:
                end = min(alike, self._loaded[1], step + _TOGETHER - 1)
            # Steps that compile and load kernels, and that are recorded, count as recording.
            with self.clock.phase("steps" if self._step.is_recorded else "capture"):
                for _ in range(step, end + 1):
                    self._step()
                torch.cuda.synchronize()
            self._done += end + 1 - step
            step = end + 1
            if stopped():
                break
        return step - 1

    def _next(self) -> None:
        """Make the step at the cursor, and move it on."""
        set_rate(self.learner.optimizer, self._rates.index_select(0, self._cursor).squeeze(0))
        self._learn(self._rows.index_select(0, self._cursor).squeeze(0))
        self._cursor += 1

    def _load(self, step: int) -> None:
        """Put the rows of this step and the next ones on the GPU if needed, and the cursor on this step."""
        first, last = self._loaded
        if not first <= step <= last:
            config, order = self.learner.config, self.learner.order
            first, last = step, min(step + _AHEAD - 1, max(config.steps, step))
            with self.clock.phase("data"):
                rows = self.learner.share(order.rows(first, last))
                rates = torch.tensor([config.rate(k) for k in range(first, last + 1)], dtype=torch.float32)
                self._rows[: len(rows)].copy_(rows)
                self._rates[: len(rates)].copy_(rates)
            self._loaded = (first, last)
        self._cursor.fill_(step - first)


# Data-parallel processes, started by torchrun: each learns from its share of every batch, the first one writes.


_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """True in a process of torchrun; variables that only some launcher set for several processes are refused."""
    given = {name: os.environ[name] for name in _OF_TORCHRUN if name in os.environ}
    if strange := [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if not given.get(name, "0").isdecimal()]:
        raise ConfigError(f"the variable {strange[0]} is {given[strange[0]]!r:.40}, expected an integer")
    missing = [name for name in _OF_TORCHRUN if name not in given]
    alone = int(given.get("WORLD_SIZE", "1")) == 1 and int(given.get("RANK", "0")) == 0
    if missing and not alone:
        raise ConfigError(
            f"{' and '.join(given)} say that several processes train, but {', '.join(missing)} are not set: start them"
            " with torchrun, or unset these variables"
        )
    return not missing


@contextmanager
def process_group(device: torch.device) -> Iterator[torch.device]:
    """A context that joins the processes of torchrun, each on a GPU of its own; without torchrun it does nothing."""
    if not is_launched() or dist.is_initialized():
        yield device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


@contextmanager
def naming_lost(processes: Processes) -> Iterator[None]:
    """A context that says which process is lost, where torch only says that a connection broke."""
    try:
        yield
    except RuntimeError as error:
        if processes.count == 1 or not is_of_collective(error):
            raise
        raise processes.lost("training") from error


def distributed(model: nn.Module, recipe: Recipe, processes: Processes) -> nn.Module:
    """The model, wrapped if there are several processes; a batch that they cannot share evenly is refused."""
    if processes.count == 1:
        return model
    batch = recipe.training.batch
    if batch % processes.count:
        raise ConfigError(f"training.batch is {batch}, expected a multiple of the {processes.count} processes")
    return DistributedDataParallel(model)


def join(processes: Processes, seed: int, step: int) -> None:
    """Give every process but the first random numbers of its own, for dropout."""
    if processes.index:
        torch.manual_seed(hash((seed, step, processes.index)) % 2**31)
