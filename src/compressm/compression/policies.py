"""Spectra of all layers, checked once, and the two curves that a policy reads off each of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from compressm.control import ControlError, error_bounds, validation
from compressm.errors import CompressionError
from compressm.families.choices import require_count, require_number

Spectra = Mapping[str, Tensor]


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
