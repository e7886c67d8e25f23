"""Policies that try cuts before one is made: they ask for orders and get the loss of the model after that cut.

`LossTolerance` keeps the fewest states that a loss allows: a threshold on tails, found by trial cuts, then states are
moved between layers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters.base import require_call
from compressm.compression.budget import Spectra, checked_spectra, summed_tails
from compressm.control import error_bounds
from compressm.errors import AdapterError, CompressionError
from compressm.families.choices import require_count, require_number

# The order of each layer; of one whose channels are cut separately, those of its channels.
Orders: TypeAlias = dict[str, int | tuple[int, ...]]
GivenOrders: TypeAlias = Mapping[str, int | Sequence[int]]
Loss: TypeAlias = Callable[[nn.Module], float]


@final
@dataclass(eq=False)
class Trials:
    """Trial cuts of one model. `trials(orders)` is the loss after a cut to these orders; nothing is changed.

    A trial is the very cut that would be written, with the same Gramians, form and limits, made on a copy of the model
    that shares every tensor but those of the cut layers. `limited(orders)` are the orders that such a cut leaves;
    orders that become the same are tried once. `orders` are the present ones, `by_channel` names layers whose channels
    have orders of their own, and `uniform` is True if all layers must have one. `made` holds the orders and losses of
    all trials so far, `best` is the lowest loss that the compressor has seen of the model as it was, this time
    included; `spent` is what cuts have added to the loss since then. A policy may say in `note` why it chose as it did.
    """

    orders: Orders
    limited: Callable[[GivenOrders], Orders]
    measure: Callable[[Orders | None], float] = field(repr=False)
    by_channel: frozenset[str] = frozenset()
    uniform: bool = False
    seen: float | None = None
    added: float = 0.0
    smallest_orders: Orders | None = None
    made: list[tuple[Orders, float]] = field(default_factory=list)
    note: str = ""
    _present: float | None = None
    _smallest: float | None = None

    @property
    def present(self) -> float:
        """The loss of the model as it is; it is measured when it is first asked for."""
        if self._present is None:
            value = self.measure(None)
            if not math.isfinite(value):
                raise CompressionError(f"loss returned {value} for the model as it is, expected a finite number")
            self._present = value
        return self._present

    @property
    def measured(self) -> float | None:
        """The loss of the model as it is, if anybody has asked for it."""
        return self._present

    @property
    def best(self) -> float:
        """The lowest loss of the model as it was at this cut or an earlier one."""
        return self.present if self.seen is None else min(self.seen, self.present)

    @property
    def spent(self) -> float:
        """The loss that all cuts since the best one have added, measured when they were made; 0 if this is the best."""
        return 0.0 if self.best == self.present else self.added

    @property
    def smallest(self) -> float | None:
        """The loss after the smallest cut that the options allow at all, if the schedule asks for caution, else None.

        A loss that hardly rises even then does not depend on the states yet, and says nothing about cuts.
        """
        if self._smallest is None and self.smallest_orders is not None:
            self._smallest = self.measure(self.smallest_orders)
        return self._smallest

    @property
    def count(self) -> int:
        """The number of trial cuts so far."""
        return len(self.made) + (self._smallest is not None)

    def known(self, orders: GivenOrders) -> float | None:
        """The loss after a cut to these orders if it needs no trial, else None."""
        limited = self.limited(orders)
        if limited == self.orders:
            return self.present
        return next((loss for other, loss in self.made if other == limited), None)

    def __call__(self, orders: GivenOrders) -> float:
        """The loss after a cut to these orders; infinite if the cut model's loss is, never NaN."""
        known = self.known(orders)
        if known is not None:
            return known
        limited = self.limited(orders)
        loss = self.measure(limited)
        self.made.append((limited, loss))
        return loss

    def states(self, orders: GivenOrders) -> float:
        """The states of all layers together; a layer with orders by channel counts with their mean."""
        return math.fsum(
            order if isinstance(order, int) else math.fsum(order) / len(order) for order in orders.values()
        )


class TryingPolicy(ABC):
    """A policy that may try cuts before it chooses, as `LossTolerance` does.

    `loss` is called with a copy of the model in evaluation mode and without gradients. It returns a number that is
    lower for a better model, and may only run the copy. Random numbers are the same in every trial. Under
    torch.distributed all processes run it on data of their own, the mean counts, and the first process chooses.
    """

    loss: Loss

    @abstractmethod
    def choose(self, spectra: Mapping[str, Tensor], trials: Trials) -> GivenOrders:
        """The order of every layer that this policy cuts; spectra fall, a bank's are (channels, n)."""

    def plan(self, layers: int) -> str:
        """The trials of a cut of so many layers, in words."""
        return f"{self!r} tries cuts before it chooses"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


# Trials for the common threshold: 2⁸ − 1 different cuts are told apart exactly.
_THRESHOLD = 8
_EACH = 2  # trials a layer that move states
# At most so many thresholds are looked at; with orders by channel each takes longer.
_THRESHOLDS, _BY_CHANNEL = 1024, 64
# If a schedule asks for caution, the smallest cut must cost at least so many times what may be lost.
_CAUTION = 3
# The share of a layer's states that the second pass takes or gives at a time.
_SHARE = 8


@final
@dataclass(frozen=True, repr=False)
class LossTolerance(TryingPolicy):
    """The fewest states at which `loss(model)` rises by at most `increase`.

    `increase` is a share of the best loss that the compressor has seen, or, if not `relative`, a number. It is what all
    cuts since that loss was reached may add together, so ten cuts of 1 % do not become 10 %; once the model is better
    than ever, cuts may add as much again.

    Cuts are tried before one is made. Every layer drops the states whose tail Σ_{i>r} σᵢ is below one common share of
    Σσ; the largest share is found by bisection in at most eight trials. It is exact if the loss rises as states go and
    there are at most 255 different cuts. Then, if there are several layers, each may lose more states, and those that
    miss them most may get some from those that miss them least, in at most two trials a layer. `trials` caps both; the
    model as it is takes one more call of `loss`. No order is chosen whose trial was above the limit.

    A schedule may ask for caution, as `Automatic` does until its first cut: then one of the trials is the smallest cut
    that the options allow, and nothing is cut unless that raises the loss three times as much as is allowed. Before a
    model has learnt to use its states no cut does harm.
    """

    increase: float
    loss: Loss
    relative: bool = True
    trials: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "increase", require_number("LossTolerance: increase", self.increase, 0))
        try:
            require_call("loss", self.loss, "model")
        except AdapterError as error:
            raise CompressionError(f"LossTolerance: {error}") from None
        if isinstance(self.loss, type):
            raise CompressionError(f"LossTolerance: loss is the class {self.loss.__name__}, expected a function")
        if not isinstance(self.relative, bool):
            raise CompressionError(f"LossTolerance: relative is {self.relative!r}, expected True or False")
        if self.trials is not None:
            object.__setattr__(self, "trials", require_count("LossTolerance: trials", self.trials))

    def __repr__(self) -> str:
        name = getattr(self.loss, "__qualname__", type(self.loss).__qualname__)
        more = ("" if self.relative else ", relative=False") + (
            "" if self.trials is None else f", trials={self.trials}"
        )
        return f"LossTolerance({self.increase:g}, loss={name}{more})"

    def most_trials(self, layers: int) -> int:
        """The most trial cuts of one cut of so many layers."""
        wanted = _THRESHOLD + (_EACH * layers if layers > 1 else 0)
        return wanted if self.trials is None else min(self.trials, wanted)

    def plan(self, layers: int) -> str:
        """The trials of a cut of so many layers, in words."""
        most, said = self.most_trials(layers), f"{100 * self.increase:g} %" if self.relative else f"{self.increase:g}"
        return f"at most {most} trial{'s' if most > 1 else ''} a cut, for a loss that rises by at most {said}"

    def limit(self, present: float, best: float, spent: float = 0.0) -> float:
        """The largest loss that is allowed after a cut, if earlier ones have spent a part of the increase."""
        if self.relative and best < 0:
            raise CompressionError(
                f"LossTolerance: loss is {best:.6g}, and a share of a negative number is no tolerance: expected a loss"
                " of at least 0, or relative=False"
            )
        return present + max(0.0, (self.increase * best if self.relative else self.increase) - spent)

    def choose(self, spectra: Mapping[str, Tensor], trials: Trials) -> GivenOrders:
        """The orders with the fewest states that were tried and stayed within the limit."""
        begun, present = trials.count, trials.present
        limit = self.limit(present, trials.best, trials.spent)
        if trials.smallest is not None and trials.smallest <= present + _CAUTION * (limit - present):
            trials.note = f"it hardly depends on the states yet: {trials.smallest:.4g} with the fewest"
            return {name: trials.orders[name] for name in spectra}
        values = {name: sigma for name, sigma in checked_spectra(spectra).items() if bool(sigma.any())}
        still = {name: trials.orders[name] for name in spectra if name not in values}
        search = _Search(values, still, trials, limit, self.most_trials(len(spectra)) + begun)
        found = search.threshold() if values else still
        if len(values) > 1 and not trials.uniform and not trials.by_channel:
            found = search.moved(found)
        trials.note = f"at most {limit:.4g} is allowed"
        return found


@final
@dataclass
class _Search:
    """A search for few states; `most` is the number of trials at which it ends."""

    spectra: Spectra
    still: GivenOrders
    trials: Trials
    limit: float
    most: int

    @property
    def left(self) -> int:
        return self.most - self.trials.count

    def threshold(self) -> Orders:
        """The cut with the largest common threshold on tails whose trial is within the limit."""
        path, held = self._path(), self.trials
        low, high = 0, len(path)  # path[0] is the model as it is; path[high] is too small, or not there
        sizes = [-held.states(orders) for orders in path]
        first = held.count + _THRESHOLD
        while high - low > 1 and (known := min(self.left, first - held.count)) > 0:
            middle = (low + high) // 2
            if high - low - 1 >= 2**known:  # too many to tell all apart: halve the ratio of sizes
                ends = -sizes[low], -sizes[high] if high < len(path) else -sizes[-1]
                middle = bisect_left(sizes, -math.sqrt(ends[0] * ends[1]), low + 1, high - 1)
            if held(path[middle]) <= self.limit:
                low = middle
            else:
                high = middle
        return path[low]

    def _path(self) -> list[Orders]:
        """The different cuts that thresholds give, from the model as it is to the smallest."""
        curves = {name: _curves(sigma, apart=name in self.trials.by_channel) for name, sigma in self.spectra.items()}
        levels = torch.unique(torch.cat([curve[..., 1:].flatten() for curve in curves.values()]))
        most = _BY_CHANNEL if self.trials.by_channel else _THRESHOLDS
        if len(levels) > most:
            levels = levels[torch.linspace(0, len(levels) - 1, most).round().long()]
        path = [dict(self.trials.orders)]
        for level in levels.tolist():
            wanted = {name: _order(curve, level) for name, curve in curves.items()}
            orders = self.trials.limited({**wanted, **self.still})
            if orders != path[-1]:
                path.append(orders)
        return path

    def moved(self, orders: Orders) -> Orders:
        """The same orders after states were taken from single layers, and moved between them."""
        taken, harm = self._taken(orders)
        return self._given(taken, harm)

    def _taken(self, orders: Orders) -> tuple[Orders, dict[str, float]]:
        """Take an eighth of the states of every layer that can do without; also the harm of a state, by layer."""
        harm: dict[str, float] = {}
        curves = {name: _curves(sigma) for name, sigma in self.spectra.items()}

        def lost(name: str) -> float:
            order = _whole(orders[name])
            return float(curves[name][order - _step(order)] - curves[name][order])

        # Layers that lose the smallest share of their energy come first.
        for name in sorted(self.spectra, key=lost):
            fewer = self._with(orders, name, -1)
            gone = self.trials.states(orders) - self.trials.states(fewer)
            if gone <= 0 or self.left <= 0:
                continue
            before, after = self.trials(orders), self.trials(fewer)
            harm[name] = (after - before) / gone
            orders = fewer if after <= self.limit else orders
        return orders, harm

    def _given(self, orders: Orders, harm: Mapping[str, float]) -> Orders:
        """Give states to the layers that miss them most, from those that miss them least, if that lowers the loss."""
        for needy in sorted(harm, key=lambda name: -harm[name]):
            more = self._with(orders, needy, 1)
            for donor in sorted(harm, key=lambda name: harm[name]):
                other = self._with(more, donor, -1)
                fits = donor != needy and self.trials.states(other) <= self.trials.states(orders)
                if fits and other != orders and harm[donor] < harm[needy] and self.left > 0:
                    orders = other if self.trials(other) < self.trials(orders) else orders
                    break
        return orders

    def _with(self, orders: Orders, name: str, sign: int) -> Orders:
        """The orders that limits leave if one layer has an eighth of its states less or more."""
        order, n = _whole(orders[name]), _whole(self.trials.orders[name])
        wanted = order + sign * _step(order)
        # The next allowed order may be further down.
        for other in range(wanted, 0, -1) if sign < 0 else [min(n, wanted)]:
            limited = self.trials.limited({**orders, name: other})
            if limited != orders:
                return limited
        return orders


def _whole(order: Any) -> int:
    assert isinstance(order, int)
    return order


def _step(order: int) -> int:
    return min(max(1, order // _SHARE), order - 1)


def _curves(sigma: Float[Tensor, "*channels n"], *, apart: bool = False) -> Tensor:
    """The share of the energy that is lost if r states are kept, for r = 0, …, n; of every channel if `apart`."""
    tails = error_bounds(sigma) / 2 if apart else summed_tails(sigma)
    return tails / tails[..., :1].clamp_min(torch.finfo(tails.dtype).tiny)


def _order(curve: Tensor, level: float) -> int | Sequence[int]:
    """The fewest states, at least one, that lose at most this share; n if a channel has no energy."""
    n = curve.shape[-1] - 1
    kept = (curve > level).sum(-1).clamp(1, n)
    kept = torch.where(curve[..., 0] > 0, kept, n)
    return int(kept) if kept.ndim == 0 else tuple(kept.tolist())
