"""A whole training step as one CUDA graph: data, learning rate, forward, backward and optimizer.

Batches are drawn inside the graph from training data on the GPU, by rows of indices that are laid out beforehand, so
that a step is one launch. After a cut the graph is recorded anew; the steps that warm up a recording are real ones.
The gradient of a penalty is found outside and lies where the graph adds it (`penalty.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from compressm.training.clock import Clock
from compressm.training.optimizers import set_rate
from compressm.training.steps import Learner, Steps

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
