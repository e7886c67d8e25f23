"""What is minimised and counted, by the kind of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from compressm.compression.distributed import Processes
from compressm_lab.data.task import IGNORED, Batch, Order, Task, TaskKind
from compressm_lab.training.building import batch_on, set_rate
from compressm_lab.training.clock import Clock
from compressm_lab.training.config import TrainingConfig
from compressm_lab.training.parallel import any_of
from compressm_lab.training.penalty import HeldPenalty


class StepResult(NamedTuple):
    """Of one batch: the mean loss, how many answers were right, and of how many."""

    loss: Tensor
    hits: Tensor
    asked: Tensor


# From a model and a batch to what is minimised: a comparison with other methods brings its own.
Objective = Callable[[nn.Module, Batch], StepResult]


@runtime_checkable
class Prepared(Protocol):
    """An objective with something to do before the first step, as asking a teacher about all examples."""

    def prepare(self, task: Task, device: torch.device, autocast: AbstractContextManager[object]) -> None:
        """Within `autocast` the models compute as in training."""


def task_objective(kind: TaskKind) -> Objective:
    """Cross-entropy of the classes, at the end or at every step that is asked for; mean squared error of signals."""
    return {TaskKind.CLASSIFY: _classify, TaskKind.LABEL_STEPS: _label_steps, TaskKind.REGRESS: _regress}[kind]


def _classify(model: nn.Module, batch: Batch) -> StepResult:
    logits = model(batch.inputs, batch.lengths).float()
    count = torch.full((), len(logits), device=logits.device)
    return StepResult(functional.cross_entropy(logits, batch.targets), _hits(logits, batch.targets), count)


def _label_steps(model: nn.Module, batch: Batch) -> StepResult:
    logits = model(batch.inputs, batch.lengths).float()
    loss = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
    return StepResult(loss, _hits(logits, batch.targets), (batch.targets != IGNORED).sum())


def _regress(model: nn.Module, batch: Batch) -> StepResult:
    loss = functional.mse_loss(model(batch.inputs, batch.lengths).float(), batch.targets)
    return StepResult(loss, torch.zeros((), device=loss.device), torch.full((), len(batch.targets), device=loss.device))


def _hits(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.detach().argmax(-1) == targets).sum()


class Totals(NamedTuple):
    """Of the steps since they were taken last."""

    steps: int
    loss: float
    hits: float
    asked: float


@dataclass
class Learner:
    """All that one gradient step touches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: Objective
    task: Task
    order: Order
    config: TrainingConfig
    processes: Processes = field(default_factory=Processes)
    penalty: HeldPenalty | None = None

    def learn(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step on these training examples: loss, hits and how many were asked, before it."""
        batch = batch_on(self.device, self.task, self.task.train, indices)
        with self.autocast():
            outcome = self.objective(self.model, batch)
        (outcome.loss if self.penalty is None else self.penalty.weigh(outcome.loss)).backward()
        if self.penalty is not None:
            self.penalty.add_()
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return outcome.loss.detach(), outcome.hits, outcome.asked

    def autocast(self) -> torch.autocast | nullcontext[None]:
        """Half precision where the recipe asks for it."""
        if self.config.precision != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def share(self, rows: Tensor) -> Tensor:
        """The examples of a batch that this process learns from."""
        return rows[..., self.processes.index :: self.processes.count]


class Steps(ABC):
    """Runs steps and adds up what they say; the sums stay on the device until they are asked for."""

    def __init__(self, learner: Learner, clock: Clock) -> None:
        self.learner, self.clock = learner, clock
        self._done = 0
        self._sums = torch.zeros(3, dtype=torch.float64, device=learner.device)

    @abstractmethod
    def run(self, first: int, last: int, stopped: Callable[[], bool]) -> int:
        """Steps first … last; returns the last one that was made, an earlier one if it was stopped."""

    def renew(self) -> None:
        """Sizes have changed."""
        if self.learner.penalty is not None:
            self.learner.penalty.renew()

    def totals(self) -> Totals:
        """Sums since `clear`, or since those that were restored."""
        return Totals(self._done, *self._sums.tolist())

    def clear(self) -> None:
        """Begin again."""
        self.restore(Totals(0, 0.0, 0.0, 0.0))

    def restore(self, totals: Totals) -> None:
        """Go on from what a checkpoint remembers."""
        self._done = totals.steps
        self._sums.copy_(torch.tensor(totals[1:], dtype=torch.float64))

    def _ready(self, step: int, last: int) -> int:
        """With the gradient of the penalty that this step adds; the last step up to `last` that adds the same."""
        penalty = self.learner.penalty
        return last if penalty is None else min(last, penalty.ready(step))

    def _eager(self, step: int) -> None:
        learner = self.learner
        set_rate(learner.optimizer, learner.config.rate(step))
        indices = learner.share(learner.order.at(step)).to(learner.device)
        self._add(*learner.learn(indices))
        self._done += 1

    def _add(self, loss: Tensor, hits: Tensor, asked: Tensor) -> None:
        self._sums += torch.stack([loss.double(), hits.double(), asked.double()])


class EagerSteps(Steps):
    """A plain loop."""

    def run(self, first: int, last: int, stopped: Callable[[], bool]) -> int:
        self.learner.model.train()
        for step in range(first, last + 1):
            self._ready(step, last)
            self._eager(step)
            if any_of(self.learner.processes, stopped()):
                return step
        return last


def make_steps(learner: Learner, clock: Clock) -> Steps:
    """A graph on one GPU that holds the data, a plain loop elsewhere and where several processes train together."""

    graph = learner.task.train.inputs.device.type == "cuda" and learner.processes.count == 1
    return (GraphSteps if graph else EagerSteps)(learner, clock)


_AHEAD = 10_000  # steps whose indices are on the GPU at once
_WARM_UP = 3
_TOGETHER = 64  # replays that wait for the GPU at once: a signal is heard soon


class GraphSteps(Steps):
    """Real steps until everything is compiled and allocated, then replays."""

    def __init__(self, learner: Learner, clock: Clock) -> None:
        super().__init__(learner, clock)
        device, size = learner.device, learner.share(learner.order.rows(1, 1)).shape[-1]
        self._rows = torch.zeros(_AHEAD, size, dtype=torch.int64, device=device)
        self._rates = torch.zeros(_AHEAD, device=device)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self._laid = (0, 0)  # first and last step whose rows are there
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = 0

    def renew(self) -> None:
        """The recording is of other sizes; its memory goes back."""
        super().renew()
        self._graph, self._warm = None, 0

    def run(self, first: int, last: int, stopped: Callable[[], bool]) -> int:
        self.learner.model.train()
        step = first
        while step <= last:
            alike = self._ready(step, last)
            if self._graph is None:
                self._prepare(step)
                step += self._warm_step(step)
            else:
                self._lay(step)
                stop = min(alike, self._laid[1], step + _TOGETHER - 1)
                for _ in range(step, stop + 1):
                    self._graph.replay()
                self._done += stop + 1 - step
                step = stop + 1
                torch.cuda.synchronize()
            if stopped():
                break
        return step - 1

    def _prepare(self, step: int) -> None:
        """Record once the warm-up is over; recording runs nothing."""
        if self._warm < _WARM_UP:
            return
        self._lay(step)
        graph = torch.cuda.CUDAGraph()
        with self.clock.phase("capture"), torch.cuda.graph(graph):
            self._drawn_step()
        self._graph = graph

    def _warm_step(self, step: int) -> int:
        """One real step on a stream of its own; none if the graph is there by now.

        Its time is that of recording: kernels are compiled and libraries loaded in it.
        """
        if self._graph is not None:
            return 0
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with self.clock.phase("capture"), torch.cuda.stream(stream):
            self._eager(step)
        torch.cuda.current_stream().wait_stream(stream)
        self._warm += 1
        return 1

    def _drawn_step(self) -> None:
        learner = self.learner
        set_rate(learner.optimizer, self._rates.index_select(0, self._cursor).squeeze(0))
        indices = self._rows.index_select(0, self._cursor).squeeze(0)
        self._add(*learner.learn(indices))
        self._cursor += 1

    def _lay(self, step: int) -> None:
        """The rows of this step and those after it, and the cursor on its own."""
        first, last = self._laid
        if not first <= step <= last:
            config, order = self.learner.config, self.learner.order
            first, last = step, min(step + _AHEAD - 1, max(config.steps, step))
            with self.clock.phase("data"):
                rows = self.learner.share(order.rows(first, last))
                rates = torch.tensor([config.rate(k) for k in range(first, last + 1)], dtype=torch.float32)
                self._rows[: len(rows)].copy_(rows)
                self._rates[: len(rates)].copy_(rates)
            self._laid = (first, last)
        self._cursor.fill_(step - first)
