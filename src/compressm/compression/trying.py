"""Policies that try cuts before one is made: they ask for orders and get the loss of the model after that cut."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from torch import Tensor, nn

from compressm.errors import CompressionError
from compressm.families.choices import require_count

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
        """What all cuts since the best loss have added, as measured when they were made; 0 if this is the best."""
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
        return sum(order if isinstance(order, int) else math.fsum(order) / len(order) for order in orders.values())


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
        """What a cut of so many layers will try, in words."""
        return f"{self!r} tries cuts before it chooses"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def require_given(who: object, orders: Any, present: Mapping[str, int], channels: Mapping[str, int]) -> Orders:
    """The orders that a policy gave, if there is one from 1 to n for every layer, or for every channel of some."""
    if not isinstance(orders, Mapping):
        raise CompressionError(f"{who!r:.100} returned {orders!r:.100}, expected {{module: order}}")
    for problem, names in (("no order for", present.keys() - orders), ("orders for unknown", orders.keys() - present)):
        if names:
            raise CompressionError(f"{who!r:.100} returned {problem} {', '.join(sorted(map(repr, names)))}")
    found: Orders = {}
    for name, n in present.items():
        what = f"{who!r:.100}: the order of {name!r}"
        if name not in channels:
            found[name] = require_count(what, orders[name], high=n)
            continue
        given = orders[name]
        each = [given] * channels[name] if isinstance(given, int) else list(given)
        if len(each) != channels[name]:
            raise CompressionError(
                f"{what} has {len(each)} entries, expected one for each of {channels[name]} channels"
            )
        found[name] = tuple(require_count(what, order, high=n) for order in each)
    return found
