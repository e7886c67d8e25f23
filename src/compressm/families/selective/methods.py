"""Methods that cut selective layers: from averages over data to values of states, and to a reduction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor, nn

from compressm.adapters import Basis, SelectiveAdapter, find
from compressm.control import (
    DiagonalSystem,
    galerkin_projection,
    hankel_singular_values,
    mean_selective_system,
    second_moment_gramians,
    shared_projection,
)
from compressm.control.balancing import GramianPair, balance, hankel_values
from compressm.control.hankel import gramian_pair
from compressm.control.projection import Modes, diagonal_modes, shared_gramians
from compressm.control.selective import SelectiveSystem
from compressm.errors import CompressionError
from compressm.families.choices import Gramian, Measured, require_count
from compressm.families.fitting import halves
from compressm.families.observing import ratio_of
from compressm.families.selective.observer import SelectiveObservations
from compressm.families.selective.reduction import Added, ChannelReduction, SelectiveReduction, SharedReduction
from compressm.families.selective.simulation import (
    fitted_system,
    output_gain,
    refitted_readout,
    resized,
    squared_change,
)


@final
@dataclass(frozen=True)
class Calibrated:
    """A layer's system and its observations."""

    system: SelectiveSystem
    observations: SelectiveObservations

    @property
    def gramians(self) -> tuple[Inexact[Tensor, "channels n n"], Inexact[Tensor, "channels n n"]]:
        """P and Q of every channel, in continuous time, of B and C divided by the system's `scales`.

        Q = E[C Cᵀ] / −(aᵢ + aⱼ). P is E[h hᵀ] if states were measured, else E[B Bᵀ] / −(aᵢ + aⱼ), as for inputs
        that are white in time. Both keep the variation of B and C, which their means would lose.
        """
        self.observations.require_data(len(self.system.W_B))
        P, Q = self.gramians_of(self.observations.averages.mean("BB"), self.observations.averages.mean("CC"))
        return (P if self.observations.covariance is None else self.observations.covariance.scaled_gramian()[0]), Q

    @property
    def state_scale(self) -> Float[Tensor, " channels"]:
        """The power of two by which the states of P were divided in every channel."""
        covariance = self.observations.covariance
        one = torch.ones(self.system.channels, dtype=torch.float64, device=self.system.device)
        measured = one if covariance is None else covariance.scaled_gramian()[1]
        return measured * self.system.scales[0]

    @property
    def sigma_scale(self) -> Float[Tensor, " channels"]:
        """The factor that turns values of `gramians` into values of the system."""
        return self.state_scale * self.system.scales[1]

    def gramians_of(
        self, moment_B: Inexact[Tensor, "m m"], moment_C: Inexact[Tensor, "m m"]
    ) -> tuple[Inexact[Tensor, "channels n n"], Inexact[Tensor, "channels n n"]]:
        """P and Q of every channel, in its own coordinates, from second moments of B and C that all channels share."""
        system = self.system
        if system.maps is None:
            shape = (system.channels, system.order, system.order)
            return second_moment_gramians(system.rates, moment_B.expand(shape), moment_C.expand(shape))
        B, C, a = system.maps.B, system.maps.C, system.rates
        sums = -(a[..., :, None] + a[..., None, :].conj())
        return B @ moment_B.to(B.dtype) @ B.mH / sums, C.mH @ moment_C.to(C.dtype) @ C / sums.conj()


class SelectiveMethod(ABC):
    """A way to cut selective layers: it values states by averages over data, and reduces a layer to some of them."""

    # The basis change that a layer must be able to store.
    needs: ClassVar[Basis]
    # True if every channel has its own order.
    by_channel: ClassVar[bool] = False

    def measures(self, gramian: Gramian | None) -> bool:
        """True if the covariance of the states is needed."""
        return isinstance(gramian, Measured)

    def require(self, name: str, module: nn.Module, adapter: SelectiveAdapter[Any], system: SelectiveSystem) -> None:
        """Refuse by name a layer that this method cannot cut, or that cannot store the result."""
        if self.needs not in adapter.STORES:
            others = [kind.__name__ for kind in (Baked, SharedIndex, PerChannel) if kind.needs in adapter.STORES]
            raise CompressionError(
                f"{name}: a {type(module).__name__} cannot store {self.needs.value}, which {self} needs; expected"
                f" selective={'() or '.join(others)}()"
            )
        self._require_system(name, system)

    def _require_system(self, name: str, system: SelectiveSystem) -> None:
        """Refuse a system that this method cannot cut after an earlier cut."""
        if system.maps is not None:
            raise CompressionError(
                f"{name}: an earlier PerChannel cut gave every channel its own states; {self} cannot cut those;"
                " expected selective=PerChannel(...)"
            )

    @abstractmethod
    def spectrum(self, layer: Calibrated) -> Float[Tensor, "*channels n"]:
        """The value of every state, in falling order."""

    @abstractmethod
    def reduce(self, layer: Calibrated, kept: Sequence[Int[Tensor, " _"]]) -> SelectiveReduction:
        """The reduction to the states at these places of the spectrum: one list for all channels, or one for each."""


@final
@dataclass(frozen=True)
class Baked(SelectiveMethod):
    """One projection for all channels of a layer, multiplied into its parameters: it costs nothing at run time.

    E_B and E_C come from the Gramians of the channels, averaged at equal trace; x_proj gives E_B B and C E_C, and
    channel i has the rates diag(E_B Aⁱ E_C). The projection is symmetric, so all rates stay real and negative for any
    data. `two_sided` balances instead; it is a little more accurate, and refuses layers whose rates become complex.
    Spectra are the Hankel values of the averaged pair: relative, not absolute, sizes.

    `refit` fits the rows of C again: C ← C F with F = E[h h'ᵀ] E[h' h'ᵀ]⁻¹ over all channels and a sample of the data,
    h' the new states. It makes errors smaller and simulates the layer twice. After that `fit` steps of Adam fit rows of
    B and C, rates and the weights of norms to the scan's output on three quarters of the sample; on the rest the fit
    must be better than its start to count.

    Norms of B and C (FalconMamba, Jamba) follow the projection: it is near, not exact.
    """

    needs = Basis.AVERAGED

    two_sided: bool = False
    refit: bool = False
    fit: int = 0

    def __post_init__(self) -> None:
        require_truth(self, two_sided=self.two_sided, refit=self.refit)
        _require_steps(self)

    def spectrum(self, layer: Calibrated) -> Float[Tensor, " n"]:
        P, Q = shared_gramians(layer.system.rates, *layer.gramians)
        pair = GramianPair.of(P[None], Q[None])
        return (hankel_values(pair) * pair.sigma_scale)[0]

    def reduce(self, layer: Calibrated, kept: Sequence[Int[Tensor, " _"]]) -> SharedReduction:
        (states,) = kept
        projection = shared_projection(
            layer.system.rates, *layer.gramians, len(states), states=states, two_sided=self.two_sided
        )
        # With M = E_B ∘ E_Cᵀ, M a = diag(E_B diag(a) E_C).
        E_B, E_C = projection.E_B, projection.E_C
        reduction = _behind_norms(layer, SharedReduction(E_B, E_C, E_B * E_C.mT))
        if self.refit:
            new = reduction.applied(layer.system)
            E_C = refitted_readout(layer.system, new, layer.observations.sample, reduction.E_C)
            reduction = _behind_norms(layer, replace(reduction, E_C=E_C))
        return _fitted(layer, reduction, self.fit)


@final
@dataclass(frozen=True)
class SharedIndex(SelectiveMethod):
    """A selection of states, the same in all channels, by s_j = Σ_channels √(P_jj Q_jj).

    A baseline for comparison: rates do not change; rows of x_proj and columns of A_log are dropped. With `refit` the
    rows of C that stay replace the others as well as they can: C ← C F with F = P_k P_kk⁻¹, P the sum of the channels'
    Gramians, k the states kept and P_k their columns. This F minimises Σ E[(C h − C F h_k)²] if C and h are
    independent: then E[C Cᵀ] cancels in the normal equations E[C Cᵀ] F P_kk = E[C Cᵀ] P_k. `fit` is that of `Baked`.
    """

    needs = Basis.SELECTED

    refit: bool = False
    fit: int = 0

    def __post_init__(self) -> None:
        require_truth(self, refit=self.refit)
        _require_steps(self)

    def spectrum(self, layer: Calibrated) -> Float[Tensor, " n"]:
        return _scores(layer).sort(descending=True).values

    def reduce(self, layer: Calibrated, kept: Sequence[Int[Tensor, " _"]]) -> SharedReduction:
        (places,) = kept
        ranking = _scores(layer).argsort(descending=True, stable=True)
        states = ranking[places.to(ranking.device)].sort().values
        slices = torch.eye(layer.system.order, dtype=torch.float64, device=ranking.device)[states]
        reduction = SharedReduction(slices, slices.mT, slices)
        if self.refit:
            scale = layer.state_scale / layer.state_scale.max()
            P = (layer.gramians[0] * (scale * scale)[:, None, None]).sum(0)
            # P_kk is singular if states are linearly dependent.
            inverse = torch.linalg.pinv(P[states][:, states], hermitian=True, rtol=1e-10)
            reduction = replace(reduction, E_C=P[:, states] @ inverse)
        return _fitted(layer, _behind_norms(layer, reduction), self.fit)


def _scores(layer: Calibrated) -> Float[Tensor, " n"]:
    P, Q = layer.gramians
    squares = P.diagonal(dim1=-2, dim2=-1) * Q.diagonal(dim1=-2, dim2=-1)
    return (torch.sqrt(squares.clamp_min(0)) * layer.sigma_scale[:, None]).sum(0)


def _behind_norms(layer: Calibrated, reduction: SharedReduction) -> SharedReduction:
    """The reduction with factors for norms, its states scaled so that rows of E_B and columns of E_C are as long.

    A norm weighs states against each other; in this scale a selection stays one, and all states are as they were.
    """
    if layer.system.norms is None:
        return reduction
    E_B, E_C = reduction.E_B, reduction.E_C
    long_B, long_C = E_B.square().sum(1).sqrt(), E_C.square().sum(0).sqrt()
    usable = (long_B > 0) & (long_C > 0)
    ratio = torch.sqrt(torch.where(usable, long_C / torch.where(usable, long_B, 1), 1))
    E_B, E_C, sample = ratio[:, None] * E_B, E_C / ratio, layer.observations.sample
    found = replace(reduction, E_B=E_B, E_C=E_C, resized=resized(layer.system, E_B, E_C, sample))
    assert found.resized is not None
    of_B, of_C = found.resized
    gain = output_gain(layer.system, found.applied(layer.system), sample)
    return replace(found, resized=(of_B, replace(of_C, weights=of_C.weights * gain)))


def _fitted(layer: Calibrated, reduction: SharedReduction, steps: int) -> SharedReduction:
    """The reduction after so many steps of a fit, if that is better on sequences that the fit has not seen."""
    if not steps or not layer.observations.sample.sequences:
        return reduction
    fitting, judging = halves(layer.observations.sample)
    start = reduction.applied(layer.system)
    found = fitted_system(layer.system, start, fitting, steps)
    both = (reduction, replace(reduction, added=Added.between(start, found)))
    return min(both, key=lambda one: ratio_of(squared_change(layer.system, one.applied(layer.system), judging)))


def _require_steps(method: Baked | SharedIndex) -> None:
    object.__setattr__(method, "fit", require_count(f"{type(method).__name__}: fit", method.fit, low=0))


def require_truth(method: object, **given: object) -> None:
    """Refuse options that are neither True nor False, by name."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise CompressionError(f"{type(method).__name__}: {name} is {value!r}, expected True or False")


_SURROGATES = ("mean", "second_moment", "measured")


@final
@dataclass(frozen=True)
class PerChannel(SelectiveMethod):
    """Balanced truncation of every channel to its own order; the layer keeps maps of B and C.

    Only the r columns that are kept of the paper's T and T⁻¹ are stored: the whole matrices are too ill-conditioned for
    any precision. `surrogate` says what represents a channel: "mean", the paper's system exp(E[Δ] a), E[Δ] E[B], E[C];
    "second_moment", Gramians that keep the variation of B and C; or "measured", the states on the data. With
    `two_sided=False` the projection is the symmetric one of `Baked`, and rates stay real; balancing may make rates and
    states complex. A policy gets every channel as if it were a layer.

    With means the reduced A is log(Wᵀ exp(E[Δ] A) T) / E[Δ], which is stable for all channels; Wᵀ A T is not.
    """

    needs = Basis.BY_CHANNEL
    by_channel: ClassVar[bool] = True

    surrogate: str = "second_moment"
    two_sided: bool = True

    def __post_init__(self) -> None:
        if self.surrogate not in _SURROGATES:
            raise CompressionError(
                f"PerChannel: surrogate is {self.surrogate!r}, expected {', '.join(map(repr, _SURROGATES))}"
            )
        require_truth(self, two_sided=self.two_sided)

    def measures(self, gramian: Gramian | None) -> bool:
        return self.surrogate == "measured"

    def _require_system(self, name: str, system: SelectiveSystem) -> None:
        if not self.two_sided and system.rates.is_complex():
            raise CompressionError(
                f"{name}: an earlier cut made the rates complex; {self} cannot cut those; expected two_sided=True"
            )

    def spectrum(self, layer: Calibrated) -> Float[Tensor, "channels n"]:
        if self.surrogate == "mean":
            return hankel_singular_values(_mean_system(layer))
        pair = GramianPair.of(*layer.gramians)
        return hankel_values(pair) * pair.sigma_scale * layer.sigma_scale[:, None]

    def reduce(self, layer: Calibrated, kept: Sequence[Int[Tensor, " _"]]) -> ChannelReduction:
        orders, gramians = [len(states) for states in kept], self._gramians(layer)
        parts: dict[tuple[int, ...], Modes] = {}
        for order in sorted(set(orders)):
            members = [channel for channel, own in enumerate(orders) if own == order]
            states = torch.stack([kept[member] for member in members]).to(layer.system.device)
            parts[tuple(members)] = self._modes(layer, gramians, members, states)
        return ChannelReduction.of(layer.system, parts)

    def _modes(
        self, layer: Calibrated, gramians: tuple[Tensor, Tensor], members: list[int], states: Int[Tensor, "members r"]
    ) -> Modes:
        rates, maps = layer.system.rates[members], layer.system.maps
        if states.shape[-1] == rates.shape[-1]:
            return _as_they_are(rates, None if maps is None else maps.orders[members])
        if self.surrogate == "mean" and self.two_sided:
            return _of_means(_mean_system(layer)[members], layer.observations.averages.mean("step")[members], states)
        P, Q = (gramian[members] for gramian in gramians)
        if not self.two_sided:
            found = galerkin_projection(rates, P, Q, states.shape[-1], states=states)
            return _single(found.rates, found.E_B, found.E_C)
        result = balance(GramianPair.of(P, Q), states)
        return diagonal_modes(result.left.mH @ (rates[..., :, None] * result.right), result.left, result.right)

    def _gramians(self, layer: Calibrated) -> tuple[Tensor, Tensor]:
        if self.surrogate != "mean":
            return layer.gramians
        B, C = (layer.observations.averages.mean(of) for of in ("B", "C"))
        return layer.gramians_of(B[:, None] * B, C[:, None] * C)


def _mean_system(layer: Calibrated) -> DiagonalSystem:
    """The paper's mean system of every channel."""
    layer.observations.require_data(len(layer.system.W_B))
    system, averages = layer.system, layer.observations.averages
    step, B, C = (averages.mean(of) for of in ("step", "B", "C"))
    input_scale, output_scale = system.scales
    B, C = B * input_scale, C * output_scale
    if system.maps is None:
        return mean_selective_system(system.rates, step, B.expand_as(system.rates), C.expand_as(system.rates))
    maps = system.maps
    inputs, outputs = maps.B @ B.to(maps.B.dtype), C.to(maps.C.dtype) @ maps.C
    return DiagonalSystem(
        torch.exp(step[:, None] * system.rates), (step[:, None] * inputs)[..., None], outputs[..., None, :]
    )


def _of_means(system: DiagonalSystem, step: Float[Tensor, " members"], states: Int[Tensor, "members r"]) -> Modes:
    """Modes of the balanced mean system, converted from poles at the mean step to rates."""
    result = balance(gramian_pair(system, None), states)
    modes = diagonal_modes(result.left.mH @ (system.poles[..., :, None] * result.right), result.left, result.right)
    values = modes.values if bool((modes.values.real > 0).all()) else modes.values.to(torch.complex128)
    there = torch.arange(values.shape[-1], device=values.device) < modes.count[:, None]
    rates = torch.log(torch.where(there, values, 0.5)) / step[:, None]
    return Modes(rates, modes.E_B, modes.E_C, modes.twice, modes.count)


def _as_they_are(rates: Tensor, count: Tensor | None) -> Modes:
    """The modes of channels that are not cut."""
    unit = torch.eye(rates.shape[-1], dtype=rates.dtype, device=rates.device).expand(len(rates), -1, -1)
    return _single(rates, unit, unit, count)


def _single(rates: Tensor, E_B: Tensor, E_C: Tensor, count: Tensor | None = None) -> Modes:
    """Modes without conjugate pairs; all of them are present unless `count` says how many."""
    count = torch.full((len(rates),), rates.shape[-1], device=rates.device) if count is None else count
    return Modes(rates, E_B, E_C, torch.zeros_like(rates, dtype=torch.bool), count)


def default_method(model: nn.Module) -> SelectiveMethod:
    """`PerChannel` if an earlier cut of the model gave channels their own states, else `Baked`."""
    adapted = ((module, adapter) for module, adapter in find(model).values() if isinstance(adapter, SelectiveAdapter))
    return PerChannel() if any(adapter.maps(module) is not None for module, adapter in adapted) else Baked()
