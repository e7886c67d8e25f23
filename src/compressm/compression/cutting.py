"""The cutter: it plans a cut, prepares values, optimizer state and followers, and writes them all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from compressm.adapters import Adapter, find
from compressm.adapters.mamba import refused_in
from compressm.compression.budget import Budget
from compressm.compression.distributed import Processes, renew_wrappers_, require_rewrappable, unwrapped, wrappers_in
from compressm.compression.optimizer import Moments, require_supported
from compressm.compression.planning import (
    ChosenCuts,
    Options,
    changes_of,
    choose_cuts,
    found_layers,
    has_functions,
    priced,
    read_layers,
    require_suitable,
    stage,
    unfit,
    unused_options,
)
from compressm.compression.record import Cut
from compressm.compression.several import kind_of
from compressm.compression.sharding import require_no_new_parameters
from compressm.compression.surgery import PreparedCut, padded, prepare_cuts, require_plain_parameters, write_cuts_
from compressm.control import ControlError
from compressm.errors import AdapterError, CompressionError, warn_caller
from compressm.families import Layer, PlannedCut
from compressm.families.choices import LayerOrders, RoundTo, as_allowed_orders
from compressm.families.observing import ratio_of, untouched
from compressm.layers.parameters import refuse_to_average_, state_holders

_SENDING, _MEASURING = "sending the cut to all processes", "measuring what the cut changes"

Found: TypeAlias = Mapping[str, tuple[nn.Module, Adapter[Any, Any]]]


@dataclass(frozen=True)
class CutPlan:
    """The cuts of one step, the orders to which zero states fill up layers, and the time that planning took.

    `unfit` is the text of a warning about orders that the options do not allow.
    """

    cuts: list[PlannedCut]
    seconds: float
    filled: Mapping[str, int] = field(default_factory=dict)
    unfit: str = ""


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

    def plan(self, *, salt: int, layers: dict[str, Layer] | None = None) -> CutPlan:
        """Plan the cuts of the present model; nothing is changed. `layers` are those that `check` has just read."""
        start, processes = time.perf_counter(), self.processes
        with torch.no_grad():
            with processes.together("reading the layers"):
                layers = read_layers(self.inner, self.options, layers)
            layers = _over(processes, layers)
            chosen, said = ChosenCuts([], {}), ""
            with processes.together("planning the cut"):
                if processes.is_first:
                    chosen, said = self._chosen(layers, salt)
            cuts = _as_first(processes, chosen.cuts, layers)
            filled, said = processes.as_first((chosen.filled, said), _SENDING)
        return CutPlan(cuts, time.perf_counter() - start, filled, said)

    def _chosen(self, layers: dict[str, Layer], salt: int) -> tuple[ChosenCuts, str]:
        def choose() -> tuple[ChosenCuts, str]:
            chosen = choose_cuts(layers, priced(self.inner, layers, self.options), salt=salt)
            return chosen, unfit(layers, chosen, self.options)

        return untouched(self.inner, "a policy", choose) if has_functions(self.options) else choose()

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
            )
            for cut in plan.cuts
        ]
        return cuts + [Cut(step, name, orders[name], order, 0.0, None, 0.0, 0.0) for name, order in grown.items()]

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
    if is_dataclass(value) or not callable(value):
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
