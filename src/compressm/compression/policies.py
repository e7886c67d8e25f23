"""Policies: from spectra to the orders of the next cut, with overrides by name, the gate, and sizes that run fast."""

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

from compressm.control import ControlError, error_bounds, validation
from compressm.errors import CompressionError, did_you_mean
from compressm.families.choices import require_count, require_number

Spectra = Mapping[str, Tensor]

# A layer is cut only if it keeps less than this share of its states (the paper's rule).
GATE = 0.95


def checked_spectra(spectra: Spectra) -> dict[str, Tensor]:
    """The same in float64 on the CPU, each with at least one value, all finite, >= 0 and falling on the last axis."""
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
    """tails[r] = the energy that all channels together lose by keeping r states each, Σ_channels Σ_{i>r} σᵢ."""
    return _by_channel(error_bounds(sigma)).sum(0) / 2


def largest_bounds(sigma: Float[Tensor, "*channels n"]) -> Float[Tensor, "n+1"]:
    """bounds[r] = the largest over the channels of 2 Σ_{i>r} σᵢ."""
    return _by_channel(error_bounds(sigma)).amax(0)


def _by_channel(bounds: Tensor) -> Tensor:
    return bounds.reshape(-1, bounds.shape[-1])


Policy = Callable[[Mapping[str, Tensor]], Mapping[str, int]]

# Of one state: what a product like 0.145 * 100 = 14.499999999999998 is off by.
_ROUNDING = 1e-9


class LayerPolicy(ABC):
    """A policy that looks at one layer at a time."""

    def __call__(self, spectra: Spectra) -> dict[str, int]:
        return {name: self.order(sigma) for name, sigma in checked_spectra(spectra).items()}

    @abstractmethod
    def order(self, sigma: Float[Tensor, "*channels n"]) -> int:
        """How many states to keep, from 1 to n."""


@final
@dataclass(frozen=True)
class EnergyTolerance(LayerPolicy):
    """The smallest r with Σ_{i≤r} σᵢ ≥ (1 − τ) Σ σᵢ (sec:algorithm); a bank by the energy of all its channels."""

    tau: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", require_number("EnergyTolerance: tau", self.tau, 0, 1, below=True))

    def order(self, sigma: Float[Tensor, "*channels n"]) -> int:
        """The smallest r whose tail holds at most τ of the energy; all n if there is none."""
        tails = summed_tails(sigma)
        return _first_within(tails, self.tau * float(tails[0]))


@final
@dataclass(frozen=True)
class ErrorBound(LayerPolicy):
    """The smallest r with 2 Σ_{i>r} σᵢ ≤ eps·σ₁, or ≤ eps if not `relative`; a bank by its worst channel and largest σ.

    With exact Gramians the left side bounds the H∞ error of the cut; with measured ones there is no bound, and a
    compressor refuses it.
    """

    eps: float
    relative: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", require_number("ErrorBound: eps", self.eps, 0))
        if not isinstance(self.relative, bool):
            raise CompressionError(f"ErrorBound: relative is {self.relative!r}, expected True or False")

    def order(self, sigma: Float[Tensor, "*channels n"]) -> int:
        """The smallest r whose bound, the largest over the channels, is met."""
        scale = float(sigma.max()) if self.relative else 1.0
        return _first_within(largest_bounds(sigma), self.eps * scale)


@final
@dataclass(frozen=True)
class KeepFraction(LayerPolicy):
    """At most ρ of the states that there are now, rounded half up; a layer of smaller numerical rank goes to that."""

    rho: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rho", require_number("KeepFraction: rho", self.rho, 0, 1, above=True))

    def order(self, sigma: Float[Tensor, "*channels n"]) -> int:
        """⌊ρn + ½⌋, at least 1."""
        return max(1, math.floor(self.rho * sigma.shape[-1] + 0.5 + _ROUNDING))


@final
@dataclass(frozen=True)
class FewerStates(LayerPolicy):
    """`count` states fewer at every cut, as the paper times cuts (fig:timer); one state is always left."""

    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", require_count("FewerStates: count", self.count))

    def order(self, sigma: Float[Tensor, "*channels n"]) -> int:
        """n − count, at least 1."""
        return max(1, sigma.shape[-1] - self.count)


@final
@dataclass(frozen=True)
class TargetOrder(LayerPolicy):
    """At most n states in every layer: one with fewer keeps what it has, one of smaller numerical rank goes to that."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", require_count("TargetOrder: n", self.n))

    def order(self, sigma: Float[Tensor, "*channels n"]) -> int:
        """The target, or the order that there is."""
        return min(self.n, sigma.shape[-1])


@final
@dataclass(frozen=True)
class Budget:
    """`total_states` at most for all layers, shared out so that their tails 2 Σ_{i>r} σᵢ have the smallest sum.

    With exact Gramians those are error bounds; with measured ones they weigh the states by what they do on the data.
    All of the budget is given out, of which a layer of smaller numerical rank leaves what is above it; a layer whose σ
    are all zero is left alone and may exceed it. A bank counts its shared order once and is judged by its worst
    channel. Of equally good allocations the one that keeps most in the first layers is taken, then in the second, and
    so on.
    """

    total_states: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "total_states", require_count("Budget: total_states", self.total_states))

    def __call__(self, spectra: Spectra) -> dict[str, int]:
        """At least one state in every layer; a budget above all states there are keeps all."""
        spectra = checked_spectra(spectra)
        if self.total_states < len(spectra):
            raise CompressionError(
                f"Budget: total_states is {self.total_states} for {len(spectra)} layers, expected at least one for each"
            )
        costs = [largest_bounds(sigma)[1:] for sigma in spectra.values()]
        total = min(self.total_states, sum(len(cost) for cost in costs))
        return dict(zip(spectra, _allocate(costs, total), strict=True))


def _first_within(losses: Float[Tensor, " m"], allowed: float) -> int:
    """The smallest r >= 1 with losses[r] <= allowed, of losses that fall with r; n if there is nothing to lose."""
    n = len(losses) - 1
    if losses[0] == 0:
        return n
    return min(max(1, int((losses > allowed).sum())), n)


def _allocate(costs: Sequence[Float[Tensor, " _"]], total: int) -> list[int]:
    """Orders r with Σ r = total and the smallest Σ costs[layer][r − 1].

    The costs of one channel are convex in r, for σ falls; so is the largest over the channels of a bank, as a maximum
    of convex functions. For convex costs the state that gains most is always the next to keep (Fox 1966).
    """
    # Convex up to rounding; the running minimum makes it so, and a layer's states are taken in their order.
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
    """The order that each layer is to have; its present one, n, where it is left alone.

    `overrides` maps patterns of module names ("blocks.0.*", as in `fnmatch`) to policies. The first pattern that
    matches a name decides; a policy is asked once, about all layers that fell to it, so that a `Budget` is shared by
    those and no others. Orders are `at_least` so much, rounded up to multiples of `round_to`, and then a layer is cut
    only if r < gate·n (the paper: 95 %). A layer whose σ are all zero, as that of a layer with C = 0 or of one that saw
    nothing but zeros, is left alone whatever the policy said: nothing tells its states apart. All of these only ever
    keep more than the policy said.

    A layer cannot have more states than its numerical rank #{σ > n ε σ₁} and still be balanced: one whose order falls
    to more than that goes to the rank, which need not be a multiple of `round_to`. The others do nothing.
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
    """Refuse what cannot be meant; each policy with the layers that fall to it."""
    require_number("gate", gate, 0, 1, above=True)
    require_count("round_to", round_to)
    require_count("at_least", at_least)
    return _shares(list(names), keep, {} if overrides is None else overrides)


def _gated(order: int, sigma: Tensor, gate: float, round_to: int, at_least: int) -> int:
    n = sigma.shape[-1]
    if not bool(sigma.any()):
        return n
    rounded = min(n, math.ceil(max(order, at_least) / round_to) * round_to)
    return rounded if rounded < gate * n - _ROUNDING else n


def _shares(layers: list[str], keep: Policy, overrides: Mapping[str, Policy]) -> list[tuple[Policy, list[str]]]:
    """Each policy with the names that fall to it; those that get none are left out."""
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


def _require_policy(what: str, policy: object) -> None:
    if isinstance(policy, type) or not callable(policy):
        raise CompressionError(
            f"{what} is {policy!r:.100}, expected a policy such as EnergyTolerance(0.05), or a function from"
            " {module: spectrum} to {module: order}"
        )


def _asked(policy: Policy, spectra: dict[str, Tensor]) -> dict[str, int]:
    """What the policy answers: an order from 1 to n for every layer, and nothing else."""
    orders = policy(dict(spectra))
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
    """The order of every channel of every layer: the policy is asked about each channel as if it were a layer."""
    spectra = checked_spectra(spectra)
    shares = require_choices(spectra, keep, overrides, gate, round_to, at_least)
    chosen: dict[str, list[int]] = {}
    for policy, names in shares:
        for name in names:
            asked = ((_asked_of_one(policy, name, sigma), sigma) for sigma in spectra[name])
            limits = (float(gate), int(round_to), int(at_least))
            chosen[name] = [_gated(order, sigma, *limits) for order, sigma in asked]
    return {name: chosen[name] for name in spectra}


def _asked_of_one(policy: Policy, name: str, sigma: Tensor) -> int:
    # Of ours, which have been checked already: there may be thousands of channels.
    return policy.order(sigma) if isinstance(policy, LayerPolicy) else _asked(policy, {name: sigma})[name]


def restricted(overrides: Mapping[str, Policy] | None, names: Iterable[str]) -> dict[str, Policy]:
    """Those whose patterns match one of these names."""
    layers = list(names)
    return {
        pattern: policy
        for pattern, policy in (overrides or {}).items()
        if any(fnmatchcase(name, pattern) for name in layers)
    }
