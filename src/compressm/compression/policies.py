"""Policies: they choose the orders of the next cut from spectra, with overrides by name, a gate and allowed orders."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, final

from jaxtyping import Float
from torch import Tensor

from compressm.adapters.base import require_call
from compressm.compression.budget import Budget, Spectra, checked_spectra, largest_bounds, pooled, summed_tails
from compressm.compression.trying import GivenOrders, Orders, TryingPolicy
from compressm.errors import AdapterError, CompressionError, did_you_mean
from compressm.families.choices import (
    AllowedOrders,
    RoundTo,
    as_allowed_orders,
    next_common,
    orders_by_name,
    require_count,
    require_number,
)

# A layer is cut only if it keeps less than this share of its states (the paper's rule).
GATE = 0.95

Policy = Callable[[Mapping[str, Tensor]], Mapping[str, int]] | TryingPolicy

# A share of one state: the rounding of a product such as 0.29 * 100 = 28.999999999999996.
_ROUNDING = 1e-9


class LayerPolicy(ABC):
    """A policy that decides for each layer separately."""

    def __call__(self, spectra: Spectra) -> dict[str, int]:
        return {name: self.order(sigma) for name, sigma in checked_spectra(spectra).items()}

    @abstractmethod
    def order(self, sigma: Float[Tensor, "*channels n"]) -> int:
        """The number of states to keep, from 1 to n."""

    def least(self, n: int) -> int:
        """The smallest order that this policy can choose for any layer of n states."""
        return 1

    def common_order(self, spectra: Spectra) -> int:
        """One order for all layers: that of a bank with all their channels, whose tails are the sums of theirs."""
        return self.order(pooled(spectra))


@final
@dataclass(frozen=True)
class EnergyTolerance(LayerPolicy):
    """The smallest r with Σ_{i≤r} σᵢ ≥ (1 − τ) Σ σᵢ (sec:algorithm); a bank counts the energy of all its channels."""

    tau: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", require_number("EnergyTolerance: tau", self.tau, 0, 1, below=True))

    def order(self, sigma: Float[Tensor, "*channels n"]) -> int:
        """The smallest r whose tail holds at most τ of the energy; n if all σ are zero."""
        tails = summed_tails(sigma)
        return _first_within(tails, self.tau * float(tails[0]))


@final
@dataclass(frozen=True)
class ErrorBound(LayerPolicy):
    """The smallest r with 2 Σ_{i>r} σᵢ ≤ eps·σ₁, or ≤ eps if not `relative`; a bank counts its worst channel.

    With exact Gramians the left side bounds the H∞ error of the cut, up to rounding, which no order can avoid and
    `Cut.error_bound` includes. Measured Gramians have no bound, and a compressor refuses this policy with them.
    """

    eps: float
    relative: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", require_number("ErrorBound: eps", self.eps, 0))
        if not isinstance(self.relative, bool):
            raise CompressionError(f"ErrorBound: relative is {self.relative!r}, expected True or False")

    def order(self, sigma: Float[Tensor, "*channels n"]) -> int:
        """The smallest r that meets the bound in every channel."""
        scale = float(sigma.max()) if self.relative else 1.0
        return _first_within(largest_bounds(sigma), self.eps * scale)

    def common_order(self, spectra: Spectra) -> int:
        """The smallest r that meets the bound of every layer, each relative to its own σ₁."""
        return max(self.order(sigma) for sigma in spectra.values())


@final
@dataclass(frozen=True)
class KeepFraction(LayerPolicy):
    """The share ρ of the present states, rounded down, but at most the numerical rank of the layer.

    With ρ < 1 every call drops a state, so repeated cuts do not stall before `at_least`, unless the gate or `round_to`
    keeps more.
    """

    rho: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rho", require_number("KeepFraction: rho", self.rho, 0, 1, above=True))

    def order(self, sigma: Float[Tensor, "*channels n"]) -> int:
        """⌊ρn⌋, at least 1; n for ρ = 1."""
        return self.least(sigma.shape[-1])

    def least(self, n: int) -> int:
        kept = math.floor(self.rho * n + _ROUNDING)
        # A ρ of 1 − 1e-12 is below 1, but rounding must not make ρn a whole n.
        return max(1, min(kept, n - 1)) if self.rho < 1 else n


@final
@dataclass(frozen=True)
class FewerStates(LayerPolicy):
    """`count` states fewer at every cut, as in the paper's timing (fig:timer); at least one state stays."""

    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", require_count("FewerStates: count", self.count))

    def order(self, sigma: Float[Tensor, "*channels n"]) -> int:
        """n − count, at least 1."""
        return self.least(sigma.shape[-1])

    def least(self, n: int) -> int:
        return max(1, n - self.count)


@final
@dataclass(frozen=True)
class TargetOrder(LayerPolicy):
    """The order n for every layer, but at most its numerical rank; a layer with fewer states is not changed."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", require_count("TargetOrder: n", self.n))

    def order(self, sigma: Float[Tensor, "*channels n"]) -> int:
        """The target, or the present order if that is smaller."""
        return self.least(sigma.shape[-1])

    def least(self, n: int) -> int:
        return min(self.n, n)


def _first_within(losses: Float[Tensor, " m"], allowed: float) -> int:
    """The smallest r >= 1 with losses[r] <= allowed, of losses that fall with r; n if all losses are 0."""
    n = len(losses) - 1
    if losses[0] == 0:
        return n
    return min(max(1, int((losses > allowed).sum())), n)


@final
@dataclass(frozen=True)
class Limits:
    """The limits of the orders that policies choose: gate, allowed orders by layer, and the least order.

    `share` is the share of its states that every layer keeps at least.
    """

    gate: float
    allowed: Mapping[str, AllowedOrders]
    at_least: int
    share: float = 0.0

    @classmethod
    def of(cls, names: Iterable[str], gate: float, round_to: RoundTo, at_least: int, share: float = 0.0) -> Limits:
        """The limits that these options set."""
        return cls(float(gate), orders_by_name(round_to, names), int(at_least), float(share))

    def least(self, order: int, n: int) -> int:
        """The order itself, or a larger one that a layer of n states keeps at least."""
        return max(order, self.at_least, math.ceil(self.share * n - _ROUNDING))

    def applied(self, name: str, order: int, n: int) -> int:
        """The order that a layer of n states gets if a policy chooses `order`."""
        found = self.allowed[name].next(self.least(order, n))
        return found if found is not None and found < self.gate * n - _ROUNDING else n

    def applied_to_each(self, spectra: Spectra, orders: GivenOrders) -> Orders:
        """The orders that layers, or channels of layers, get; those whose σ are all zero keep their states."""
        found: Orders = {}
        for name, sigma in spectra.items():
            order, n = orders[name], sigma.shape[-1]
            if isinstance(order, int):
                found[name] = self.applied(name, order, n) if bool(sigma.any()) else n
            else:
                there = sigma.any(-1).tolist()
                found[name] = tuple(
                    self.applied(name, r, n) if any_ else n for r, any_ in zip(order, there, strict=True)
                )
        return found

    def one_for_all(self, spectra: Spectra, wanted: int) -> dict[str, int]:
        """The same order for all layers with values; all present orders if none would be cut."""
        present = {name: sigma.shape[-1] for name, sigma in spectra.items()}
        seen = [name for name, sigma in spectra.items() if bool(sigma.any())]
        order = self.common(wanted, max(present[name] for name in seen)) if seen else None
        return present if order is None else present | dict.fromkeys(seen, order)

    def orders(self, name: str, n: int) -> list[int]:
        """All orders that a layer of n states may get; its present one only if it is allowed, or there is no other."""
        found = sorted({self.applied(name, order, n) for order in range(1, n + 1)})
        rule = self.allowed[name]
        return found[:-1] if len(found) > 1 and rule.fills_up and not rule.allows(found[-1]) else found

    def common(self, order: int, n: int) -> int | None:
        """The order for all layers, the largest of n states, if a policy chooses `order`; None if there is none."""
        found = next_common(self.allowed.values(), self.least(order, n), limit=n)
        return found if found is not None and found < self.gate * n - _ROUNDING else None


def choose_orders(
    spectra: Spectra,
    keep: Policy,
    *,
    overrides: Mapping[str, Policy] | None = None,
    gate: float = GATE,
    round_to: RoundTo = 1,
    at_least: int = 1,
    share: float = 0.0,
    uniform: bool = False,
) -> dict[str, int]:
    """The new order r of each layer; n, its present order, if the layer is not cut.

    `overrides` maps patterns of module names ("blocks.0.*", as in `fnmatch`) to policies. The first pattern that
    matches a name decides. A policy is called once, with all its layers, which alone share a `Budget`; budgets come
    after the other policies, whose orders they count. Orders below `at_least` are raised to it, then to the next one
    that `round_to` allows (a multiple of an integer, a member of a collection, a power of two); a layer is cut only if
    r < gate·n (the paper: 95 %), and it keeps at least share·n. A layer keeps its states if no allowed order is left:
    the result then need not be an allowed one, and `compress_` warns. A layer whose σ are all zero, for example with
    C = 0 or after inputs of zeros only, is not cut: nothing distinguishes its states, and a compressor warns. All of
    these rules can only keep more states than the policy chose; a `Budget` chooses among the orders that they leave.

    With `uniform` all layers get one order, which may be above n: they are then filled up with zero states. It is
    chosen from the summed tails of all layers; `ErrorBound` and a function take the largest order of any layer. If no
    layer is cut, nothing changes.

    A balanced layer cannot have more states than its numerical rank #{σ > n ε σ₁}. If the order of a layer that is cut
    exceeds it, the compressor cuts to the rank. It fills up the layer with zero states to the next allowed order, or to
    the one of all layers, unless `round_to` is an integer.
    """
    spectra = checked_spectra(spectra)
    shares = require_choices(spectra, keep, overrides, gate, round_to, at_least)
    limits = Limits.of(spectra, gate, round_to, at_least, share)
    if uniform:
        require_uniform(uniform, overrides)
        return _one_order(spectra, keep, limits)
    orders = {name: sigma.shape[-1] for name, sigma in spectra.items()}
    # Budgets last: they count other layers at the orders that they get.
    for policy, names in sorted(shares, key=lambda share: isinstance(share[0], Budget)):
        own = {name: spectra[name] for name in names}
        if isinstance(policy, Budget):
            others = {name: order for name, order in orders.items() if name not in own}
            chosen = policy.allocated(own, {name: limits.orders(name, orders[name]) for name in own}, others)
        else:
            chosen = _asked(policy, own)
        orders |= {name: limits.applied(name, chosen[name], orders[name]) for name in own if bool(own[name].any())}
    return orders


def require_uniform(uniform: object, overrides: Mapping[str, Policy] | None) -> None:
    """Refuse a `uniform` that is neither True nor False, and policies of single layers beside it."""
    if not isinstance(uniform, bool):
        raise CompressionError(f"uniform is {uniform!r:.100}, expected True or False")
    if uniform and overrides:
        raise CompressionError(
            f"uniform with overrides for {', '.join(map(repr, overrides))}: one order for all layers, as runtimes in"
            " round_to need it, leaves nothing to choose for single ones; leave the overrides out, or pass"
            " uniform=False"
        )


def _one_order(spectra: dict[str, Tensor], keep: Policy, limits: Limits) -> dict[str, int]:
    """The same order for all layers with values; all present orders if none would be cut."""
    present = {name: sigma.shape[-1] for name, sigma in spectra.items()}
    seen = {name: sigma for name, sigma in spectra.items() if bool(sigma.any())}
    if not seen:
        return present
    if isinstance(keep, Budget):
        n = max(present[name] for name in seen)
        allowed = sorted({found for r in range(1, n + 1) if (found := limits.common(r, n)) is not None})
        wanted = keep.common_order({name: present[name] for name in seen}, allowed)
    elif isinstance(keep, LayerPolicy):
        wanted = keep.common_order(seen)
    else:
        wanted = max(_asked(keep, seen).values())
    return limits.one_for_all(spectra, wanted)


def require_choices(
    names: Iterable[str],
    keep: Policy,
    overrides: Mapping[str, Policy] | None,
    gate: float,
    round_to: RoundTo,
    at_least: int,
) -> list[tuple[Policy, list[str]]]:
    """Each policy with the names of its layers; invalid choices are refused, a policy without layers is left out."""
    require_number("gate", gate, 0, 1, above=True)
    as_allowed_orders(round_to)
    require_count("at_least", at_least)
    layers, overrides = list(names), {} if overrides is None else overrides
    if not isinstance(overrides, Mapping):
        raise CompressionError(f"overrides are {overrides!r:.100}, expected {{pattern of module names: policy}}")
    _require_policy("keep", keep)
    for pattern, policy in overrides.items():
        _require_policy(f"overrides[{pattern!r}]", policy)
        if not isinstance(pattern, str) or not any(fnmatchcase(name, pattern) for name in layers):
            near = did_you_mean(pattern, layers)
            raise CompressionError(
                f"overrides: {pattern!r} matches no module; there are {', '.join(map(repr, layers))}{near}"
            )
    shares: list[tuple[Policy, list[str]]] = [(policy, []) for policy in (*overrides.values(), keep)]
    for name in layers:
        matching = (k for k, pattern in enumerate(overrides) if fnmatchcase(name, pattern))
        shares[next(matching, -1)][1].append(name)
    return [(policy, names) for policy, names in shares if names]


def require_reachable(names: Iterable[str], overrides: Mapping[str, Policy] | None) -> None:
    """Refuse a pattern whose modules all match an earlier one, which is the one that counts."""
    free = list(names)
    for pattern in overrides or {}:
        if not any(fnmatchcase(name, pattern) for name in free):
            raise CompressionError(
                f"overrides: {pattern!r} comes after patterns that match all of its modules, and the first one counts:"
                " put it before them"
            )
        free = [name for name in free if not fnmatchcase(name, pattern)]


def never_cuts(keep: Policy, overrides: Mapping[str, Policy] | None) -> bool:
    """True if these policies keep all states of every model."""
    return all(policy == KeepFraction(1.0) for policy in (keep, *(overrides or {}).values()))


def obstacles(
    orders: Mapping[str, int],
    keep: Policy,
    overrides: Mapping[str, Policy] | None,
    gate: float,
    round_to: RoundTo,
    at_least: int,
) -> dict[str, object]:
    """The options, with their values, that keep every layer at its present order; empty if one could be cut."""
    shares = require_choices(orders, keep, overrides, gate, round_to, at_least)
    limits = {"gate": gate, "round_to": round_to, "at_least": at_least}

    def can_cut(free: bool = False, **other: Any) -> bool:
        rules = Limits.of(orders, **limits | other)
        return any(
            rules.applied(name, 1 if free else least, orders[name]) < orders[name]
            for policy, names in shares
            for name, least in _least_orders(policy, {name: orders[name] for name in names}).items()
        )

    if can_cut():
        return {}
    options: dict[str, object] = {"keep": keep if not overrides else (keep, *overrides.values()), **limits}
    alone = {
        "keep": can_cut(free=True),
        "gate": can_cut(gate=1.0),
        "round_to": can_cut(round_to=1),
        "at_least": can_cut(at_least=1),
    }
    return {name: options[name] for name in options if alone[name]} or options


def _least_orders(policy: Policy, orders: Mapping[str, int]) -> Mapping[str, int]:
    """The smallest order that a policy could choose for every layer."""
    if isinstance(policy, LayerPolicy):
        return {name: policy.least(n) for name, n in orders.items()}
    if isinstance(policy, Budget) and policy.total_states is not None and policy.total_states >= sum(orders.values()):
        return orders
    return dict.fromkeys(orders, 1)


def _require_policy(what: str, policy: object) -> None:
    if isinstance(policy, TryingPolicy):
        if what != "keep":
            raise CompressionError(
                f"{what} is {policy}, which tries cuts of the whole model: expected it as keep, and other policies in"
                " overrides"
            )
        return
    if isinstance(policy, type) or not callable(policy):
        raise CompressionError(
            f"{what} is {policy!r:.100}, expected a policy such as EnergyTolerance(0.05), or a function from"
            " {module: spectrum} to {module: order}"
        )
    try:
        require_call(what, policy, "spectra")
    except AdapterError as error:
        raise CompressionError(f"{error}; or a policy such as EnergyTolerance(0.05)") from None


def _asked(policy: Policy, spectra: dict[str, Tensor]) -> dict[str, int]:
    """The orders that the policy returns: from 1 to n for every layer, and nothing else."""
    if isinstance(policy, TryingPolicy):
        raise CompressionError(f"{policy} needs the model: pass it as keep to compress_ or Compressor")
    # Copies: the record needs the spectra as they are.
    orders = policy({name: sigma.clone() for name, sigma in spectra.items()})
    found = require_given(policy, orders, {name: sigma.shape[-1] for name, sigma in spectra.items()}, {})
    return {name: order for name, order in found.items() if isinstance(order, int)}


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
        # One order, or what is none, goes for every channel.
        is_each = isinstance(given, Sequence) and not isinstance(given, str)
        each = list(given) if is_each or getattr(given, "ndim", 0) == 1 else [given] * channels[name]
        if len(each) != channels[name]:
            raise CompressionError(
                f"{what} has {len(each)} entries, expected one for each of {channels[name]} channels"
            )
        found[name] = tuple(require_count(what, order, high=n) for order in each)
    return found


def choose_channel_orders(
    spectra: Spectra,
    keep: Policy,
    *,
    overrides: Mapping[str, Policy] | None = None,
    gate: float = GATE,
    round_to: RoundTo = 1,
    at_least: int = 1,
    share: float = 0.0,
) -> dict[str, list[int]]:
    """The order of every channel of every layer: a policy gets each channel as if it were a layer."""
    spectra = checked_spectra(spectra)
    shares = require_choices(spectra, keep, overrides, gate, round_to, at_least)
    limits = Limits.of(spectra, gate, round_to, at_least, share)
    policies = {name: policy for policy, names in shares for name in names}

    def chosen(name: str, sigma: Tensor) -> int:
        n = sigma.shape[-1]
        return limits.applied(name, _asked_of_one(policies[name], name, sigma), n) if bool(sigma.any()) else n

    return {name: [chosen(name, sigma) for sigma in channels] for name, channels in spectra.items()}


def _asked_of_one(policy: Policy, name: str, sigma: Tensor) -> int:
    # Our own policies need no check of their answers: there may be thousands of channels.
    return policy.order(sigma) if isinstance(policy, LayerPolicy) else _asked(policy, {name: sigma})[name]


def restricted(overrides: Mapping[str, Policy] | None, names: Sequence[str]) -> dict[str, Policy]:
    """The overrides whose patterns match one of these names."""
    return {
        pattern: policy
        for pattern, policy in (overrides or {}).items()
        if any(fnmatchcase(name, pattern) for name in names)
    }
