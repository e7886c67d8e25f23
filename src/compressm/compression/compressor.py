"""The compressor: it cuts the SSM layers of a model, with the optimizer's state, at the steps of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

from torch import nn
from torch.optim import Optimizer

from compressm.compression.cutting import Cutter, followers, ordinary_tensors
from compressm.compression.optimizer import Moments, Slice, Transport
from compressm.compression.planning import Options, rehearse
from compressm.compression.policies import GATE, Policy
from compressm.compression.record import Cut, Event, Restored
from compressm.compression.rollback import Rollback, Watch
from compressm.compression.schedule import as_schedule, require_same_past
from compressm.errors import CompressionError
from compressm.families.choices import Gramian, Largest, Selection, WhiteNoise, require_count
from compressm.families.observing import Calibrate
from compressm.families.selective.methods import Baked, SelectiveMethod

# The options of the paper's own arithmetic.
PAPER: Mapping[str, Any] = {"gramian": WhiteNoise(), "fold": False, "moments": Slice()}


class Compressor:
    """A compressor that cuts a model during training; call `step(step)` after every optimizer step.

    Parameters stay the same objects, and the optimizer keeps its groups; only sizes change. A whole cut is computed
    before anything is changed: an error leaves model and optimizer as they were.

    Processes that train together all call it, and the first decides for all. Every cut renews a DistributedDataParallel
    that is passed as the model. One around the model that was passed must be renewed by `rewrap_`, and refuses to train
    until then.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        when: Iterable[int],
        keep: Policy,
        calibrate: Calibrate | None = None,
        gramian: Gramian | None = None,
        fold: bool = True,
        select: Selection = Largest(),
        gate: float = GATE,
        round_to: int = 1,
        at_least: int = 1,
        moments: Moments = Transport(),
        guard: Rollback | None = None,
        filter_fn: Callable[[nn.Module, str], bool] | None = None,
        overrides: Mapping[str, Policy] | None = None,
        selective: SelectiveMethod = Baked(),
        follow: Sequence[nn.Module] = (),
        scheduler: Any = None,
    ) -> None:
        self._schedule = as_schedule(when)
        if guard is not None and not isinstance(guard, Rollback):
            raise CompressionError(f"guard is {guard!r:.100}, expected Rollback(evaluate, ...) or None")
        options = Options(
            keep, calibrate, gramian, fold, select, gate, round_to, at_least, filter_fn, overrides, selective
        )
        self._cutter = Cutter(model, optimizer, options, moments, followers(follow))
        rehearse(self._cutter.check(), options)
        inner, processes = self._cutter.inner, self._cutter.processes
        self._watch = None if guard is None else Watch(guard, inner, optimizer, scheduler, follow, processes)
        if scheduler is not None and not all(hasattr(scheduler, name) for name in ("state_dict", "load_state_dict")):
            raise CompressionError(f"scheduler is {scheduler!r:.100}, expected one of torch.optim.lr_scheduler or None")
        self._ended = False
        self._seen: int | None = None
        self.history: list[Event] = []

    @property
    def schedule(self) -> list[int]:
        """The steps of the cuts."""
        return list(self._schedule)

    def step(self, step: SupportsIndex) -> list[Event]:
        """Cut or restore the model if that is due, and return the events of this step.

        A step of the schedule counts once, even if it is passed again; a skipped step counts at the next call.
        """
        now = require_count("step", step, low=0)
        events: list[Event] = []
        with ordinary_tensors():
            if self._watch is not None:
                restored = self._watch.settle(now)
                if restored is not None:
                    self._ended = True
                    events.append(restored)
                    self._cutter.renew_wrappers_()
            if self._is_due(now) and not self._ended:
                events += self._cut(now)
        self._seen = now if self._seen is None else max(now, self._seen)
        self.history += events
        return events

    def _is_due(self, step: int) -> bool:
        """True if a step of the schedule came since the last call; steps before the first call do not count."""
        earlier = step - 1 if self._seen is None else self._seen
        return any(earlier < due <= step for due in self._schedule)

    def _cut(self, step: int) -> list[Cut]:
        plan = self._cutter.plan(salt=step)
        if not plan.cuts or self._watch is None:
            return self._cutter.apply(plan, step)
        self._watch.begin(step)
        try:
            return self._cutter.apply(plan, step)
        except BaseException:
            self._watch.cancel()
            raise

    def preview(self) -> list[Cut]:
        """The cuts that would be made now; nothing is changed. All processes must call it."""
        return self._cutter.describe(self._cutter.plan(salt=0), step=0)

    def state_dict(self) -> dict[str, Any]:
        """The state to continue from: tensors, numbers and strings only."""
        return {
            "schedule": list(self._schedule),
            "ended": self._ended,
            "seen": self._seen,
            "history": [event.as_dict() for event in self.history],
            "watch": None if self._watch is None else self._watch.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; future steps of the schedule may differ from the saved ones."""
        self.require_loadable(state)
        self._ended = bool(state["ended"])
        self._seen = state.get("seen")
        self.history = [_event(stored) for stored in state["history"]]
        if self._watch is not None and state["watch"] is not None:
            self._watch.load_state_dict(state["watch"])

    def require_loadable(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that this compressor cannot continue from; nothing is changed."""
        reached = [_event(stored).step for stored in state["history"]]
        require_same_past(state["schedule"], self._schedule, max([*reached, state.get("seen") or 0]))


def _event(stored: Mapping[str, Any]) -> Event:
    return Cut.from_dict(stored) if "module" in stored else Restored.from_dict(stored)


def compress_(
    model: nn.Module,
    *,
    keep: Policy,
    optimizer: Optimizer | None = None,
    calibrate: Calibrate | None = None,
    gramian: Gramian | None = None,
    fold: bool = True,
    select: Selection = Largest(),
    gate: float = 1.0,
    round_to: int = 1,
    at_least: int = 1,
    moments: Moments = Transport(),
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    overrides: Mapping[str, Policy] | None = None,
    selective: SelectiveMethod = Baked(),
    follow: Sequence[nn.Module] = (),
) -> list[Cut]:
    """Cut the model once, in place; the options are those of `Compressor`, with gate 1: every smaller order is taken.

    All processes of torch.distributed must call it.
    """
    options = Options(keep, calibrate, gramian, fold, select, gate, round_to, at_least, filter_fn, overrides, selective)
    cutter = Cutter(model, optimizer, options, moments, followers(follow))
    with ordinary_tensors():
        return cutter.apply(cutter.plan(salt=0, layers=cutter.check()), step=0)
