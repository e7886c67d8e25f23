"""From spectra to the orders of the next cut: policies, overrides by name, the gate, sizes that run fast."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor

from compressm.compression.policies import LayerPolicy, Policy, Spectra, checked_spectra
from compressm.errors import CompressionError, did_you_mean
from compressm.families.choices import require_count, require_number

# Of one state: 0.55 * 100 = 55.00000000000001, yet 55 of 100 states are not fewer than 55 %.
_ROUNDING = 1e-9


def choose_orders(
    spectra: Spectra,
    keep: Policy,
    *,
    overrides: Mapping[str, Policy] | None = None,
    gate: float = 0.95,
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
    gate: float = 0.95,
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
