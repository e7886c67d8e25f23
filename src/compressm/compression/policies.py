"""Policies: they choose the orders of the next cut from spectra, with overrides by name, a gate and rounding."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from compressm.adapters.base import require_call
from compressm.control import ControlError, error_bounds, validation
from compressm.errors import AdapterError, CompressionError, did_you_mean
from compressm.families.choices import require_count, require_number

Spectra = Mapping[str, Tensor]

# A layer is cut only if it keeps less than this share of its states (the paper's rule).
GATE = 0.95


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


Policy = Callable[[Mapping[str, Tensor]], Mapping[str, int]]

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


@final
@dataclass(frozen=True)
class Budget:
    """A budget of `total_states` for all layers, distributed so that the sum of their tails 2 Σ_{i>r} σᵢ is smallest.

    With exact Gramians the tails are error bounds; with measured ones they weigh the states by their effect on the
    data. The whole budget is distributed, but a layer of smaller numerical rank does not use all of its part. A layer
    whose σ are all zero is not changed and may exceed the budget. A bank counts its shared order once, with the tail of
    its worst channel. Of equally good allocations, the one with most states in the first layers is taken.
    """

    total_states: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "total_states", require_count("Budget: total_states", self.total_states))

    def __call__(self, spectra: Spectra) -> dict[str, int]:
        """The order of every layer, at least 1; a budget above the present number of states keeps all of them."""
        spectra = checked_spectra(spectra)
        if self.total_states < len(spectra):
            raise CompressionError(
                f"Budget: total_states is {self.total_states} for {len(spectra)} layers, expected at least one for each"
            )
        costs = [largest_bounds(sigma)[1:] for sigma in spectra.values()]
        total = min(self.total_states, sum(len(cost) for cost in costs))
        return dict(zip(spectra, _allocate(costs, total), strict=True))


def _first_within(losses: Float[Tensor, " m"], allowed: float) -> int:
    """The smallest r >= 1 with losses[r] <= allowed, of losses that fall with r; n if all losses are 0."""
    n = len(losses) - 1
    if losses[0] == 0:
        return n
    return min(max(1, int((losses > allowed).sum())), n)


def _allocate(costs: Sequence[Float[Tensor, " _"]], total: int) -> list[int]:
    """Orders r with Σ r = total and the smallest Σ costs[layer][r − 1].

    The costs of one channel are convex in r because σ falls, and so is their maximum over the channels of a bank. For
    convex costs, the state with the largest gain is always the next to keep (Fox 1966).
    """
    # Costs are convex up to rounding; the running minimum makes them convex, so states are taken in order.
    gains = [(cost[:-1] - cost[1:]).cummin(0).values for cost in costs]
    layers = torch.cat([torch.full_like(gain, layer, dtype=torch.int64) for layer, gain in enumerate(gains)])
    best_first = torch.cat(gains).argsort(descending=True, stable=True)
    taken = layers[best_first[: total - len(costs)]]
    return [1 + count for count in torch.bincount(taken, minlength=len(costs)).tolist()]


def choose_orders(
    spectra: Spectra,
    keep: Policy,
    *,
    overrides: Mapping[str, Policy] | None = None,
    gate: float = GATE,
    round_to: int = 1,
    at_least: int = 1,
) -> dict[str, int]:
    """The new order r of each layer; n, its present order, if the layer is not cut.

    `overrides` maps patterns of module names ("blocks.0.*", as in `fnmatch`) to policies. The first pattern that
    matches a name decides. A policy is called once, with all its layers, which alone share a `Budget`. Orders below
    `at_least` are raised to it, then rounded up to a multiple of `round_to`, and a layer is cut only if r < gate·n (the
    paper: 95 %). A layer whose σ are all zero, for example with C = 0 or after inputs of zeros only, is not cut:
    nothing distinguishes its states, and a compressor warns. All of these rules can only keep more states than the
    policy chose.

    A balanced layer cannot have more states than its numerical rank #{σ > n ε σ₁}. If the order of a layer that is cut
    exceeds it, the compressor cuts to the rank, which need not be a multiple of `round_to`.
    """
    spectra = checked_spectra(spectra)
    shares = require_choices(spectra, keep, overrides, gate, round_to, at_least)
    orders: dict[str, int] = {}
    for policy, names in shares:
        orders |= _asked(policy, {name: spectra[name] for name in names})
    limits = (float(gate), int(round_to), int(at_least))
    return {name: _gated(orders[name], sigma, *limits) for name, sigma in spectra.items()}


def require_choices(
    names: Iterable[str],
    keep: Policy,
    overrides: Mapping[str, Policy] | None,
    gate: float,
    round_to: int,
    at_least: int,
) -> list[tuple[Policy, list[str]]]:
    """Each policy with the names of its layers; invalid choices are refused, a policy without layers is left out."""
    require_number("gate", gate, 0, 1, above=True)
    require_count("round_to", round_to)
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


def _gated(order: int, sigma: Tensor, gate: float, round_to: int, at_least: int) -> int:
    n = sigma.shape[-1]
    return _limited(order, n, gate, round_to, at_least) if bool(sigma.any()) else n


def _limited(order: int, n: int, gate: float, round_to: int, at_least: int) -> int:
    rounded = min(n, math.ceil(max(order, at_least) / round_to) * round_to)
    return rounded if rounded < gate * n - _ROUNDING else n


def never_cuts(keep: Policy, overrides: Mapping[str, Policy] | None) -> bool:
    """True if these policies keep all states of every model."""
    return all(policy == KeepFraction(1.0) for policy in (keep, *(overrides or {}).values()))


def obstacles(
    orders: Mapping[str, int],
    keep: Policy,
    overrides: Mapping[str, Policy] | None,
    gate: float,
    round_to: int,
    at_least: int,
) -> dict[str, object]:
    """The options, with their values, that keep every layer at its present order; empty if one could be cut."""
    shares = require_choices(orders, keep, overrides, gate, round_to, at_least)

    def can_cut(free: bool = False, gate: float = gate, round_to: int = round_to, at_least: int = at_least) -> bool:
        return any(
            _limited(1 if free else least, orders[name], gate, round_to, at_least) < orders[name]
            for policy, names in shares
            for name, least in _least_orders(policy, {name: orders[name] for name in names}).items()
        )

    if can_cut():
        return {}
    policies = keep if not overrides else (keep, *overrides.values())
    options: dict[str, object] = {"keep": policies, "gate": gate, "round_to": round_to, "at_least": at_least}
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
    if isinstance(policy, Budget) and policy.total_states >= sum(orders.values()):
        return orders
    return dict.fromkeys(orders, 1)


def _require_policy(what: str, policy: object) -> None:
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
    # Copies: the record needs the spectra as they are.
    orders = policy({name: sigma.clone() for name, sigma in spectra.items()})
    if not isinstance(orders, Mapping):
        raise CompressionError(f"{policy!r:.100} returned {orders!r:.100}, expected {{module: order}}")
    for problem, names in (("no order for", spectra.keys() - orders), ("orders for unknown", orders.keys() - spectra)):
        if names:
            raise CompressionError(f"{policy!r:.100} returned {problem} {', '.join(sorted(map(repr, names)))}")
    return {
        name: require_count(f"{policy!r:.100}: the order of {name!r}", orders[name], high=sigma.shape[-1])
        for name, sigma in spectra.items()
    }


def choose_channel_orders(
    spectra: Spectra,
    keep: Policy,
    *,
    overrides: Mapping[str, Policy] | None = None,
    gate: float = GATE,
    round_to: int = 1,
    at_least: int = 1,
) -> dict[str, list[int]]:
    """The order of every channel of every layer: a policy gets each channel as if it were a layer."""
    spectra = checked_spectra(spectra)
    shares = require_choices(spectra, keep, overrides, gate, round_to, at_least)
    limits = (float(gate), int(round_to), int(at_least))
    policies = {name: policy for policy, names in shares for name in names}
    return {
        name: [_gated(_asked_of_one(policies[name], name, sigma), sigma, *limits) for sigma in channels]
        for name, channels in spectra.items()
    }


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
