"""Gradient steps: one by one, or, on a GPU, as one recorded graph that is played again and again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compressm.compression.distributed import Processes
from compressm.data.shuffling import Order
from compressm.data.task import Task
from compressm.training.clock import Clock
from compressm.training.config import TrainingConfig
from compressm.training.objective import Objective
from compressm.training.optimizers import set_rate
from compressm.training.parallel import any_of
from compressm.training.penalty import HeldPenalty
from compressm.training.placing import batch_on


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
        return rows[..., self.processes.rank :: self.processes.count]


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
    from compressm.training.graph_steps import GraphSteps

    graph = learner.task.train.inputs.device.type == "cuda" and learner.processes.count == 1
    return (GraphSteps if graph else EagerSteps)(learner, clock)
