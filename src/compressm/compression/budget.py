"""Tails of spectra, and budgets of states, bytes, parameters or milliseconds that are distributed by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TypeAlias, final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from compressm.adapters.base import require_call
from compressm.control import ControlError, error_bounds, validation
from compressm.errors import AdapterError, CompressionError, warn_caller
from compressm.families.choices import require_count, require_number

Spectra = Mapping[str, Tensor]


def checked_spectra(spectra: Spectra) -> dict[str, Tensor]:
    """The spectra in float64 on the CPU; each must have a value, be finite, >= 0 and fall on the last axis."""
    if not isinstance(spectra, Mapping) or not spectra:
        raise CompressionError(
            f"spectra are {spectra!r:.100}, expected {{module name: tensor (*channels, n)}}, not empty"
        )
    return {name: _checked(name, sigma) for name, sigma in spectra.items()}


def _checked(name: object, sigma: Tensor) -> Tensor:
    if not isinstance(name, str):
        raise CompressionError(f"a spectrum is named {name!r}, expected the name of a module")
    try:
        validation.require_one_precision(sigma=validation.require_tensor("sigma", sigma, "n"))
        validation.require_real("sigma", sigma)
        validation.require_finite("sigma", sigma)
        values = sigma.detach().to("cpu", torch.float64)
        total = summed_tails(values)[0].item()
    except ControlError as error:
        raise CompressionError(f"the spectrum of {name!r}: {error}") from error
    if not math.isfinite(2 * total):
        largest = values.amax().item()
        raise CompressionError(f"the spectrum of {name!r}: values up to {largest:.3g}, whose sum is not finite")
    return values


def summed_tails(sigma: Float[Tensor, "*channels n"]) -> Float[Tensor, "n+1"]:
    """tails[r] = Σ_channels Σ_{i>r} σᵢ, the energy that all channels together lose if each keeps r states."""
    return error_bounds(sigma).reshape(-1, sigma.shape[-1] + 1).sum(0) / 2


def largest_bounds(sigma: Float[Tensor, "*channels n"]) -> Float[Tensor, "n+1"]:
    """bounds[r] = max_channels 2 Σ_{i>r} σᵢ."""
    return error_bounds(sigma).reshape(-1, sigma.shape[-1] + 1).amax(0)


def pooled(spectra: Spectra) -> Float[Tensor, "channels n"]:
    """All channels of all layers as one bank; shorter spectra end in zeros."""
    n = max(sigma.shape[-1] for sigma in spectra.values())
    rows = (sigma.reshape(-1, sigma.shape[-1]) for sigma in spectra.values())
    return torch.cat([torch.nn.functional.pad(row, (0, n - row.shape[-1])) for row in rows])


# Multiplies a budget: rounding of summed milliseconds must not exceed it.
_SLACK = 1 + 1e-12


@final
@dataclass(frozen=True)
class Prices:
    """The cost of every layer by its order, and that of everything else, in the unit of a budget."""

    of_layer: Mapping[str, Callable[[int], float]]
    rest: float = 0.0

    def total(self, orders: Mapping[str, int]) -> float:
        """The cost of the model if its layers have these orders."""
        return self.rest + sum(self.of_layer[name](order) for name, order in orders.items())


# Gives the prices of the layers with these names.
Pricing: TypeAlias = Callable[[Sequence[str]], Prices]


@final
@dataclass(frozen=True, repr=False)
class Budget:
    """A budget for all layers together, distributed so that the sum of their tails 2 Σ_{i>r} σᵢ is smallest.

    It is one of: `total_states`; `state_bytes` of a stream, for one sequence; `parameters` of the whole model;
    `milliseconds` of a step, with `measure`, the measured time of a step by the order of all layers: {16: 1.1, 32: 1.3}
    or a function of the order. Layers are taken to share the time equally, and an order between two measured ones to
    take the time of the larger. All but `total_states` count the whole model: a layer that the model holds in two
    places twice, except for its parameters, layers with other policies at the orders that these choose, and layers that
    are not cut as they are.

    With exact Gramians the tails are error bounds; with measured ones they weigh the states by their effect on the
    data. Only orders that gate, `round_to` and `at_least` allow are chosen, so the budget holds with them too; if it
    cannot, the smallest of these orders are taken, and a warning has the numbers. All of `total_states` are
    distributed, but a layer of smaller numerical rank does not use all of its part. A layer whose σ are all zero is not
    changed and may exceed the budget. A bank counts its shared order once, with the tail of its worst channel. Of
    equally good allocations of `total_states`, the one with most states in the first layers is taken.
    """

    total_states: int | None = None
    _: KW_ONLY
    state_bytes: int | None = None
    parameters: int | None = None
    milliseconds: float | None = None
    measure: Mapping[int, float] | Callable[[int], float] | None = field(default=None, hash=False)
    _pricing: Pricing | None = field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        given = [name for name in _UNITS if getattr(self, name) is not None]
        if len(given) != 1:
            raise CompressionError(
                f"Budget: {' and '.join(given) or 'nothing'} given, expected one of {', '.join(_UNITS)}"
            )
        (unit,) = given
        if unit == "milliseconds":
            object.__setattr__(self, unit, require_number(f"Budget: {unit}", self.milliseconds, 0, above=True))
        else:
            object.__setattr__(self, unit, require_count(f"Budget: {unit}", getattr(self, unit)))
        if (self.measure is not None) != (unit == "milliseconds"):
            raise CompressionError(
                f"Budget: {unit} {'without' if self.measure is None else 'with'} measure; milliseconds, and they alone,"
                " need measure={order: milliseconds of a step}, as deploy.step_times gives it"
            )
        if self.measure is not None:
            object.__setattr__(self, "measure", _checked_times(self.measure))

    def __repr__(self) -> str:
        given = {name: value for name in _UNITS if (value := getattr(self, name)) is not None}
        if self.measure is not None:
            given["measure"] = getattr(self.measure, "__qualname__", self.measure)
        return f"Budget({', '.join(f'{name}={value}' for name, value in given.items())})"

    @property
    def unit(self) -> str:
        """The unit that is counted: total_states, state_bytes, parameters or milliseconds."""
        return next(name for name in _UNITS if getattr(self, name) is not None)

    @property
    def limit(self) -> float:
        """The number of these units that may be used."""
        return float(getattr(self, self.unit))

    def priced(self, pricing: Pricing) -> Budget:
        """The same budget with the prices of a model's layers; bytes and parameters need them."""
        found = replace(self)
        object.__setattr__(found, "_pricing", pricing)
        return found

    def __call__(self, spectra: Spectra) -> dict[str, int]:
        """The order of every layer, at least 1; a budget above what the model costs now keeps all states."""
        spectra = checked_spectra(spectra)
        return self.allocated(spectra, {name: range(1, sigma.shape[-1] + 1) for name, sigma in spectra.items()})

    def allocated(
        self, spectra: Spectra, allowed: Mapping[str, Sequence[int]], others: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """The best of the allowed orders of every layer within the budget; `others` are orders of other layers."""
        losses = {name: largest_bounds(sigma)[1:] for name, sigma in spectra.items()}
        if self.total_states is not None:
            if self.total_states < len(spectra):
                raise CompressionError(
                    f"Budget: total_states is {self.total_states} for {len(spectra)} layers, expected at least one for"
                    " each"
                )
            if all(list(allowed[name]) == list(range(1, len(loss) + 1)) for name, loss in losses.items()):
                total = min(self.total_states, sum(map(len, losses.values())))
                return dict(zip(spectra, share_states(list(losses.values()), total), strict=True))
        prices = self._prices_of(spectra, others or {})
        offers = [
            Offer.of(own, [prices.of_layer[name](r) for r in own], [float(losses[name][r - 1]) for r in own])
            for name, own in allowed.items()
        ]
        orders = cheapest(offers, self.limit * _SLACK - prices.rest)
        if orders is None:
            orders = [int(offer.orders[0]) for offer in offers]
            self._say_too_small(prices, dict(zip(allowed, orders, strict=True)))
        return dict(zip(allowed, orders, strict=True))

    def common_order(self, orders: Mapping[str, int], allowed: Sequence[int]) -> int:
        """The largest allowed order that all layers can have within the budget; the largest present one if all fit."""
        prices, limit = self._prices_of(orders, {}), self.limit * _SLACK
        if prices.total(orders) <= limit:
            return max(orders.values())
        fitting = [order for order in allowed if prices.total(dict.fromkeys(orders, order)) <= limit]
        if not fitting:
            least = min(allowed, default=max(orders.values()))
            self._say_too_small(prices, dict.fromkeys(orders, least) if allowed else orders)
            return least
        return max(fitting)

    def _prices_of(self, names: Iterable[str], others: Mapping[str, int]) -> Prices:
        """The prices of these layers; the others, at these orders, belong to the rest."""
        if self.total_states is not None:
            return Prices(dict.fromkeys(names, float))
        layers = [*names, *others]
        if self._pricing is not None:
            prices = self._pricing(layers)
        elif self.measure is not None:
            prices = Prices(dict.fromkeys(layers, partial(share_of_time, self.measure, len(layers))))
        else:
            raise CompressionError(f"{self} needs the model: pass it as keep to compress_ or Compressor")
        return replace(prices, rest=prices.total(others))

    def _say_too_small(self, prices: Prices, orders: Mapping[str, int]) -> None:
        """Refuse a budget that no orders meet, and warn of one that other options keep from being met."""
        one_each = prices.total(dict.fromkeys(orders, 1))
        if one_each > self.limit * _SLACK:
            rest = f", of which {prices.rest:.12g} are in the rest of the model" if prices.rest else ""
            raise CompressionError(
                f"Budget: {self.unit} is {getattr(self, self.unit)}, but one state in every layer that it cuts takes"
                f" {one_each:.12g}{rest}; expected at least that"
            )
        said = ", ".join(f"{name or 'the model'} {order}" for name, order in orders.items())
        warn_caller(
            f"{self} cannot be met: the smallest orders that gate, round_to and at_least allow ({said:.300}) take"
            f" {prices.total(orders):.12g}"
        )


_UNITS = ("total_states", "state_bytes", "parameters", "milliseconds")


def _checked_times(measure: object) -> dict[int, float] | Callable[[int], float]:
    if callable(measure) and not isinstance(measure, Mapping):
        try:
            require_call("measure", measure, "order")
        except AdapterError as error:
            raise CompressionError(f"Budget: {error}") from None
        return measure
    if not isinstance(measure, Mapping) or not measure:
        raise CompressionError(f"Budget: measure is {measure!r:.100}, expected {{order: milliseconds}} or a function")
    return {
        require_count("Budget: an order of measure", order): require_number(
            f"Budget: the milliseconds of order {order!r}", time, 0, above=True
        )
        for order, time in sorted(measure.items())
    }


def share_of_time(measure: Mapping[int, float] | Callable[[int], float], layers: int, order: int) -> float:
    """The milliseconds that one of the layers takes."""
    if not isinstance(measure, Mapping):
        return require_number(f"Budget: measure({order})", measure(order), 0, above=True) / layers
    known = next((found for found in measure if found >= order), None)
    if known is None:
        raise CompressionError(
            f"Budget: measure has times of orders up to {max(measure)}, expected one of at least {order}, the order of"
            " a layer"
        )
    return measure[known] / layers


Numbers: TypeAlias = NDArray[np.float64]
Places: TypeAlias = NDArray[np.int64]


def share_states(losses: Sequence[Float[Tensor, " _"]], total: int) -> list[int]:
    """Orders r with Σ r = total and the smallest Σ losses[layer][r − 1].

    The losses of one channel are convex in r because σ falls, and so is their maximum over the channels of a bank. For
    convex losses, the state with the largest gain is always the next to keep (Fox 1966).
    """
    # Losses are convex up to rounding; the running minimum makes them convex, so states are taken in order.
    gains = [(loss[:-1] - loss[1:]).cummin(0).values for loss in losses]
    layers = torch.cat([torch.full_like(gain, layer, dtype=torch.int64) for layer, gain in enumerate(gains)])
    best_first = torch.cat(gains).argsort(descending=True, stable=True)
    taken = layers[best_first[: total - len(losses)]]
    return [1 + count for count in torch.bincount(taken, minlength=len(losses)).tolist()]


@final
@dataclass(frozen=True)
class Offer:
    """Costs and losses of one layer at each of the orders that it may have; costs rise, losses fall."""

    orders: Places
    costs: Numbers
    losses: Numbers

    @classmethod
    def of(cls, orders: Sequence[int], costs: Sequence[float], losses: Sequence[float]) -> Offer:
        """The orders for which no other one costs and loses less."""
        places, prices, lost = np.asarray(orders, np.int64), np.asarray(costs, float), np.asarray(losses, float)
        kept = _undominated(prices, lost)
        return cls(places[kept], prices[kept], lost[kept])


def cheapest(offers: Sequence[Offer], budget: float) -> list[int] | None:
    """The order of every layer with Σ costs ≤ budget and the smallest Σ losses; None if there is none.

    It is exact for any costs. Layers are added one by one; of the sums so far those stay that no other one beats in
    both cost and loss, and that can still lead to less than the best allocation known. That is told by a bound: the
    best that the other layers could do if states were divisible, from the convex hulls of their offers.
    """
    places = sorted(range(len(offers)), key=lambda k: -len(offers[k].costs))
    found = _cheapest([offers[k] for k in places], budget)
    if found is None:
        return None
    orders = [0] * len(offers)
    for k, chosen in zip(places, found, strict=True):
        orders[k] = int(offers[k].orders[chosen])
    return orders


def _cheapest(offers: Sequence[Offer], budget: float) -> list[int] | None:
    """The place of the chosen order in each offer."""
    hulls = [_hull(offer) for offer in offers]
    if sum(offer.costs[0] for offer in offers) > budget:
        return None
    best, known = _greedy(offers, hulls, budget)
    costs, losses = np.zeros(1), np.zeros(1)
    steps: list[tuple[Places, Places]] = []
    for k, offer in enumerate(offers):
        bound = _Bound.of(offers[k + 1 :], hulls[k + 1 :])
        parts = [
            _better(costs + c, losses + x, budget, known, bound) for c, x in zip(offer.costs, offer.losses, strict=True)
        ]
        origins = np.concatenate(parts)
        chosen = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        if not len(origins):
            return best  # nothing beats it
        costs, losses = costs[origins] + offer.costs[chosen], losses[origins] + offer.losses[chosen]
        kept = _undominated(costs, losses)
        costs, losses = costs[kept], losses[kept]
        steps.append((origins[kept], chosen[kept]))
    place, found = int(losses.argmin()), []
    for origins, chosen in reversed(steps):
        found.append(int(chosen[place]))
        place = int(origins[place])
    return found[::-1]


def _better(costs: Numbers, losses: Numbers, budget: float, known: float, bound: _Bound) -> Places:
    """The places of sums that may lead to an allocation within the budget that loses less than is known."""
    return np.flatnonzero(losses + bound.least(budget - costs) < known)


@final
@dataclass(frozen=True)
class _Bound:
    """The least that layers can lose if states were divisible, by what they may cost."""

    cost: float
    loss: float
    costs: Numbers
    gains: Numbers

    @classmethod
    def of(cls, offers: Sequence[Offer], hulls: Sequence[Places]) -> _Bound:
        """The bound of these layers together: steep parts of all hulls come first."""
        rises = [np.diff(offer.costs[hull]) for offer, hull in zip(offers, hulls, strict=True)]
        falls = [-np.diff(offer.losses[hull]) for offer, hull in zip(offers, hulls, strict=True)]
        rise, fall = (np.concatenate([np.zeros(0), *parts]) for parts in (rises, falls))
        first = np.argsort(-fall / rise, kind="stable")
        costs, gains = (np.concatenate([[0.0], np.cumsum(part[first])]) for part in (rise, fall))
        cost, loss = sum(offer.costs[0] for offer in offers), sum(offer.losses[0] for offer in offers)
        return cls(float(cost), float(loss), costs, gains)

    def least(self, spent: Numbers) -> Numbers:
        """The least loss for each of these amounts; infinite where it does not suffice."""
        found = self.loss - np.interp(spent - self.cost, self.costs, self.gains)
        return np.where(spent < self.cost, np.inf, found)


def _hull(offer: Offer) -> Places:
    """The places on the lower convex hull of an offer."""
    kept: list[int] = []
    for k in range(len(offer.costs)):
        while len(kept) > 1 and _is_above(offer, kept[-2], kept[-1], k):
            kept.pop()
        kept.append(k)
    return np.asarray(kept)


def _is_above(offer: Offer, a: int, b: int, c: int) -> bool:
    """True if b is on or above the line from a to c."""
    (ca, cb, cc), (xa, xb, xc) = offer.costs[[a, b, c]], offer.losses[[a, b, c]]
    return bool((xb - xa) * (cc - ca) >= (xc - xa) * (cb - ca))


def _greedy(offers: Sequence[Offer], hulls: Sequence[Places], budget: float) -> tuple[list[int], float]:
    """A good allocation, and its loss: steps along the hulls, the steepest first, as long as they fit."""
    at = [0] * len(offers)
    spent = sum(float(offer.costs[0]) for offer in offers)
    steps = [
        ((offer.losses[b] - offer.losses[a]) / (offer.costs[b] - offer.costs[a]), k, int(a), int(b))
        for k, (offer, hull) in enumerate(zip(offers, hulls, strict=True))
        for a, b in pairwise(hull)
    ]
    for _, k, a, b in sorted(steps):
        more = float(offers[k].costs[b] - offers[k].costs[a])
        if at[k] == a and spent + more <= budget:
            at[k], spent = b, spent + more
    return at, float(sum(offer.losses[place] for offer, place in zip(offers, at, strict=True)))


def _undominated(costs: Numbers, losses: Numbers) -> Places:
    """The places, by rising cost, of what nothing else beats in both cost and loss."""
    order = np.lexsort((losses, costs))
    fallen = losses[order]
    best = np.concatenate([[np.inf], np.minimum.accumulate(fallen)[:-1]])
    return order[fallen < best]
