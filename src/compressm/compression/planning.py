"""Planning of cuts, for layers of any family: options, layers, spectra, orders; nothing is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters import find
from compressm.adapters.mamba import refused_in
from compressm.compression.budget import Budget
from compressm.compression.distributed import unwrapped
from compressm.compression.optimizer import Moments, rehearse_moments
from compressm.compression.policies import (
    GATE,
    ErrorBound,
    KeepFraction,
    Limits,
    Policy,
    choose_channel_orders,
    choose_orders,
    obstacles,
    require_choices,
    require_given,
    require_reachable,
    require_uniform,
    restricted,
)
from compressm.compression.pricing import PRICES
from compressm.compression.several import kept_groups
from compressm.compression.surgery import require_plain_parameters
from compressm.compression.trying import Orders, TryingPolicy
from compressm.control import ControlError, numerical_rank
from compressm.errors import CompressionError, warn_caller
from compressm.families import Family, Layer, PlannedCut, family_of, read_layer
from compressm.families.base import Change
from compressm.families.choices import (
    AllowedOrders,
    Choices,
    Gramian,
    Largest,
    LayerOrders,
    Measured,
    RoundTo,
    Selection,
    WhiteNoise,
    as_allowed_orders,
    next_common,
    orders_by_name,
)
from compressm.families.memory.forms import Form
from compressm.families.observing import Calibrate, observe, require_calibrate
from compressm.families.selective.methods import Baked, SelectiveMethod

Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True)
class Options:
    """The options of a cut: keywords of `Compressor` and `compress_`."""

    keep: Policy
    calibrate: Calibrate | None = None
    gramian: Gramian | None = None
    fold: bool = True
    select: Selection = Largest()
    gate: float = GATE
    round_to: RoundTo = 1
    at_least: int = 1
    filter_fn: Callable[[nn.Module, str], bool] | None = None
    overrides: Mapping[str, Policy] | None = None
    selective: SelectiveMethod = Baked()
    uniform: bool | None = None
    form: Form | None = None

    def __post_init__(self) -> None:
        allowed = as_allowed_orders(self.round_to)
        if not isinstance(self.round_to, int):
            object.__setattr__(self, "round_to", allowed)  # printed in the same way by every process
        if self.uniform is None:
            object.__setattr__(self, "uniform", allowed.one_for_all)
        require_uniform(self.uniform, self.overrides)
        if isinstance(self.gramian, Measured) and self.calibrate is None:
            raise CompressionError(
                f"gramian is {self.gramian} without calibrate: pass calibrate=lambda model: model(inputs)"
            )
        if self.gramian is not None and not isinstance(self.gramian, Gramian):
            raise CompressionError(f"gramian is {self.gramian!r}, expected WhiteNoise(), Measured(...) or Modal()")
        if self.calibrate is not None:
            require_calibrate(self.calibrate)
        if self.filter_fn is not None and not callable(self.filter_fn):
            raise CompressionError(
                f"filter_fn is {self.filter_fn!r}, expected a function of a module and its name: (module, name)"
            )
        if not isinstance(self.fold, bool):
            raise CompressionError(f"fold is {self.fold!r}, expected True or False")
        if not isinstance(self.select, Selection):
            raise CompressionError(f"select is {self.select!r}, expected Largest(), Smallest() or Random(seed)")
        if not isinstance(self.selective, SelectiveMethod):
            raise CompressionError(
                f"selective is {self.selective!r:.100}, expected Baked(), PerChannel(...) or SharedIndex()"
            )
        if self.form is not None and not isinstance(self.form, Form):
            raise CompressionError(
                f"form is {self.form!r:.100}, expected Folded(), Mapped(), Selected(...), Fitted(...) or None"
            )

    @property
    def choices(self) -> Choices:
        """The options that concern families."""
        return Choices(self.calibrate is not None, self.gramian, self.fold, self.select, self.selective, form=self.form)


STAGES = ("calibrate", "read", "spectra", "reduce", "encode", "optimizer", "write")

StageWatch: TypeAlias = Callable[[str], AbstractContextManager[object]]

_watch: ContextVar[StageWatch] = ContextVar("watch", default=lambda name: nullcontext())


def stage(name: str) -> AbstractContextManager[object]:
    """A context for the work of one of `STAGES`; stages do not nest."""
    return _watch.get()(name)


@contextmanager
def watching(watch: StageWatch) -> Iterator[None]:
    """Run every stage of a cut inside `watch(name)`."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def found_layers(model: nn.Module, options: Options) -> dict[str, Layer]:
    """The layers to cut, each read once; at least one is required, and each must suit the options."""
    found = find(model, options.filter_fn)
    kind = type(model).__name__
    if not found and options.filter_fn is not None and (all_of_them := find(model)):
        raise CompressionError(
            f"filter_fn accepts no SSM layer of {kind}; expected filter_fn(module, name) to be True for at least one of"
            f" {', '.join(map(repr, all_of_them))}"
        )
    if not found:
        raise CompressionError(
            f"{kind} has no SSM layer that an adapter reads{refused_in(model)}; see compressm.adapters"
        )
    families = {name: family_of(adapter) for name, (_, adapter) in found.items()}
    _require_bounds(families, options)
    for family, names in _by_family(families).items():
        family.require_choices(names, options.choices)
    _require_policies(families, options)
    _require_orders(families, {name: adapter.RECURRENCE for name, (_, adapter) in found.items()}, options)
    require_reachable(families, options.overrides)
    layers = {}
    with stage("read"), torch.no_grad():
        for name, (module, adapter) in found.items():
            require_plain_parameters(name, module)
            layers[name] = layer = read_layer(name, module, adapter, options.choices)
            family_of(adapter).require_layer(layer, options.choices)
    return layers


def _require_policies(families: Mapping[str, Family], options: Options) -> None:
    """Refuse policies that make no sense for a family."""
    limits = (options.gate, options.round_to, options.at_least)
    for policy, own in require_choices(families, options.keep, options.overrides, *limits):
        # All but a number of states count the whole model.
        whole = isinstance(policy, Budget) and policy.total_states is None
        for family, named in _by_family({name: families[name] for name in (families if whole else own)}).items():
            said = ", ".join(name or "the model" for name in named)
            if isinstance(policy, Budget) and family.is_by_channel(options.choices):
                raise CompressionError(
                    f"{said}: {policy} distributes states over layers, but {options.selective} gives every channel its"
                    " own order; expected another policy, such as EnergyTolerance(0.05)"
                )


def _require_orders(families: Mapping[str, Family], recurrences: Mapping[str, str], options: Options) -> None:
    """Refuse a runtime that cannot run a layer, and one order for all layers if each channel gets its own."""
    allowed = as_allowed_orders(options.round_to)
    for recurrence, names in _by_value(recurrences).items():
        try:
            allowed.of(recurrence)
        except CompressionError as error:
            raise CompressionError(f"{', '.join(name or 'the model' for name in names)}: {error}") from None
    apart = [name for name, family in families.items() if family.is_by_channel(options.choices)]
    if options.uniform and apart:
        raise CompressionError(
            f"{', '.join(name or 'the model' for name in apart)}: {options.selective} gives every channel its own"
            " order, so layers cannot have one for all (uniform); expected Baked() or SharedIndex()"
        )


def _require_bounds(families: Mapping[str, Family], options: Options) -> None:
    """Refuse `ErrorBound` for layers without a bound; one message says what all of them need."""
    limits = (options.gate, options.round_to, options.at_least)
    theory, advice = replace(options.choices, gramian=WhiteNoise()), []
    for policy, own in require_choices(families, options.keep, options.overrides, *limits):
        for family, named in _by_family({name: families[name] for name in own}).items():
            if not isinstance(policy, ErrorBound) or family.is_bounded(options.choices):
                continue
            said = f"{', '.join(name or 'the model' for name in named)}: {policy} needs an error bound, which"
            if family.is_bounded(theory):
                advice.append(
                    f"{said} measured Gramians do not have; expected gramian=WhiteNoise(), with which calibrate still"
                    " gives measured_error, or another policy, such as EnergyTolerance(0.05)"
                )
            else:
                data = family.needs_data and not options.choices.calibrated
                advice.append(
                    f"{said} {family.called} never have; expected another policy for them in keep or overrides, such as"
                    f" EnergyTolerance(0.05){', and calibrate=lambda model: model(inputs)' if data else ''}"
                )
    if advice:
        raise CompressionError("; ".join(advice))


def has_functions(options: Options) -> bool:
    """True if a policy is not one of ours, and so may do anything."""
    policies = [options.keep, *(options.overrides or {}).values()]
    return any(type(policy).__module__.split(".")[0] != "compressm" for policy in policies)


def unused_options(model: nn.Module, options: Options) -> str:
    """The text of a warning about options that no layer of the model uses; empty if there are none."""
    families = [family_of(adapter) for _, adapter in find(model, options.filter_fn).values()]
    given = {
        "fold": "" if options.fold else "fold=False",
        "selective": "" if options.selective == Options.selective else f"selective={options.selective}",
        "form": "" if options.form is None else f"form={options.form}",
    }
    unused = [said for name, said in given.items() if said and not any(name in family.uses for family in families)]
    if families and all(family.overrules_gramian(options.choices) for family in families):
        return (
            f"without effect: gramian={options.gramian}; {options.selective} says itself what is measured: leave it out"
        )
    if not unused:
        return ""
    called = " and ".join(dict.fromkeys(family.called for family in families))
    return (
        f"without effect: {' and '.join(unused)}; {type(model).__name__} has only {called}, which do not use it:"
        " leave it out"
    )


def _by_family(families: Mapping[str, Family]) -> dict[Family, list[str]]:
    return _by_value(families)


def _by_value(values: Mapping[str, Item]) -> dict[Item, list[str]]:
    names: dict[Item, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return names


def read_layers(
    model: nn.Module, options: Options, layers: dict[str, Layer] | None = None, optimizer: Any | None = None
) -> dict[str, Layer]:
    """Every SSM layer of the model, with observations if there is `calibrate`; `layers` are those just read."""
    # A forward pass of DistributedDataParallel waits for the other processes, which may not run one.
    model = unwrapped(model)
    layers = found_layers(model, options) if layers is None else layers
    if options.calibrate is None:
        return layers
    with torch.no_grad():
        observers = {name: layer.observer(options.choices) for name, layer in layers.items()}
    with stage("calibrate"):
        observe(model, options.calibrate, list(observers.values()), kept_groups(optimizer))
    return {name: layer.with_observations(observers[name]) for name, layer in layers.items()}


def spectra(
    layers: Mapping[str, Layer], options: Options, *, cutting: bool = False
) -> dict[str, Float[Tensor, "*bank n"]]:
    """The Hankel singular values of every layer, or the values that its family uses instead, on the CPU."""
    found: dict[str, Tensor] = {}
    choices = replace(options.choices, cutting=cutting)
    for family, names in _by_family({name: family_of(layer.adapter) for name, layer in layers.items()}).items():
        found |= family.spectra([layers[name] for name in names], choices)
        if missing := [repr(name) for name in names if name not in found]:
            raise CompressionError(f"{type(family).__name__}.spectra gave no spectrum for {', '.join(missing)}")
    return {name: found[name].cpu() for name in layers}


@dataclass(frozen=True)
class ChosenCuts:
    """Planned cuts in the order of the layers, and the orders to which layers are filled up with zero states."""

    cuts: list[PlannedCut]
    filled: dict[str, int]

    def order(self, layer: Layer) -> int:
        """The order of a layer after all this."""
        ranks = {cut.layer.name: cut.rank for cut in self.cuts}
        return self.filled.get(layer.name, ranks.get(layer.name, layer.order))


def plan_cuts(layers: Mapping[str, Layer], options: Options, *, salt: int = 0) -> list[PlannedCut]:
    """The cuts that the policy chooses, in the order of the layers; layers that the gate keeps are left out."""
    return choose_cuts(layers, options, salt=salt).cuts


def choose_cuts(layers: Mapping[str, Layer], options: Options, *, salt: int = 0) -> ChosenCuts:
    """The cuts that the policy chooses, and the layers that get zero states."""
    choice = Choice.of(layers, options, salt)
    return choice.cuts(choice.orders())


@final
@dataclass(frozen=True)
class Choice:
    """Layers with the values of their states, of which orders are chosen and then cuts are planned.

    `share` is the share of its states that every layer keeps at least, this time.
    """

    layers: Mapping[str, Layer]
    values: Mapping[str, Tensor]
    options: Options
    salt: int
    share: float = 0.0

    @classmethod
    def of(cls, layers: Mapping[str, Layer], options: Options, salt: int, share: float = 0.0) -> Choice:
        """The choice for these layers; a warning names layers whose values are all zero, which no policy can cut."""
        with stage("spectra"):
            values = spectra(layers, options, cutting=True)
        zero = [layer for name, layer in layers.items() if layer.order > options.at_least and not values[name].any()]
        if zero:
            named = ", ".join(f"{layer.said} ({layer.why_zero})" for layer in zero)
            warn_caller(f"not cut, because all values of their states are zero: {named}")
        return cls(layers, values, options, salt, share)

    def __post_init__(self) -> None:
        allowed = allowed_in(self.layers, self.options)
        object.__setattr__(self, "options", replace(self.options, round_to=allowed))

    @cached_property
    def _families(self) -> dict[Family, list[str]]:
        return _by_family({name: family_of(layer.adapter) for name, layer in self.layers.items()})

    @cached_property
    def by_channel(self) -> dict[str, int]:
        """The number of channels of every layer whose channels get orders of their own."""
        apart = (names for family, names in self._families.items() if family.is_by_channel(self.options.choices))
        return {name: math.prod(self.values[name].shape[:-1]) for names in apart for name in names}

    def orders(self) -> Orders:
        """The orders that the policies choose, with all limits applied; a policy that tries cuts keeps all states."""
        keep, found = self.options.keep, Orders()
        options = replace(self.options, keep=KeepFraction(1.0)) if isinstance(keep, TryingPolicy) else self.options
        apart, together = list(self.by_channel), [name for name in self.layers if name not in self.by_channel]
        if apart:
            by_channel = _chosen(choose_channel_orders, self.values, apart, options, share=self.share)
            found |= {name: tuple(orders) for name, orders in by_channel.items()}
        if together:
            more = {"share": self.share, "uniform": options.uniform}
            found |= _chosen(choose_orders, self.values, together, options, **more)
        return found

    @cached_property
    def tried(self) -> dict[str, Tensor]:
        """The spectra of the layers that a policy which tries cuts chooses for: those that overrides leave to it."""
        options = self.options
        shares = require_choices(
            self.values, options.keep, options.overrides, options.gate, options.round_to, options.at_least
        )
        names = [name for policy, own in shares if policy is options.keep for name in own]
        return {name: self.values[name] for name in self.values if name in names}

    @cached_property
    def _limits(self) -> Limits:
        options = self.options
        return Limits.of(self.values, options.gate, options.round_to, options.at_least, self.share)

    @cached_property
    def _others(self) -> Orders:
        return {name: order for name, order in self.orders().items() if name not in self.tried}

    def limited(self, orders: Any) -> Orders:
        """The orders of all layers after a cut to those that a policy gave for the layers that are `tried`."""
        most = {name: sigma.shape[-1] for name, sigma in self.tried.items()}
        if self.options.uniform:  # zero states fill up small layers to the one order
            most = dict.fromkeys(most, max(most.values(), default=1))
        is_mapping = isinstance(orders, Mapping)
        own = {name: orders[name] for name in orders if name not in self._others} if is_mapping else orders
        given = require_given(self.options.keep, own, most, self.by_channel)
        if self.options.uniform:
            wanted = [order for name, order in given.items() if isinstance(order, int) and self.values[name].any()]
            return {**self._limits.one_for_all(self.tried, max(wanted, default=1))}
        limited = self._limits.applied_to_each(self.tried, given)
        return {name: limited.get(name) or self._others[name] for name in self.values}

    def cuts(self, chosen: Orders) -> ChosenCuts:
        """The cuts to orders with limits applied, and the layers that get zero states."""
        whole = {name: order for name, order in chosen.items() if isinstance(order, int)}
        fewer = _fewer(whole, self.values, self.options)
        orders: dict[str, int | Sequence[int]] = {**fewer}
        orders |= {name: list(order) for name, order in chosen.items() if not isinstance(order, int)}
        planned: dict[str, PlannedCut] = {}
        with stage("reduce"):
            for family, names in self._families.items():
                own = [self.layers[name] for name in names if name in orders]
                planned |= family.plan(own, orders, self.values, self.options.choices, self.salt) if own else {}
        for name, cut in planned.items():
            if name in fewer and cut.rank > fewer[name]:
                said = f"the cut keeps {cut.rank} states, expected at most {fewer[name]}"
                raise CompressionError(f"{name or 'the model'}: {said}")
        cuts = [planned[name] for name in self.layers if name in planned]
        ranks = {name: cut.rank for name, cut in planned.items()}
        return ChosenCuts(cuts, _filled(self.layers, whole, ranks, self.options))


def _filled(
    layers: Mapping[str, Layer], chosen: Mapping[str, int], ranks: Mapping[str, int], options: Options
) -> dict[str, int]:
    """The orders of layers that get zero states: an allowed one after a cut to the rank, or one for all layers."""
    if not ranks:
        return {}
    allowed = orders_by_name(options.round_to, chosen)
    now = {name: ranks.get(name, layers[name].order) for name in chosen}
    if not options.uniform:
        raised = {name: allowed[name].next(now[name]) for name in ranks if name in chosen and allowed[name].fills_up}
        return {name: order for name, order in raised.items() if order is not None and order > now[name]}
    # Of all ranks the largest counts: no layer gets states that none of them needs.
    order = min(chosen[name] for name in ranks)
    members = [name for name in chosen if chosen[name] == order]
    needed = next_common(allowed.values(), max(now[name] for name in members), limit=order) or order
    return {name: needed for name in members if needed > now[name]}


def allowed_in(layers: Mapping[str, Layer], options: Options) -> LayerOrders:
    """The allowed orders of every layer."""
    allowed = as_allowed_orders(options.round_to)
    if isinstance(allowed, LayerOrders):
        return allowed
    return LayerOrders({name: allowed.of(layer.adapter.RECURRENCE) for name, layer in layers.items()})


def unfit(layers: Mapping[str, Layer], chosen: ChosenCuts, options: Options) -> str:
    """The text of a warning about orders that `round_to` does not allow, or that `uniform` does not; else empty."""
    orders = {name: chosen.order(layer) for name, layer in layers.items()}
    rules = orders_by_name(allowed := allowed_in(layers, options), orders)
    odd = [name for name, n in orders.items() if rules[name].fills_up and not rules[name].allows(n)]
    said = [f"{layers[name].said} has {orders[name]} states, allowed: {rules[name]}" for name in odd]
    if options.uniform and len(set(orders.values())) > 1:
        said.append(f"the orders are {', '.join(map(str, orders.values()))}, not one for all layers")
    if not said:
        return ""
    return (
        f"{'; '.join(said)}. {_why_unfit({name: layers[name].order for name in odd}, options, allowed)}, or fill layers"
        " up with zero states by pad_orders_(model, order), which changes no output"
    )


def _why_unfit(orders: Mapping[str, int], options: Options, allowed: AllowedOrders) -> str:
    """The reason that kept layers of these orders from an allowed one, and the cure."""
    held: dict[str, object] = {}
    for name, n in orders.items():
        own = options.overrides and restricted(options.overrides, [name])
        held |= obstacles({name: n}, options.keep, own, options.gate, allowed, options.at_least)
    if held.keys() <= {"keep", "round_to"} and held.keys() != {"round_to"}:
        return "The policy kept more than the next allowed order: choose a smaller one by keep, such as TargetOrder(n)"
    values = [name if name in ("keep", "round_to") else f"{name}={value}" for name, value in held.items()]
    return f"No allowed order is left by {' and '.join(values)}: choose otherwise there"


def priced(model: nn.Module, layers: Mapping[str, Layer], options: Options) -> Options:
    """The options with the prices of this model in every `Budget` that counts more than states."""

    def with_prices(policy: Policy) -> Policy:
        if not isinstance(policy, Budget) or policy.unit not in PRICES:
            return policy
        return policy.priced(partial(PRICES[policy.unit], policy, model, layers))

    overrides = {pattern: with_prices(policy) for pattern, policy in (options.overrides or {}).items()}
    return replace(options, keep=with_prices(options.keep), overrides=overrides or None)


def _chosen(
    choose: Callable[..., dict[str, Any]],
    values: Mapping[str, Tensor],
    names: Sequence[str],
    options: Options,
    **more: Any,
) -> dict[str, Any]:
    """The orders that the policies choose for these layers."""
    return choose(
        {name: values[name] for name in names},
        options.keep,
        overrides=restricted(options.overrides, names),
        gate=options.gate,
        round_to=options.round_to,
        at_least=options.at_least,
        **more,
    )


def _fewer(orders: Mapping[str, int], values: Mapping[str, Tensor], options: Options) -> dict[str, int]:
    """The orders of layers that get fewer states."""
    wanted = {name: rank for name, rank in orders.items() if rank < values[name].shape[-1]}
    if isinstance(options.select, Largest):
        # Each layer has its own rank: in a group, modes without effect would fill up the layers of lower rank.
        wanted = {name: min(rank, int(numerical_rank(values[name]).amax())) for name, rank in wanted.items()}
    return wanted


def changes_of(cuts: Sequence[PlannedCut]) -> dict[str, Change]:
    """The changes of all cuts by layer name, in their order; those of one class are computed together."""
    classes: dict[type[PlannedCut], list[PlannedCut]] = {}
    for cut in cuts:
        classes.setdefault(type(cut), []).append(cut)
    found = {
        cut.layer.name: change
        for kind, own in classes.items()
        for cut, change in zip(own, kind.changes(own), strict=True)
    }
    return {cut.layer.name: found[cut.layer.name] for cut in cuts}


# Devices that load libraries and kernels on first use: on an H200 the first cut took 1 s, the next 0.35 s.
_SLOW_TO_LOAD = ("cuda",)


def rehearse(layers: Mapping[str, Layer], options: Options, moments: Moments | None = None) -> None:
    """Plan a cut of every layer to half on a GPU and discard it, so that the first real cut finds everything loaded.

    White noise takes the place of data, and made-up moments that of the optimizer's if `moments` is given. A rehearsal
    that fails says nothing about the real cut.
    """
    if not any(p.device.type in _SLOW_TO_LOAD for layer in layers.values() for p in layer.module.parameters()):
        return
    blind = replace(options, keep=KeepFraction(0.5), overrides=None, gate=1.0, round_to=1, at_least=1, uniform=False)
    unseen = replace(blind, calibrate=None, gramian=None)
    with suppress(CompressionError, ControlError), torch.no_grad():
        seen = {name: layer.observing_noise(options.choices) for name, layer in layers.items() if options.calibrate}
        known = {name: layer for name, layer in seen.items() if layer is not None}
        rest = {name: layer.imagined() for name, layer in layers.items() if name not in known}
        planned = [cut for part, how in ((known, blind), (rest, unseen)) if part for cut in _rehearsed(part, how)]
        if planned and moments is not None:
            rehearse_moments(list(changes_of(planned).values()), moments)


def _rehearsed(layers: Mapping[str, Layer], options: Options) -> list[PlannedCut]:
    with stage("spectra"):
        values = spectra(layers, options, cutting=True)
    choice = Choice(layers, values, options, salt=0)
    return choice.cuts(choice.orders()).cuts
