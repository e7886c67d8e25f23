"""The cutter: it plans a cut, prepares values, optimizer state and followers, and writes them all."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from compressm.adapters import Adapter, find
from compressm.adapters.mamba import refused_in
from compressm.compression.budget import Budget
from compressm.compression.copies import cut_copy, loss_of
from compressm.compression.distributed import Processes, renew_wrappers_, require_rewrappable, unwrapped, wrappers_in
from compressm.compression.optimizer import Moments, require_supported
from compressm.compression.planning import (
    Choice,
    ChosenCuts,
    Options,
    changes_of,
    found_layers,
    has_functions,
    priced,
    read_layers,
    spectra,
    stage,
    unfit,
    unused_options,
)
from compressm.compression.policies import Limits, require_given
from compressm.compression.record import Cut
from compressm.compression.schedule import Answer
from compressm.compression.several import kept_groups, kind_of
from compressm.compression.sharding import is_sharded, require_no_new_parameters, require_whole
from compressm.compression.surgery import (
    PreparedCut,
    padded,
    prepare_cuts,
    require_plain_parameters,
    require_suitable,
    write_cuts_,
)
from compressm.compression.trying import Orders, Trials, TryingPolicy
from compressm.control import ControlError, UnstableSystemError
from compressm.errors import AdapterError, CompressionError, warn_caller
from compressm.families import Layer, PlannedCut
from compressm.families.choices import LayerOrders, RoundTo, as_allowed_orders
from compressm.families.observing import ratio_of, untouched
from compressm.layers.base import state_holders
from compressm.layers.parameters import refuse_to_average_

_SENDING, _MEASURING = "sending the cut to all processes", "measuring what the cut changes"

Found: TypeAlias = Mapping[str, tuple[nn.Module, Adapter[Any, Any]]]


@dataclass(frozen=True)
class Tried:
    """The losses that a policy measured: of the model as it is, after the chosen cut, and of the best trial; None
    where it did not ask. `count` is the number of trial cuts, `note` what the policy says of its choice.
    """

    before: float | None
    after: float | None
    count: int
    least: float | None = None
    note: str = ""

    def account(self, best: float | None, added: float) -> tuple[float | None, float]:
        """The best loss seen, and what cuts have added to it since, after this cut; given those before it."""
        if self.before is None:
            return best, added
        best, added = (self.before, 0.0) if best is None or self.before <= best else (best, added)
        return best, added + (0.0 if self.after is None else max(0.0, self.after - self.before))

    def __str__(self) -> str:
        trials = f"{self.count} trial{'s' * (self.count != 1)}"
        if self.before is None:
            return trials
        after = f" -> {self.after:.4g}" if self.after is not None else ""
        least = f", at least {self.least:.4g} after a cut" if not after and self.least is not None else ""
        note = f"; {self.note}" if self.note else ""
        return f"{trials}, loss {self.before:.4g}{after}{least}{note}"


@dataclass(frozen=True)
class CutPlan:
    """The cuts of one step, the orders to which zero states fill up layers, and the time that planning took.

    `unfit` is the text of a warning about orders that the options do not allow, `tried` what trial cuts found.
    """

    cuts: list[PlannedCut]
    seconds: float
    filled: Mapping[str, int] = field(default_factory=dict)
    unfit: str = ""
    tried: Tried | None = None


@dataclass(frozen=True)
class PreparedPlan:
    """The values of one step's cuts, those of followers included, and the records of the cuts."""

    cuts: list[PreparedCut]
    records: list[Cut]


@dataclass(frozen=True)
class Cutter:
    """A model, its optimizer, the copies that follow, and the options of cuts.

    All processes write what the first one planned and prepared.
    """

    model: nn.Module
    optimizer: Any | None
    options: Options
    moments: Moments
    follow: tuple[nn.Module, ...]

    @property
    def inner(self) -> nn.Module:
        """The model without wrappers."""
        return unwrapped(self.model)

    @property
    def processes(self) -> Processes:
        """The process group of the wrapper, or all processes; whoever plans or writes takes everything back."""
        wrappers = wrappers_in(self.model) if isinstance(self.model, nn.Module) else []
        return Processes(wrappers[0].process_group if wrappers else None, "; nothing was changed on this process")

    def meet(self, call: str, **said: object) -> None:
        """Wait for all processes; calls or options that differ between them are refused in all."""
        options = {name: _text(value) for name, value in vars(self.options).items()}
        trainer = None if self.optimizer is None else kind_of(self.optimizer)
        self.processes.meet(call, **said, **options, moments=self.moments, optimizer=trainer)

    def allowed(self) -> RoundTo:
        """The allowed orders, those of each layer if `round_to` is not a number."""
        found, round_to = find(self.inner, self.options.filter_fn), self.options.round_to
        if isinstance(round_to, int):
            return round_to
        allowed = as_allowed_orders(round_to)
        return LayerOrders({name: allowed.of(adapter.RECURRENCE) for name, (_, adapter) in found.items()})

    @property
    def found(self) -> Found:
        """The modules to cut, with their adapters, by name."""
        return find(self.inner, self.options.filter_fn)

    def require_copies(self) -> None:
        """Refuse a policy that tries cuts of a model that cannot be copied for them."""
        if isinstance(self.options.keep, TryingPolicy) and is_sharded(self.inner):
            raise CompressionError(
                f"keep is {self.options.keep}, which tries cuts on copies; a model sharded by fully_shard cannot be"
                " copied: expected a policy that tries nothing, such as EnergyTolerance(0.05)"
            )

    def is_spent(self, orders: Mapping[str, int]) -> bool:
        """True if gate, allowed orders and the least order let no layer of these orders lose a state."""
        options = self.options
        limits = Limits.of(orders, options.gate, self.allowed(), options.at_least)
        return all(limits.applied(name, 1, n) == n for name, n in orders.items())

    def spectra(self, layers: Mapping[str, Layer]) -> dict[str, Tensor]:
        """The values of the states by layer, on the CPU."""
        with torch.no_grad(), stage("spectra"):
            return spectra(layers, self.options)

    def check(self) -> dict[str, Layer]:
        """The layers as they are now; everything that the first cut would refuse is refused now."""
        if not isinstance(self.moments, Moments):
            raise CompressionError(f"moments is {self.moments!r}, expected Transport(), Restart() or Slice()")
        layers = found_layers(self.inner, self.options)
        for wrapper in wrappers_in(self.model):
            require_rewrappable(wrapper)
        require_suitable(self.inner, layers, self.optimizer, self.moments)
        if self.options.filter_fn is None and (said := refused_in(self.inner)):
            warn_caller(f"not all of {type(self.inner).__name__} is cut{said}")
        if said := unused_options(self.inner, self.options):
            warn_caller(said)
        for k, model in enumerate(self.follow):
            require_alike(f"follow[{k}]", model, {name: layer.module for name, layer in layers.items()})
        keep = priced(self.inner, layers, self.options).keep
        if isinstance(keep, Budget) and keep.measure is None and not self.options.overrides:
            keep.common_order({name: layer.order for name, layer in layers.items()}, allowed=[1])
        return layers

    def observed(self, layers: dict[str, Layer] | None = None) -> dict[str, Layer]:
        """The layers with the observations of all processes; `layers` are those that `check` has just read."""
        with torch.no_grad():
            with self.processes.together("reading the layers"):
                layers = read_layers(self.inner, self.options, layers, self.optimizer)
            return _over(self.processes, layers)

    def plan(
        self,
        *,
        salt: int,
        layers: dict[str, Layer] | None = None,
        observed: dict[str, Layer] | None = None,
        attempt: Answer | None = None,
        best: float | None = None,
        added: float = 0.0,
    ) -> CutPlan:
        """Plan the cuts of the present model; nothing is changed.

        `layers` are those that `check` has just read, `observed` those with observations. `attempt` is what a schedule
        wants of this cut; for policies that try cuts, `best` is the best loss that was seen before, and `added` what
        cuts have added to it since.
        """
        start, processes, tried = time.perf_counter(), self.processes, None
        share = 0.0 if attempt is None else attempt.share
        with torch.no_grad():
            layers = self.observed(layers) if observed is None else observed
            chosen, said = ChosenCuts([], {}), ""
            with processes.together("planning the cut"):
                if isinstance(self.options.keep, TryingPolicy):
                    chosen, tried = _Trying(self, layers, self.options.keep, (best, added)).chosen(salt, attempt)
                elif processes.is_first:
                    chosen = self._chosen(layers, salt, share)
                if processes.is_first:
                    said = unfit(layers, chosen, self.options)
            cuts = _as_first(processes, chosen.cuts, layers)
            filled, said, tried = processes.as_first((chosen.filled, said, tried), _SENDING)
        return CutPlan(cuts, time.perf_counter() - start, filled, said, tried)

    def _chosen(self, layers: dict[str, Layer], salt: int, share: float) -> ChosenCuts:
        def choose() -> ChosenCuts:
            choice = self.choice(layers, salt, share)
            return choice.cuts(choice.orders())

        if not has_functions(self.options):
            return choose()
        return untouched(self.inner, "a policy", choose, kept_groups(self.optimizer))

    def choice(self, layers: dict[str, Layer], salt: int, share: float) -> Choice:
        """The choice of orders for these layers, in the first process."""
        return Choice.of(layers, priced(self.inner, layers, self.options), salt, share)

    def prepare(self, plan: CutPlan, step: int) -> PreparedPlan:
        """Everything that a plan writes, and its records, the same in all processes; nothing is changed."""
        if not plan.cuts:
            return PreparedPlan([], [])  # nothing is filled up without a cut
        start, processes = time.perf_counter(), self.processes
        if processes.is_first and (grown := plan.filled.keys() - {cut.layer.name for cut in plan.cuts}):
            said = ", ".join(f"{name or 'the model'} to {plan.filled[name]} states" for name in sorted(grown))
            warn_caller(f"zero states fill up {said}, so that all layers have one order; outputs stay the same")
        with processes.together("preparing the cut"):
            prepared, following = self._prepared(plan)
        # Rounding may differ between processes, so all write the first one's values. Not all need to have followers.
        prepared = _written_by_first(processes, prepared)
        taken = replace(plan, seconds=plan.seconds + time.perf_counter() - start)
        return PreparedPlan([*prepared, *following], processes.as_first(self.describe(taken, step), _SENDING))

    def write_(self, prepared: PreparedPlan, undo: ExitStack) -> None:
        """Write a prepared plan and renew the model's wrappers; closing `undo` puts everything back."""
        added = [f"{cut.name}.{name}" for cut in prepared.cuts for name in cut.writing.added]
        require_no_new_parameters(self.inner, added)
        modules = [cut.module for cut in prepared.cuts]
        # Called last: parameters that were written and restored have lost the wrapper's hooks.
        undo.callback(renew_wrappers_, self.model, modules)
        with stage("write"):
            write_cuts_(prepared.cuts, self.optimizer, undo, models=(self.inner, *self.follow))
        following = {module for model in self.follow for module in model.modules()}
        refuse_to_average_(self.model, set(modules) - following, undo)
        renew_wrappers_(self.model, modules)

    def renew_wrappers_(self) -> None:
        """Renew the model's wrappers after a rollback has changed the shapes of parameters."""
        renew_wrappers_(self.model, [module for module, _ in find(self.inner).values()])

    def describe(self, plan: CutPlan, step: int) -> list[Cut]:
        """The records of a plan, also of layers that are only filled up; each cut gets an equal share of the time."""
        cut_layers = {cut.layer.name for cut in plan.cuts}
        grown = {name: order for name, order in plan.filled.items() if plan.cuts and name not in cut_layers}
        found = find(self.inner, self.options.filter_fn) if grown else {}
        orders = {name: adapter.order(module) for name, (module, adapter) in found.items()}
        losses = (plan.tried.before, plan.tried.after) if plan.tried is not None else (None, None)
        cuts = [
            Cut(
                step=step,
                module=cut.layer.name,
                order=cut.layer.order,
                rank=plan.filled.get(cut.layer.name, cut.rank),
                error_bound=cut.error_bound,
                measured_error=cut.measured_error,
                energy_lost=cut.energy_lost,
                seconds=plan.seconds / len(plan.cuts),
                loss_before=losses[0],
                loss_after=losses[1],
            )
            for cut in plan.cuts
        ]
        return cuts + [
            Cut(step, name, orders[name], order, 0.0, None, 0.0, 0.0, *losses) for name, order in grown.items()
        ]

    def _prepared(self, plan: CutPlan) -> tuple[list[PreparedCut], list[PreparedCut]]:
        """The prepared cuts of the model, and those of its followers."""
        found = find(self.inner, self.options.filter_fn) if plan.filled else {}
        modules = {cut.layer.name: cut.layer.module for cut in plan.cuts}
        modules |= {name: found[name][0] for name in plan.filled}
        copies = [require_alike(f"follow[{k}]", model, modules) for k, model in enumerate(self.follow)]
        with stage("encode"):
            changes = changes_of(plan.cuts)
        with stage("optimizer"):
            prepared = prepare_cuts(changes, self.optimizer, self.moments)
        prepared = [_for_streams(one, cut, cut.layer.adapter) for one, cut in zip(prepared, plan.cuts, strict=True)]
        own = filled_up({cut.name: cut for cut in prepared}, found, plan.filled, self.optimizer)
        following: list[PreparedCut] = []
        for k, others in enumerate(copies):
            cuts = {cut.layer.name: _following(f"follow[{k}]", cut, *others[cut.layer.name]) for cut in plan.cuts}
            following += filled_up(cuts, others, plan.filled)
        return own, following


def filled_up(
    cuts: Mapping[str, PreparedCut], found: Found, orders: Mapping[str, int], optimizer: Any | None = None
) -> list[PreparedCut]:
    """The prepared cuts, and layers that are not cut, with zero states up to these orders."""
    whole = {name: _uncut(name, *found[name], optimizer) for name in orders if name not in cuts}
    return [
        padded(cut, found[name][1], orders[name]) if name in orders else cut for name, cut in {**cuts, **whole}.items()
    ]


def _uncut(name: str, module: nn.Module, adapter: Adapter[Any, Any], optimizer: Any | None) -> PreparedCut:
    """A layer as it is, as if it had been cut to its present order."""
    require_plain_parameters(name, module)
    try:
        grown = {entry: module.get_parameter(entry) for entry in adapter.growth(module)}
    except AdapterError as error:
        raise CompressionError(f"{name or 'the model'}: {error}") from error
    states: dict[str, Mapping[str, Any]] = {}
    if optimizer is not None:
        require_supported(optimizer, {entry: p for entry, p in grown.items() if p.requires_grad})
        states = {entry: dict(state) for entry, p in grown.items() if (state := optimizer.state.get(p))}
    values = {entry: parameter.detach() for entry, parameter in grown.items()}
    return PreparedCut(name, module, values, states, state_map=lambda state: state)


def _following(which: str, cut: PlannedCut, module: nn.Module, adapter: Adapter[Any, Any]) -> PreparedCut:
    """The same change of basis for a follower, so that its layers keep the coordinates of the model."""
    name = f"{which}: {cut.layer.name or 'the model'}"
    try:
        with torch.no_grad():
            writing = cut.following(module, adapter)
    except UnstableSystemError as error:
        raise CompressionError(
            f"{name}: with the states that the model keeps it would be unstable ({error}): its weights are too far from"
            " the model's to be cut with it; give it the model's weights again before the cut, or leave it out of"
            " follow and make it anew afterwards"
        ) from error
    except (ControlError, AdapterError) as error:
        raise CompressionError(f"{name}: {error}") from error
    return _for_streams(PreparedCut(name, module, writing.values, writing=writing), cut, adapter)


def _for_streams(prepared: PreparedCut, cut: PlannedCut, adapter: Adapter[Any, Any]) -> PreparedCut:
    """The cut with a map of states, if there are streams of the module."""
    if not state_holders(prepared.module):
        return prepared
    return replace(prepared, state_map=cut.state_map(prepared.module, adapter, prepared.values))


def followers(follow: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """The followers as a tuple; a single model is refused."""
    if isinstance(follow, nn.Module) or not isinstance(follow, Sequence):
        raise CompressionError(f"follow is a {type(follow).__name__}, expected a list of models")
    for k, one in enumerate(follow):
        if isinstance(one, nn.Module):
            require_whole(f"follow[{k}]", one)
    return tuple(follow)


def require_alike(which: str, model: object, modules: Mapping[str, nn.Module]) -> Found:
    """The layers of a follower; they must be its own, with the names, classes and shapes of the model's."""
    if not isinstance(model, nn.Module):
        raise CompressionError(f"{which} is a {type(model).__name__}, expected a model with the layers of the first")
    if absent := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise CompressionError(f"{which}: {absent[0]} is on the meta device, expected a copy of the model with values")
    found, kind = find(model), type(model).__name__
    for name, module in modules.items():
        if name not in found:
            raise CompressionError(f"{which}: {kind} has no SSM layer {name!r}; it has {', '.join(found) or 'none'}")
        other = found[name][0]
        if other is module:
            raise CompressionError(f"{which}: {name!r} is the model's own layer, expected a copy, such as an average")
        if type(other) is not type(module):
            raise CompressionError(
                f"{which}: {name!r} is of the class {type(other).__name__}, the model's is {type(module).__name__}"
            )
        shapes, own = ({key: tuple(p.shape) for key, p in one.named_parameters()} for one in (other, module))
        odd = next((key for key in own | shapes if own.get(key) != shapes.get(key)), None)
        if odd is not None:
            raise CompressionError(
                f"{which}: {name}.{odd} has the shape {shapes.get(odd)}, the model's {own.get(odd)}: expected the same"
                " width and order; if the model was loaded, load the state of the copy that was saved with it too, or"
                " make the copy anew from the model"
            )
    return found


def _text(value: object) -> str:
    """An option in words that are the same in every process: a function by its name, not by its address."""
    if isinstance(value, Mapping):
        return str({name: _text(entry) for name, entry in value.items()})
    if isinstance(value, TryingPolicy) or is_dataclass(value) or not callable(value):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def ordinary_tensors() -> AbstractContextManager[object]:
    """Leave inference mode, whose tensors could not be trained, without building a graph."""
    if not torch.is_inference_mode_enabled():
        return nullcontext()
    outside = ExitStack()
    outside.enter_context(torch.inference_mode(False))
    outside.enter_context(torch.no_grad())
    return outside


def _over(processes: Processes, layers: dict[str, Layer]) -> dict[str, Layer]:
    """The layers with the observations of all processes, whose layers must agree."""
    if processes.count == 1:
        return layers
    # Sums of other sizes end a process of gloo without an error.
    processes.require_same("layers", {key: text for layer in layers.values() for key, text in _described(layer)})
    return {name: layer.over(processes.total) for name, layer in layers.items()}


def _described(layer: Layer) -> Iterator[tuple[str, str]]:
    """The names of a layer and of its parameters, with what must be the same in all processes."""
    yield layer.said, f"{type(layer.module).__name__} of order {layer.order}"
    for key, parameter in layer.module.named_parameters():
        yield f"{layer.said}.{key}", f"{tuple(parameter.shape)} {parameter.dtype}"


def _as_first(processes: Processes, cuts: list[PlannedCut], layers: Mapping[str, Layer]) -> list[PlannedCut]:
    """The first process's plan on all processes, with the error measured on the data of all."""
    if processes.count == 1:
        return cuts
    sent = processes.as_first([(cut.layer.name, cut.sent()) for cut in cuts], _SENDING)
    with processes.together(_MEASURING):
        planned = [layers[name].received(cut) for name, cut in sent]
        squares = [square for cut in planned if (square := cut.squared_change()) is not None]
    if len(squares) < len(planned) or not planned:
        return planned
    totals = processes.total(torch.stack(squares), _MEASURING)
    return [cut.measured(ratio_of(total)) for cut, total in zip(planned, totals, strict=True)]


@final
@dataclass(frozen=True)
class _Trying:
    """A policy that tries cuts: the first process asks, and all make each trial and share its loss.

    The first process sends what is to be tried, then None; all of them leave together, or raise together.
    """

    cutter: Cutter
    layers: dict[str, Layer]
    policy: TryingPolicy
    seen: tuple[float | None, float]

    def chosen(self, salt: int, attempt: Answer | None) -> tuple[ChosenCuts, Tried | None]:
        """The cuts that the policy chooses, in the first process; in the others none."""
        act = partial(self._led, salt, attempt) if self.cutter.processes.is_first else self._followed
        who = "a policy" if has_functions(self.cutter.options) else "loss"
        return untouched(self.cutter.inner, who, act, kept_groups(self.cutter.optimizer))

    def _followed(self) -> tuple[ChosenCuts, Tried | None]:
        while (sent := self._ask(None)) is not None:
            self._measured(*sent)
        return ChosenCuts([], {}), None

    def _led(self, salt: int, attempt: Answer | None) -> tuple[ChosenCuts, Tried | None]:
        asking = _Asking(self)
        try:
            return self._chosen(salt, attempt, asking)
        finally:
            asking.end()

    def _chosen(self, salt: int, attempt: Answer | None, asking: _Asking) -> tuple[ChosenCuts, Tried | None]:
        choice, policy = self.cutter.choice(self.layers, salt, 0.0 if attempt is None else attempt.share), self.policy
        present = {name: sigma.shape[-1] for name, sigma in choice.tried.items()}
        channels = {name: count for name, count in choice.by_channel.items() if name in present}
        if not present:
            return choice.cuts(choice.orders()), None
        now = require_given(policy, present, present, channels)
        others = {name: order for name, order in choice.orders().items() if name not in now}

        def measure(orders: Orders | None) -> float:
            cuts = ChosenCuts([], {}) if orders is None else choice.cuts(orders)
            alone = self.cutter.processes.count == 1
            sent = [] if alone else [(cut.layer.name, cut.sent()) for cut in cuts.cuts]
            return asking.loss((sent, cuts.filled), cuts.cuts)

        trials = Trials(
            now | others, choice.limited, measure, frozenset(channels), choice.options.uniform is True, *self.seen
        )
        if attempt is not None and attempt.cautious:
            fewest = {name: 1 if isinstance(order, int) else (1,) * len(order) for name, order in now.items()}
            trials.smallest_orders = replace(choice, share=0.0).limited(fewest)
        values = {name: sigma.clone() for name, sigma in choice.tried.items()}
        given = policy.choose(values, trials)
        asking.require_whole()
        orders = choice.limited(given)
        chosen, losses = choice.cuts(orders), [loss for _, loss in trials.made]
        after = trials.known(orders) if chosen.cuts and trials.measured is not None else None
        after = None if after is None or math.isinf(after) else after
        return chosen, Tried(trials.measured, after, trials.count, min(losses, default=None), trials.note)

    def _ask(self, what: Any) -> Any:
        return self.cutter.processes.as_first(what, "asking for a trial cut")

    def _measured(self, sent: list[Any], filled: Mapping[str, int], own: list[PlannedCut] | None = None) -> float:
        """The mean loss over all processes after these cuts, which this process may have planned itself."""
        cutter, processes = self.cutter, self.cutter.processes
        with processes.together("trying a cut"):
            cuts = [self.layers[name].received(cut) for name, cut in sent] if own is None else own
            with stage("encode"):
                changes = changes_of(cuts)
            twin = cut_copy(cutter.inner, changes, lambda cuts, found: filled_up(cuts, found, filled), [*filled])
            found = loss_of(twin, self.policy.loss, list(self.layers), cutter.optimizer)
        total = processes.total(torch.tensor([found], dtype=torch.float64), "adding up the losses of a trial cut")
        return float(total) / processes.count


@dataclass
class _Asking:
    """The first process's side of trials; after a failure nothing is sent any more, since no process listens."""

    trying: _Trying
    failure: BaseException | None = None

    def loss(self, sent: tuple[list[Any], Mapping[str, int]], own: list[PlannedCut]) -> float:
        """The loss after these cuts; the first failure is raised again and again."""
        self.require_whole()
        try:
            self.trying._ask(sent)
            return self.trying._measured(*sent, own=own)
        except BaseException as error:
            self.failure = error
            raise

    def require_whole(self) -> None:
        """Raise the failure of an earlier trial, which a policy may have caught."""
        if self.failure is not None:
            raise self.failure

    def end(self) -> None:
        """Tell the other processes that there are no more trials."""
        if self.failure is None:
            self.trying._ask(None)


def _written_by_first(processes: Processes, cuts: list[PreparedCut]) -> list[PreparedCut]:
    """The same cuts with the first process's values and states, on the devices of this process."""
    if processes.count == 1:
        return cuts
    sent = processes.as_first(
        [tuple(_moved(part, "cpu") for part in (cut.values, cut.writing.buffers, cut.states)) for cut in cuts], _SENDING
    )
    written = []
    for cut, (values, buffers, states) in zip(cuts, sent, strict=True):
        device = next(cut.module.parameters()).device
        writing = replace(cut.writing, buffers=_moved(buffers, device))
        written.append(replace(cut, values=_moved(values, device), states=_like(states, cut.states), writing=writing))
    return written


def _moved(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Mapping):
        return {key: _moved(entry, device) for key, entry in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def _like(value: Any, own: Any) -> Any:
    """Each tensor on the device of this process's own: step counts may be on the CPU and moments on a GPU."""
    if isinstance(value, Mapping):
        return {key: _like(entry, own.get(key, {})) for key, entry in value.items()}
    return value.to(own.device) if isinstance(value, Tensor) and isinstance(own, Tensor) else value
