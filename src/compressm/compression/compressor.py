"""The compressor: it cuts the SSM layers of a model, with the optimizer's state, at the steps of a schedule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch.optim import Optimizer

from compressm.adapters import find
from compressm.adapters.mamba import refused_in
from compressm.compression.cutting import Cutter, PreparedPlan, filled_up, followers, ordinary_tensors, require_alike
from compressm.compression.distributed import require_rewrappable, wrappers_in
from compressm.compression.optimizer import Moments, Slice, Transport
from compressm.compression.planning import Options, rehearse
from compressm.compression.policies import GATE, KeepFraction, Policy, never_cuts, obstacles
from compressm.compression.record import Cut, Decision, Event, event_of, losses_of, past_of, warn_uncut
from compressm.compression.rollback import NOTHING_TO_JUDGE, Rollback, Watch
from compressm.compression.schedule import (
    Answer,
    Look,
    Schedule,
    Steps,
    Try,
    as_schedule,
    decided_of,
    plan_text,
    require_answer,
    require_same_past,
)
from compressm.compression.several import as_optimizer, as_scheduler, parts_of, require_own
from compressm.compression.sharding import (
    gathered,
    is_gathered,
    is_sharded,
    note_passes_,
    orders_by_shapes,
    require_no_open_pass,
    require_whole,
)
from compressm.compression.surgery import require_suitable
from compressm.compression.trying import TryingPolicy
from compressm.errors import CompressionError, warn_caller
from compressm.families import Layer, read_layer
from compressm.families.choices import Gramian, Largest, RoundTo, Selection, WhiteNoise, orders_by_name, require_count
from compressm.families.memory.forms import Form
from compressm.families.observing import Calibrate
from compressm.families.selective.methods import Baked, SelectiveMethod
from compressm.layers.parameters import begin_work_, end_work_, hold_, holders_beside, is_idle, require_idle

PAPER: Mapping[str, Any] = {"gramian": WhiteNoise(), "fold": False, "moments": Slice()}
"""The options of the paper's own arithmetic: `Compressor(..., **cs.PAPER)`."""


class Compressor:
    """A compressor that cuts a model during training; call `step(step)` after every optimizer step.

    `when` is a collection of step numbers, or a `Schedule` that decides as training goes; `keep` is a policy on
    spectra, or a `TryingPolicy` that tries cuts before it chooses. `plan` says in words what both may do.

    `optimizer` is one, or a list of all that train the model. Parameters stay the same objects, and the optimizer keeps
    its groups; only sizes change. A whole cut is computed before anything is changed: an error leaves model and
    optimizer as they were.

    Processes that train together all call it, and the first decides for all. Every cut renews a DistributedDataParallel
    that is passed as the model. One around the model that was passed must be renewed by `rewrap_`, and refuses to train
    until then.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        when: Iterable[int] | Schedule,
        keep: Policy,
        calibrate: Calibrate | None = None,
        gramian: Gramian | None = None,
        fold: bool = True,
        select: Selection = Largest(),
        gate: float = GATE,
        round_to: RoundTo = 1,
        at_least: int = 1,
        uniform: bool | None = None,
        moments: Moments = Transport(),
        guard: Rollback | None = None,
        filter_fn: Callable[[nn.Module, str], bool] | None = None,
        overrides: Mapping[str, Policy] | None = None,
        selective: SelectiveMethod = Baked(),
        form: Form | None = None,
        follow: Sequence[nn.Module] = (),
        scheduler: Any = None,
    ) -> None:
        self._when = when if isinstance(when, Schedule) else Steps(tuple(as_schedule(when)))
        if guard is not None and not isinstance(guard, Rollback):
            raise CompressionError(f"guard is {guard!r:.100}, expected Rollback(evaluate, ...) or None")
        given = (keep, calibrate, gramian, fold, select, gate, round_to, at_least, filter_fn, overrides, selective)
        options = Options(*given, uniform=uniform, form=form)
        trainer, rates = as_optimizer(optimizer), as_scheduler(scheduler)
        require_own(rates, trainer)
        if rates is not None and guard is None:
            warnings.warn("without effect: scheduler; only a guard, which may restore it, uses it", stacklevel=2)
        self._cutter = Cutter(model, trainer, options, moments, followers(follow))
        self._guard, self._watch = guard, None
        self._meet("Compressor(...)")
        processes = self._cutter.processes
        if guard is not None and is_sharded(self._cutter.inner):
            raise CompressionError("guard: a model sharded by fully_shard cannot be restored; expected guard=None")
        self._cutter.require_copies()
        with gathered(self._cutter.inner, trainer), processes.together("making a Compressor"):
            layers = self._cutter.check()
            if never_cuts(keep, overrides):
                raise CompressionError(f"keep is {keep}, with which no layer of any order is cut: expected rho below 1")
            rehearse(layers, options, None if trainer is None else moments)
        if guard is not None:
            self._watch = Watch(guard, self._cutter.inner, trainer, rates, follow, processes)
        # The orders before the first call; None once it came, or a state was loaded.
        self._first_orders: dict[str, int] | None = {name: layer.order for name, layer in layers.items()}
        if optimizer is not None:
            hold_(self._cutter.inner, self, parts_of(trainer))
        note_passes_(self._cutter.inner, self)
        self._begin_()

    def _begin_(self) -> None:
        """Set what changes in training to its beginning."""
        self._ended = False
        self._seen: int | None = None
        # The next look; None before the first call, infinite if there is none.
        self._look_at: float | None = None
        self._memory: Mapping[str, Any] = {}
        self._tries: tuple[Try, ...] = ()
        # The best loss seen, and what cuts have added to it since then.
        self._best: float | None = None
        self._added = 0.0
        # Nothing is due before this step; 0 if that is not known.
        self._until: float = 0
        self.history: list[Event] = []

    @property
    def schedule(self) -> list[int]:
        """The steps of the cuts; empty if a `Schedule` decides them."""
        return list(self._when.steps) if isinstance(self._when, Steps) else []

    @property
    def plan(self) -> str:
        """When cuts are tried, and what each may cost in trials, in words."""
        keep, layers = self._cutter.options.keep, len(self._cutter.found)
        return self._when.plan() + (f"; {keep.plan(layers)}" if isinstance(keep, TryingPolicy) else "")

    @property
    def due(self) -> int | None:
        """The first step at which `step` may do anything, None if there is none: a loop may run up to it at once."""
        until = self._next()
        return None if until == math.inf else max(1, int(until))

    @property
    def model(self) -> nn.Module:
        """The model that is cut, without wrappers."""
        return self._cutter.inner

    @property
    def followers(self) -> tuple[nn.Module, ...]:
        """The models of `follow`: they are cut and restored with the model, and checkpoints contain them."""
        return self._cutter.follow

    def step(self, step: SupportsIndex) -> list[Event]:
        """Cut or restore the model if that is due, and return the events of this step.

        A step of the schedule counts once, even if it is passed again; a skipped step counts at the next call. After an
        error nothing has changed. An interruption in the very last moment may come after the cut: then it is recorded.
        """
        # Between cuts a call takes less than a microsecond.
        if type(step) is int and self._seen is not None and self._seen < step < self._until and is_idle():
            self._seen = step
            return []
        now = require_count("step", step, low=0)
        self._until = 0
        require_idle(self._cutter.inner, f"Compressor.step({now})")
        if self._first_orders is not None:
            self._warn(now, self._first_orders)
            self._first_orders = None
        with self._whole_if_due(now):
            events = self._step_(now)
        if self._watch is not None:
            self._watch.tidy()
        self._until = self._next()
        return events

    def _whole_if_due(self, now: int) -> AbstractContextManager[None]:
        """Plain parameters for a cut of a sharded model."""
        if not self._is_due(now) or not is_sharded(self._cutter.inner):
            return nullcontext()
        self._meet(f"Compressor.step({now})")
        return _whole(self._cutter)

    def _step_(self, now: int) -> list[Event]:
        undo = ExitStack()
        try:
            # An interruption inside `no_grad` itself would leave gradients switched off.
            undo.callback(torch.set_grad_enabled, torch.is_grad_enabled())
            with ordinary_tensors():
                return self._act_(now, undo)
        except BaseException:
            undo.close()
            raise

    def _warn(self, now: int, orders: Mapping[str, int]) -> None:
        """Say, at the first call of a training that is not resumed, what will not happen."""
        if missed := [due for due in self.schedule if due < now]:
            warnings.warn(
                f"the first call of step is at step {now}, after {plan_text(missed)}, which will not be made: call step"
                " from the start, or, to resume, load the state of the compressor first",
                stacklevel=3,
            )
        held, said = _obstacles(self._cutter, orders)
        if held:
            states = ", ".join(f"{name or 'the model'} {n}" for name, n in orders.items())
            warnings.warn(
                f"nothing will be cut: with {said} every layer keeps its order ({states} states)", stacklevel=3
            )

    def _act_(self, now: int, undo: ExitStack) -> list[Event]:
        """Judge earlier cuts, cut, and record both; closing `undo` takes everything back."""
        kept = ("_ended", "_seen", "_look_at", "_memory", "_tries", "_best", "_added")
        undo.callback(self._forget_, {name: getattr(self, name) for name in kept}, len(self.history))
        judging = self._watch is not None and self._watch.is_due(now)
        looking = self._is_due(now)
        working = begin_work_(self._cutter.inner, f"Compressor.step({now})", undo) if judging or looking else None
        if judging or looking:
            self._meet(f"Compressor.step({now})")
        events: list[Event] = []
        if self._watch is not None and judging:
            undo.callback(self._cutter.renew_wrappers_)
            events += [restored] if (restored := self._watch.settle(now, undo)) else []
        decided, prepared = self._looked(now, undo) if looking and not events else ([], PreparedPlan([], []))
        # All processes write, or none: an error in one of them takes the cut back in all.
        with self._cutter.processes.together("writing the cut") if events or prepared.cuts else nullcontext():
            if events:
                self._cutter.renew_wrappers_()
            if prepared.cuts:
                self._cutter.write_(prepared, undo)
                if self._watch is not None:
                    self._watch.made()
            self._ended = self._ended or bool(events)
            self._seen = now if self._seen is None else max(now, self._seen)
            events += [*decided, *prepared.records]
            self.history += events
        end_work_(working)
        return events

    def _looked(self, now: int, undo: ExitStack) -> tuple[list[Event], PreparedPlan]:
        """The decision of the schedule, if it is recorded, and the cuts of this step; a guard keeps a snapshot."""
        cutter, observed = self._cutter, None
        if self._when.wants_spectra(self._memory):
            observed = cutter.observed()
        answer = self._answer(now, observed)
        self._memory = answer.memory
        if not answer.tries:
            self._look_at = math.inf if answer.again is None else answer.again
            action = "stop" if answer.again is None else "wait"
            reason = answer.reason
            return ([Decision(now, action, reason, answer.again)] if reason else []), PreparedPlan([], [])
        plan = cutter.plan(salt=now, observed=observed, attempt=answer, best=self._best, added=self._added)
        if plan.tried is not None:
            self._best, self._added = plan.tried.account(self._best, self._added)
        again = answer.again if plan.cuts else answer.otherwise
        if plan.unfit and again is None:
            warn_caller(plan.unfit)
        _warn_of_holders((cut.layer for cut in plan.cuts), cutter.optimizer)
        if plan.cuts and self._watch is not None:
            self._watch.begin(now, undo)
        self._tries = (*self._tries, Try(now, bool(plan.cuts), 0 if plan.tried is None else plan.tried.count))
        self._look_at = math.inf if again is None else again
        reason = "; ".join(filter(None, (answer.reason, "" if plan.tried is None else str(plan.tried))))
        decided: list[Event] = [Decision(now, "cut" if plan.cuts else "keep", reason, again)] if reason else []
        return decided, cutter.prepare(plan, now)

    def _answer(self, now: int, observed: dict[str, Layer] | None) -> Answer:
        """The decision of the schedule; all processes take that of the first."""
        if isinstance(self._when, Steps):  # whose decisions need nothing
            return self._when.decide(Look(now, {}))
        cutter, found = self._cutter, self._orders()
        orders = {name: found[name] for name in cutter.found}
        with cutter.processes.together("deciding whether to cut"):
            values = None if observed is None else cutter.spectra(observed)
            look = Look(now, orders, cutter.is_spent(orders), values, self._tries, dict(self._memory))
            answer = require_answer(self._when, look, self._when.decide(look))
        return cutter.processes.as_first(answer, "sending the decision of the schedule")

    def _forget_(self, kept: Mapping[str, Any], events: int) -> None:
        vars(self).update(kept)
        del self.history[events:]

    def _is_due(self, step: int) -> bool:
        """True if a look is due; steps before the first call do not count, those that were passed over do."""
        return not self._ended and self._next_look(step) <= step

    def _next_look(self, step: int) -> float:
        """The step of the next look, for a call at this step."""
        if self._look_at is not None:
            return self._look_at
        found = self._when.first(step - 1 if self._seen is None else self._seen)
        return math.inf if found is None else require_count(f"{self._when!r:.100}: the first step", found, low=0)

    def _next(self) -> float:
        """The first step at which something may be due."""
        looks = [] if self._ended else [self._next_look(1)]
        judging = [] if self._watch is None or self._watch.snapshot is None else [self._watch.due]
        return min([*looks, *judging], default=math.inf)

    def _meet(self, call: str) -> None:
        guard = self._guard
        limits = None if guard is None else (guard.drop, guard.settle, guard.lower_is_better)
        self._cutter.meet(call, when=self._when, guard=limits)

    def accept(self) -> None:
        """Keep the cuts that the guard has not judged yet; they cannot be undone then. All processes must call it."""
        self._until = 0
        if self._watch is not None:
            self._watch.accept()

    def preview(self) -> list[Cut]:
        """The cuts that would be made now; nothing is changed. All processes must call it."""
        with ExitStack() as undo:
            begin_work_(self._cutter.inner, "Compressor.preview()", undo)
            self._meet("Compressor.preview()")
            with gathered(self._cutter.inner, self._cutter.optimizer):
                return self._cutter.describe(self._cutter.plan(salt=0, best=self._best, added=self._added), step=0)

    def state_dict(self) -> dict[str, Any]:
        """The state to continue from: tensors, numbers and strings only."""
        state = {
            "schedule": self.schedule,
            "ended": self._ended,
            "seen": self._seen,
            "history": [event.as_dict() for event in self.history],
            "orders": self._orders(),
            "watch": None if self._watch is None else self._watch.state_dict(),
        }
        if self._best is not None:
            state["losses"] = {"best": self._best, "added": self._added}
        if not isinstance(self._when, Steps):
            look_at = -1 if self._look_at is None else 0 if self._look_at == math.inf else int(self._look_at)
            tries = [[one.step, one.cut, one.trials] for one in self._tries]
            state["decided"] = {"look_at": look_at, "tries": tries, "memory": dict(self._memory)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; future steps may differ from the saved ones, and so may options of a `Schedule`."""
        self.require_loadable(state)
        watch, decided = state["watch"], state.get("decided")
        if self._watch is None and watch is not None and watch.get("snapshot") is not None:
            warn_caller(
                f"the state has cuts that a guard was to judge at step {watch.get('due')}; this compressor has no guard"
                " and keeps them: to have them judged, make it with the same guard=Rollback(...)"
            )
        history = [event_of(stored) for stored in state["history"]]
        warn_uncut(history, self._orders(), state.get("orders"))  # first: a warning may be an error
        self._first_orders, self._until, self.history = None, 0, history
        self._ended = bool(state["ended"])
        self._seen = state.get("seen")
        self._best, self._added = losses_of(state)
        self._look_at, self._memory, self._tries = (
            (None, {}, ()) if decided is None else decided_of(self._when, decided)
        )
        if self._watch is not None:
            self._watch.load_state_dict(NOTHING_TO_JUDGE if watch is None else watch)

    def _orders(self) -> dict[str, int]:
        if is_sharded(self.model) and not is_gathered(self.model):
            return orders_by_shapes(self.model)  # one process may ask alone
        return {name: adapter.order(layer) for name, (layer, adapter) in find(self.model).items()}

    def require_loadable(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that this compressor cannot continue from; nothing is changed."""
        schedule, reached = past_of(state)
        if isinstance(self._when, Steps) and "decided" not in state:
            require_same_past(schedule, self.schedule, reached)
        elif isinstance(self._when, Steps) or "decided" not in state:
            saved = "a list of steps" if "decided" not in state else "a Schedule"
            raise CompressionError(
                f"the saved compressor was made with when={saved}, this one with {self._when!r:.100}: expected the same"
            )
        else:
            decided_of(self._when, state["decided"])
        losses_of(state)
        if self._watch is not None and state["watch"] is not None:
            self._watch.require_loadable(state["watch"])


def _obstacles(cutter: Cutter, orders: Mapping[str, int]) -> tuple[Mapping[str, object], str]:
    """The options that keep every layer at these orders, and the same in words; empty if a layer could be cut."""
    options = cutter.options
    limits = (options.keep, options.overrides, options.gate, cutter.allowed(), options.at_least)
    held = obstacles(orders, *limits)
    held |= {"round_to": options.round_to} if "round_to" in held else {}
    return held, ", ".join(f"{name}={value!r}" for name, value in held.items())


def _warn_of_holders(layers: Iterable[Layer], optimizer: Any) -> None:
    """Warn if another living compressor trains these layers by an optimizer whose moments would keep the old sizes."""
    optimizers = () if optimizer is None else parts_of(optimizer)
    if any(holders_beside(layer.module, optimizers) for layer in layers):
        warn_caller(
            "a Compressor with an optimizer holds this model, and that optimizer was not passed: its moments keep the"
            " old orders, and its next step fails. Pass optimizer=, or train no further with it"
        )


def compress_(
    model: nn.Module,
    *,
    keep: Policy,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    calibrate: Calibrate | None = None,
    gramian: Gramian | None = None,
    fold: bool = True,
    select: Selection = Largest(),
    gate: float = 1.0,
    round_to: RoundTo = 1,
    at_least: int = 1,
    uniform: bool | None = None,
    moments: Moments = Transport(),
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    overrides: Mapping[str, Policy] | None = None,
    selective: SelectiveMethod = Baked(),
    form: Form | None = None,
    follow: Sequence[nn.Module] = (),
) -> list[Cut]:
    """Cut the model once, in place; the options are those of `Compressor`, with gate 1: every smaller order is taken.

    All processes of torch.distributed must call it.
    """
    given = (keep, calibrate, gramian, fold, select, gate, round_to, at_least, filter_fn, overrides, selective)
    options = Options(*given, uniform=uniform, form=form)
    cutter = Cutter(model, as_optimizer(optimizer), options, moments, followers(follow))
    if not is_sharded(cutter.inner):
        return _compress_(cutter)  # an interruption at the end of a context would lose the records of a cut
    cutter.meet("compress_(...)")
    with _whole(cutter):
        return _compress_(cutter)


def _whole(cutter: Cutter) -> AbstractContextManager[None]:
    """Plain parameters for a cut of a sharded model; refused in all processes if one is before its backward pass."""
    with cutter.processes.together("looking for forward passes that wait for a backward pass"):
        require_no_open_pass(cutter.inner)
    return gathered(cutter.inner, cutter.optimizer)


def _compress_(cutter: Cutter) -> list[Cut]:
    undo = ExitStack()
    try:
        undo.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        with ordinary_tensors():
            working = begin_work_(cutter.inner, "compress_(...)", undo)
            cutter.meet("compress_(...)")
            with cutter.processes.together("checking the model"):
                layers = cutter.check()
                _warn_of_holders(layers.values(), cutter.optimizer)
            plan = cutter.plan(salt=0, layers=layers)
            prepared = cutter.prepare(plan, step=0)
            with cutter.processes.together("writing the cut") if prepared.cuts else nullcontext():
                cutter.write_(prepared, undo)
        end_work_(working)
        if plan.unfit:
            warn_caller(plan.unfit)
        elif not plan.cuts:
            _warn_uncut(cutter, layers)
        # Inside: whoever gets no records has an unchanged model.
        return prepared.records
    except BaseException:
        undo.close()
        raise


def _warn_uncut(cutter: Cutter, layers: Mapping[str, Layer]) -> None:
    """Say that options have kept every layer at an order to which they cannot have led, or could cut no order."""
    orders = {name: layer.order for name, layer in layers.items()}
    held, said = _obstacles(cutter, orders)
    allowed = orders_by_name(cutter.allowed(), orders)
    odd = not all(allowed[name].allows(order) for name, order in orders.items())
    above = all(order < cutter.options.at_least for order in orders.values())
    never = never_cuts(cutter.options.keep, cutter.options.overrides)
    if never or (held.keys() == {"round_to"} and odd) or (held.keys() == {"at_least"} and above):
        states = ", ".join(f"{layer.said} {layer.order}" for layer in layers.values())
        warn_caller(f"nothing was cut: with {said} every layer keeps its order ({states} states)")


def pad_orders_(
    model: nn.Module,
    to: int | None = None,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    follow: Sequence[nn.Module] = (),
) -> int:
    """Fill up every SSM layer with zero states to the order `to`, by default that of the largest; return that order.

    A zero state has neither input nor output, so outputs stay the same. Parameters stay the same objects. Moments of
    the optimizer follow: first moments of zero states are 0, second ones the mean over the other states. A zero state
    gets no gradient and stays without effect in training; only S4D, whose input matrix is 1, trains it. Streams of the
    model go on. All processes of torch.distributed must call it.
    """
    cutter = Cutter(model, as_optimizer(optimizer), Options(KeepFraction(1.0)), Transport(), followers(follow))
    require_whole("the model that is padded", cutter.inner)
    undo = ExitStack()
    try:
        undo.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        with ordinary_tensors():
            working = begin_work_(cutter.inner, "pad_orders_(...)", undo)
            cutter.meet("pad_orders_(...)", to=to)
            with cutter.processes.together("padding the model"):
                layers = _layers(cutter)
                order = _order(layers, to)
                _warn_of_holders(layers.values(), cutter.optimizer)
                wanted = {name: order for name, layer in layers.items() if layer.order < order}
                prepared = _prepared(cutter, layers, wanted)
            with cutter.processes.together("writing zero states"):
                cutter.write_(prepared, undo)
        end_work_(working)
        return order
    except BaseException:
        undo.close()
        raise


def _layers(cutter: Cutter) -> dict[str, Layer]:
    """The layers of the model; all that a cut of them would refuse is refused."""
    if not (found := find(cutter.inner)):
        kind = type(cutter.inner).__name__
        raise CompressionError(
            f"{kind} has no SSM layer that an adapter reads{refused_in(cutter.inner)}; see compressm.adapters"
        )
    choices = cutter.options.choices
    layers = {name: read_layer(name, module, adapter, choices) for name, (module, adapter) in found.items()}
    for wrapper in wrappers_in(cutter.model):
        require_rewrappable(wrapper)
    require_suitable(cutter.inner, layers, cutter.optimizer, cutter.moments)
    return layers


def _order(layers: dict[str, Layer], to: int | None) -> int:
    largest = max(layers.values(), key=lambda layer: layer.order)
    if to is None:
        return largest.order
    # Far more than any runtime takes; what does not fit into memory would end the process.
    order = require_count("to", to, high=max(2**16, largest.order))
    if order < largest.order:
        raise CompressionError(
            f"to is {order}, but {largest.said} has {largest.order} states: expected at least {largest.order}; to drop"
            " states, call compress_"
        )
    return order


def _prepared(cutter: Cutter, layers: dict[str, Layer], wanted: dict[str, int]) -> PreparedPlan:
    found: Any = find(cutter.inner)
    cuts = filled_up({}, found, wanted, cutter.optimizer)
    modules = {name: layers[name].module for name in wanted}
    for k, model in enumerate(cutter.follow):
        cuts += filled_up({}, require_alike(f"follow[{k}]", model, modules), wanted)
    return PreparedPlan(cuts, [])
