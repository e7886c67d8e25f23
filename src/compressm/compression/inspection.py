"""Spectra of a model without a cut: a table of orders and error bounds, and a record during training."""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, SupportsIndex, final

import torch
from torch import Tensor, nn

from compressm.compression.budget import Budget, Spectra, checked_spectra, largest_bounds
from compressm.compression.cutting import Cutter
from compressm.compression.distributed import unwrapped
from compressm.compression.optimizer import Transport
from compressm.compression.planning import Options, found_layers, read_layers, spectra, unused_options
from compressm.compression.policies import EnergyTolerance, KeepFraction
from compressm.compression.pricing import PRICES
from compressm.compression.record import require_entries
from compressm.compression.trying import GivenOrders, Loss, LossTolerance, Orders, Trials, TryingPolicy
from compressm.control import ControlError, DiagonalSystem, Trajectories, hankel_change, trajectories
from compressm.control.validation import is_finite, is_number
from compressm.errors import AdapterError, CompressionError
from compressm.families import Layer, family_of
from compressm.families.base import ComparedForm
from compressm.families.choices import Gramian, require_count
from compressm.families.memory.forms import Form
from compressm.families.observing import Calibrate
from compressm.families.selective.methods import Baked, SelectiveMethod

# The range of the paper's tables, from its strongest cut of CIFAR10 to its weakest of sMNIST.
TAUS = (0.15, 0.05, 0.01, 0.001)


INCREASES = (0.005, 0.01, 0.03, 0.1)
# The increase that the recommendation is for.
_RECOMMENDED = 0.01
# A layer that needs at most this share of its states is far larger than what the data use.
_FAR_ABOVE = 1 / 8
# The loss is flat if half of the recommended states raise it by at most so many times what is allowed.
_FLAT = 3

Measure = Mapping[int, float] | Callable[[int], float]


@final
@dataclass(frozen=True)
class Size:
    """The orders at which the loss rises by at most `increase`, a share, and what they cost.

    `loss` is that of a trial cut. `parameters`, their `bytes`, and `state_bytes`, those of the states of one sequence,
    count the whole model; None where a layer cannot say. `milliseconds` are those of `measure`.
    """

    increase: float
    orders: dict[str, int]
    loss: float
    parameters: int | None = None
    bytes: int | None = None
    state_bytes: int | None = None
    milliseconds: float | None = None


@final
@dataclass(frozen=True)
class Sizes:
    """The sizes that a model could have, by how much its loss may rise, from its present one to the smallest.

    `halved` is the loss after a cut to half of the recommended orders, and `trials` the number of trial cuts.
    """

    sizes: tuple[Size, ...]
    halved: float
    trials: int

    @property
    def now(self) -> Size:
        """The model as it is."""
        return self.sizes[0]

    @property
    def recommended(self) -> Size:
        """The size at an increase of 1 %, or the next larger one that was asked for."""
        return next((size for size in self.sizes[1:] if size.increase >= _RECOMMENDED), self.sizes[-1])

    @property
    def is_small_enough_from_the_start(self) -> bool:
        """True if a model that begins small is likely as good as one that is cut.

        The rule: at the recommended size every layer keeps at most an eighth of its states, and half of these raise the
        loss by at most three times as much as is allowed. Then the data use far fewer states than there are, and the
        loss hardly depends on how many.
        """
        size, now = self.recommended, self.now
        is_far_above = all(order <= _FAR_ABOVE * now.orders[name] for name, order in size.orders.items())
        return is_far_above and self.halved <= now.loss * (1 + _FLAT * size.increase)

    @property
    def advice(self) -> str:
        """The recommendation, in words."""
        size, now = self.recommended, self.now
        states = f"{sum(size.orders.values())} of {sum(now.orders.values())} states"
        rise = _percent(size.loss, now.loss)
        if size.orders == now.orders:
            return (
                f"Keep all {sum(now.orders.values())} states: every cut that was tried raises the loss by more than"
                f" {100 * size.increase:g} %."
            )
        layers = f" ({_orders(size.orders)})" if len(size.orders) > 1 else ""
        said = f"Cut to {states}{layers}: the loss changes by {rise}."
        if self.is_small_enough_from_the_start:
            return (
                f"{said} A model of that size from the start is likely as good: no layer uses more than an eighth of"
                f" its states, and half of these again change the loss by only {_percent(self.halved, now.loss)}."
            )
        return f"{said} Half of these again would change it by {_percent(self.halved, now.loss)}."

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text and None only."""
        sizes = [asdict(size) for size in self.sizes]
        return {"sizes": sizes, "halved": self.halved, "trials": self.trials, "advice": self.advice}

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """The heads and the rows of the table."""
        columns: list[tuple[str, Callable[[Size], str]]] = [
            ("loss may rise by", lambda size: "as it is" if size is self.now else f"{100 * size.increase:g} %"),
            ("states", lambda size: _orders(size.orders)),
            ("loss", lambda size: f"{size.loss:.4g}" + ("" if size is self.now else f" ({self._rise(size)})")),
            ("parameters", lambda size: _number(size.parameters)),
            ("bytes", lambda size: _number(size.bytes)),
            ("bytes of states", lambda size: _number(size.state_bytes)),
            ("ms", lambda size: "" if size.milliseconds is None else f"{size.milliseconds:.3g}"),
        ]
        kept = [(head, cell) for head, cell in columns if any(cell(size) for size in self.sizes)]
        return [head for head, _ in kept], [[cell(size) for _, cell in kept] for size in self.sizes]

    def _rise(self, size: Size) -> str:
        return _percent(size.loss, self.now.loss)


def _percent(value: float, before: float) -> str:
    if before <= 0:
        return f"{value - before:+.2g}"
    change = 100 * (value / before - 1)
    return f"{change:+.2g} %" if abs(change) < 99.5 else f"{change:+.0f} %"


def _orders(orders: Mapping[str, int]) -> str:
    return ", ".join(map(str, orders.values()))


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


@dataclass(eq=False)
class _Survey(TryingPolicy):
    """A policy that tries cuts for several increases, keeps what it finds, and cuts nothing."""

    loss: Loss
    increases: Sequence[float]
    found: list[tuple[float, Orders, float]] = field(default_factory=list)
    halved: float = 0.0
    trials: int = 0

    def choose(self, spectra: Mapping[str, Tensor], trials: Trials) -> GivenOrders:
        """All states, after the trials."""
        self.found = [(0.0, dict(trials.orders), trials.present)]
        for increase in sorted(self.increases):
            orders = trials.limited(LossTolerance(increase, self.loss).choose(spectra, trials))
            # What a smaller increase allows, a larger one does.
            if trials.states(orders) > trials.states(self.found[-1][1]):
                orders = self.found[-1][1]
            self.found.append((increase, orders, trials(orders)))
        chosen = next((orders for share, orders, _ in self.found[1:] if share >= _RECOMMENDED), self.found[-1][1])
        self.halved = trials({name: _half(order) for name, order in chosen.items()})
        self.trials = trials.count
        return {name: trials.orders[name] for name in spectra}


def _half(order: int | Sequence[int]) -> int | Sequence[int]:
    return max(1, order // 2) if isinstance(order, int) else tuple(max(1, one // 2) for one in order)


def sizes_of(
    model: nn.Module, options: Options, loss: Loss, increases: Sequence[float], measure: Measure | None
) -> Sizes:
    """The sizes that this model could have; nothing is changed. All processes of torch.distributed must call it."""
    wanted = [LossTolerance(increase, loss).increase for increase in increases]
    if not wanted:
        raise CompressionError("increases are empty, expected at least one share, such as 0.01")
    survey = _Survey(loss, wanted)
    cutter = Cutter(model, None, replace(options, keep=survey, gate=1.0), Transport(), ())
    cutter.require_copies()
    cutter.plan(salt=0)
    found, halved, trials = cutter.processes.as_first((survey.found, survey.halved, survey.trials))
    price = _Prices(cutter.inner, found_layers(cutter.inner, options), measure)
    return Sizes(tuple(price.priced(*one) for one in found), halved, trials)


@final
@dataclass(frozen=True)
class _Prices:
    """The costs of orders of a model's layers."""

    model: nn.Module
    layers: Mapping[str, Layer]
    measure: Measure | None

    def priced(self, increase: float, orders: Orders, loss: float) -> Size:
        """The size with its costs; a layer whose channels have orders of their own counts with the largest."""
        whole = {name: order if isinstance(order, int) else max(order) for name, order in orders.items()}
        parameters = self._total("parameters", Budget(parameters=1), whole)
        return Size(
            increase,
            whole,
            loss,
            parameters,
            None if parameters is None else self._bytes(whole),
            self._total("state_bytes", Budget(state_bytes=1), whole),
            None if self.measure is None else self._milliseconds(whole),
        )

    def _total(self, unit: str, budget: Budget, orders: Mapping[str, int]) -> int | None:
        try:
            return round(PRICES[unit](budget, self.model, self.layers, list(orders)).total(orders))
        except (AdapterError, CompressionError):
            return None

    def _milliseconds(self, orders: Mapping[str, int]) -> float:
        budget = Budget(milliseconds=1.0, measure=self.measure)
        return PRICES["milliseconds"](budget, self.model, self.layers, list(orders)).total(orders)

    def _bytes(self, orders: Mapping[str, int]) -> int:
        total = sum(parameter.nbytes for parameter in self.model.parameters())
        for name, order in orders.items():
            layer = self.layers[name]
            grown = layer.adapter.growth(layer.module)
            sizes = [(layer.module.get_parameter(entry), own) for entry, own in grown.items()]
            each = sum(own.blocks * p.nbytes // p.shape[own.axis] for p, own in sizes)
            total -= each * (layer.order - order)
        return total


@final
@dataclass(frozen=True, repr=False, eq=False)
class Inspection:
    """Spectra and present orders by module, and recommended orders with their bounds by tolerance τ and module.

    A recommended order keeps 1 − τ of the Hankel energy (`EnergyTolerance`). Its bound is the H∞ bound 2 Σ of the
    dropped σ, the largest over the channels of a bank, or None if the layer has no bound. `sizes` says what the model
    needs if its loss may rise, if `inspect` was given a loss.
    """

    spectra: dict[str, Tensor]
    orders: dict[str, int]
    recommended: dict[float, dict[str, int]]
    bounds: dict[float, dict[str, float | None]]
    sizes: Sizes | None = None

    @classmethod
    def of(cls, spectra: Spectra, *, taus: Sequence[float] = TAUS, without_bound: Collection[str] = ()) -> Inspection:
        """The inspection of Hankel singular values; `without_bound` names modules whose Gramians are not exact."""
        spectra = checked_spectra(spectra)
        policies = [EnergyTolerance(tau) for tau in taus]
        if not policies:
            raise CompressionError("taus are empty, expected at least one tolerance from 0 to below 1")
        unknown = sorted(set(without_bound) - set(spectra))
        if unknown:
            raise CompressionError(f"without_bound names {', '.join(unknown)}; there are {', '.join(spectra)}")
        recommended = {policy.tau: policy(spectra) for policy in policies}
        curves = {name: largest_bounds(sigma) for name, sigma in spectra.items() if name not in without_bound}
        bounds = {
            tau: {name: float(curves[name][n]) if name in curves else None for name, n in orders.items()}
            for tau, orders in recommended.items()
        }
        return cls(spectra, {name: sigma.shape[-1] for name, sigma in spectra.items()}, recommended, bounds)

    @property
    def taus(self) -> tuple[float, ...]:
        return tuple(self.recommended)

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text and None only: {"taus": [...], "modules": {name: {...}}}, lists in the order of the taus."""
        modules = {
            name: {
                "order": self.orders[name],
                "sigma": sigma.tolist(),
                "recommended": [self.recommended[tau][name] for tau in self.taus],
                "bounds": [self.bounds[tau][name] for tau in self.taus],
            }
            for name, sigma in self.spectra.items()
        }
        sizes = {} if self.sizes is None else {"sizes": self.sizes.to_dict()}
        return {"taus": list(self.taus), "modules": modules, **sizes}

    def __repr__(self) -> str:
        lines = [*_table(self._heads(), self._rows()), "", self._caption()]
        if self.sizes is not None:
            lines += ["", *_table(*self.sizes.rows()), "", self.sizes.advice]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        tables = [_html_table(self._heads(), self._rows(), self._caption())]
        if self.sizes is not None:
            tables.append(_html_table(*self.sizes.rows(), self.sizes.advice))
        return "".join(tables)

    def _heads(self) -> list[str]:
        return ["module", "states", "largest σ", *(f"τ = {tau:g}" for tau in self.taus)]

    def _rows(self) -> list[list[str]]:
        rows = [
            [
                name or "the model",
                str(n),
                f"{float(self.spectra[name].max()):.3g}",
                *(_kept(self.recommended[tau][name], self.bounds[tau][name]) for tau in self.taus),
            ]
            for name, n in self.orders.items()
        ]
        if len(rows) > 1:
            totals = [str(sum(self.recommended[tau].values())) for tau in self.taus]
            rows.append(["together", str(sum(self.orders.values())), "", *totals])
        return rows

    def _caption(self) -> str:
        bounded = any(bound is not None for by_module in self.bounds.values() for bound in by_module.values())
        meaning = " (error <= bound on the layer's H∞ error)" if bounded else ""
        return f"States that keep 1 - τ of the Hankel energy{meaning}."


def _html_table(heads: list[str], rows: list[list[str]], said: str) -> str:
    head = "".join(f"<th>{html.escape(one)}</th>" for one in heads)
    cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><caption>{html.escape(said)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table; the first column is text."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (heads, *rows)]
    lines.insert(1, ["-" * width for width in widths])
    return ["  ".join(line).rstrip() for line in lines]


def _kept(order: int, bound: float | None) -> str:
    return str(order) if bound is None else f"{order} (error <= {bound:.2g})"


def inspect(
    model: nn.Module,
    calibrate: Calibrate | None = None,
    *,
    loss: Loss | None = None,
    increases: Sequence[float] = INCREASES,
    measure: Measure | None = None,
    gramian: Gramian | None = None,
    fold: bool = True,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    selective: SelectiveMethod = Baked(),
    form: Form | None = None,
) -> Inspection:
    """Spectra, recommended orders and bounds of every SSM layer; a table when printed.

    `calibrate` runs the model on some data; states are then valued on that data, and there is no a-priori bound.
    Selective layers need it and never have a bound. With `loss`, a function of a model as for `LossTolerance`, trial
    cuts say which orders the model needs if its loss may rise by each of `increases`, and `sizes.advice` recommends
    one; `measure` gives the time of a step by order, as for `Budget`. All processes must call it then.
    """
    if loss is None and measure is not None:
        raise CompressionError("measure without loss: pass loss=lambda model: ..., or leave measure out")
    options = Options(KeepFraction(1.0), calibrate, gramian, fold, filter_fn=filter_fn, selective=selective, form=form)
    if said := unused_options(unwrapped(model), options):
        warnings.warn(said, stacklevel=2)
    with torch.no_grad():
        layers = read_layers(model, options)
        found = {name: sigma.cpu() for name, sigma in spectra(layers, options).items()}
    bounded = {name for name, layer in layers.items() if family_of(layer.adapter).is_bounded(options.choices)}
    inspection = Inspection.of(found, without_bound=tuple(found.keys() - bounded))
    if loss is None:
        return inspection
    return replace(inspection, sizes=sizes_of(model, options, loss, increases, measure))


@final
@dataclass(frozen=True, repr=False, eq=False)
class FormComparison:
    """The forms in which cuts to one order could be stored, by module, each with its error; a table when printed."""

    order: int
    forms: dict[str, list[ComparedForm]]

    def __repr__(self) -> str:
        rows = [
            [name or "the model", str(one.form), f"{one.error:.3g}", *_said(one)]
            for name, forms in self.forms.items()
            for one in forms
        ]
        return "\n".join([*_table(["module", "form", "error", "estimate", "stored"], rows), "", self._caption()])

    def _caption(self) -> str:
        return (
            f"Cuts to {self.order} states: the error of the output on data that no fit has seen, its estimate from the"
            " spectrum, and if the layer can store the form."
        )


def _said(one: ComparedForm) -> tuple[str, str]:
    return "" if one.estimate is None else f"{one.estimate:.3g}", "yes" if one.storable else "no"


def compare_forms(
    model: nn.Module,
    order: SupportsIndex,
    calibrate: Calibrate,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> FormComparison:
    """The error of every form of a cut to `order`, for each layer that has a choice of forms; nothing is changed."""
    n = require_count("order", order)
    options = Options(KeepFraction(1.0), calibrate, filter_fn=filter_fn)
    with torch.no_grad():
        layers = {name: layer for name, layer in read_layers(model, options).items() if layer.order > n}
        found = {name: layer.compared_forms(n) for name, layer in layers.items()}
    found = {name: forms for name, forms in found.items() if forms}
    if not found:
        raise CompressionError(
            f"compare_forms: no layer of {type(model).__name__} has a choice of forms and more than {n} states"
        )
    return FormComparison(n, found)


_STATE = "the state of a HankelTracker"


class HankelTracker:
    """Record the spectra of all SSM layers at every `every`-th step, without cutting (the paper's sec:why).

    Call `step(step)` in the training loop. With `changes`, `bounds` holds max |eig δH| since the previous record for
    each layer, the largest of a bank: no σ has moved further (lem:hsv_cont). It is None in the first record, after a
    cut, and for selective layers.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        calibrate: Calibrate | None = None,
        gramian: Gramian | None = None,
        fold: bool = True,
        filter_fn: Callable[[nn.Module, str], bool] | None = None,
        changes: bool = False,
        selective: SelectiveMethod = Baked(),
    ) -> None:
        if not isinstance(changes, bool):
            raise CompressionError(f"changes is {changes!r:.100}, expected True or False")
        self.model, self.every = model, require_count("every", every)
        self.options = Options(KeepFraction(1.0), calibrate, gramian, fold, filter_fn=filter_fn, selective=selective)
        found_layers(unwrapped(model), self.options)  # refuses a model that could not be recorded
        if said := unused_options(unwrapped(model), self.options):
            warnings.warn(said, stacklevel=2)
        self.steps: list[int] = []
        self.spectra: list[dict[str, Tensor]] = []
        self.changes = changes
        self.bounds: list[dict[str, float | None]] = []
        self._before: dict[str, DiagonalSystem] = {}

    def step(self, step: SupportsIndex) -> dict[str, Tensor] | None:
        """Record the spectra if this is a step to record, and return them on the CPU."""
        now = require_count("step", step, low=0)
        if now % self.every or now in self.steps[-1:]:
            return None
        layers = read_layers(self.model, self.options)
        with torch.no_grad():
            found = {name: sigma.cpu() for name, sigma in spectra(layers, self.options).items()}
            bounds = self._compare(layers)
        self.steps.append(now)
        self.spectra.append(found)
        self.bounds.append(bounds)
        return found

    def _compare(self, layers: Mapping[str, Layer]) -> dict[str, float | None]:
        bounds: dict[str, float | None] = dict.fromkeys(layers)
        found = {name: layer.linear_system for name, layer in layers.items()}
        systems = {name: system for name, system in found.items() if system is not None}
        if self.changes:
            for name, system in systems.items():
                before = self._before.get(name)
                if before is not None and before.order == system.order:
                    bounds[name] = float(hankel_change(before, system).weyl_bound.max())
            self._before = systems
        return bounds

    def trajectories(self, name: str) -> Trajectories:
        """The singular values of one layer, followed through crossings; a bank gives those of its mean spectrum."""
        records = [record[name] for record in self.spectra if name in record]
        if not records:
            known = ", ".join(repr(layer) for layer in self.spectra[-1]) if self.spectra else "nothing yet"
            raise CompressionError(f"no record of {name!r}; recorded: {known}")
        return trajectories([sigma.reshape(-1, sigma.shape[-1]).mean(0) for sigma in records])

    def state_dict(self) -> dict[str, Any]:
        """Everything that was recorded."""
        return {
            "steps": list(self.steps),
            "spectra": [dict(record) for record in self.spectra],
            "bounds": [dict(record) for record in self.bounds],
            "before": {name: _parts(system) for name, system in self._before.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore everything that was recorded; a state that is refused changes nothing."""
        require_entries(_STATE, state, steps=list, spectra=list, bounds=list, before=Mapping)
        counts = [len(state[name]) for name in ("steps", "spectra", "bounds")]
        if len({*counts}) > 1:
            raise CompressionError(
                "{} has {} steps, {} spectra and {} bounds, expected as many of each".format(_STATE, *counts)
            )
        steps = [require_count(f"{_STATE}: a step", step, low=0) for step in state["steps"]]
        records = zip(steps, state["spectra"], state["bounds"], strict=True)
        read = [_read_record(f"{_STATE}: step {step}", spectrum, bounds) for step, spectrum, bounds in records]
        before = {name: _system(f"{_STATE}: before[{name!r:.80}]", parts) for name, parts in state["before"].items()}
        self.steps, self.spectra, self.bounds = steps, [one[0] for one in read], [one[1] for one in read]
        self._before = before


def _parts(system: DiagonalSystem) -> dict[str, Tensor]:
    poles = {"poles": system.poles} if system.log_poles is None else {"log_poles": system.log_poles}
    return {**poles, "B": system.B, "C": system.C}


def _system(what: str, parts: Any) -> DiagonalSystem:
    poles = "poles" if isinstance(parts, Mapping) and "poles" in parts else "log_poles"
    require_entries(what, parts, **{poles: Tensor}, B=Tensor, C=Tensor)
    make = DiagonalSystem if poles == "poles" else DiagonalSystem.from_log_poles
    try:
        return make(parts[poles], parts["B"], parts["C"])
    except ControlError as error:
        raise CompressionError(f"{what}: {error}") from error


def _read_record(what: str, spectrum: Any, bounds: Any) -> tuple[dict[str, Tensor], dict[str, float | None]]:
    """The singular values and the bounds of all layers at one step."""
    for said, record in (("spectra", spectrum), ("bounds", bounds)):
        if not isinstance(record, Mapping) or record.keys() != spectrum.keys():
            raise CompressionError(f"{what}: {said} are {record!r:.100}, expected {{layer: value}} for every layer")
    for name, sigma in spectrum.items():
        if not (isinstance(sigma, Tensor) and sigma.is_floating_point() and sigma.numel() and sigma.ndim):
            raise CompressionError(
                f"{what}: the spectrum of {name!r:.80} is {sigma!r:.100}, expected a real tensor (..., n)"
            )
        if not (is_finite(sigma) and bool((sigma >= 0).all())):
            raise CompressionError(f"{what}: the spectrum of {name!r:.80} has values that are negative or not finite")
    for name, bound in bounds.items():
        if bound is not None and not (is_number(bound) and 0 <= bound < math.inf):
            raise CompressionError(
                f"{what}: the bound of {name!r:.80} is {bound!r:.100}, expected a number from 0 on, or None"
            )
    return dict(spectrum), dict(bounds)
