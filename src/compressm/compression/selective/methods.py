"""How selective layers are cut: small frozen choices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compressm.adapters import SelectiveAdapter
from compressm.compression.gramian import Gramian, Measured
from compressm.compression.selective.calibrated import Calibrated
from compressm.compression.selective.reduction import Reduction, SharedReduction
from compressm.compression.selective.refitting import refitted_readout
from compressm.control import shared_projection
from compressm.control.balancing import GramianPair, hankel_values
from compressm.control.projection import shared_gramians
from compressm.errors import CompressionError


class SelectiveMethod(ABC):
    """From averages over data to values that say how much states matter, and from the states to keep to a reduction."""

    # Whether every channel has an order of its own.
    by_channel: ClassVar[bool] = False

    def measures(self, gramian: Gramian | None) -> bool:
        """Whether the covariance of the states is needed."""
        return isinstance(gramian, Measured)

    @abstractmethod
    def require(self, name: str, module: nn.Module, adapter: SelectiveAdapter[Any]) -> None:
        """Refuse by name a layer that cannot be cut this way."""

    @abstractmethod
    def spectrum(self, layer: Calibrated) -> Float[Tensor, "*channels n"]:
        """Falling values, one a state."""

    @abstractmethod
    def reduce(self, layer: Calibrated, kept: Sequence[Int[Tensor, " _"]]) -> Reduction:
        """Onto the states at these places of the spectrum: one list for all channels, or one for each."""


@final
@dataclass(frozen=True)
class Baked(SelectiveMethod):
    """One projection for all channels of a layer, multiplied into its own parameters: nothing is left at run time.

    E_B and E_C come from the Gramians of the channels, averaged at equal trace; x_proj gives E_B B and C E_C, and
    channel i has the rates diag(E_B Aⁱ E_C). The projection is symmetric, so that all rates stay real and negative, for
    any data. `two_sided` balances instead, which is a little more accurate, and refuses where rates turn complex.
    Spectra are the Hankel values of the averaged pair: shares of a whole, not sizes.

    `refit` fits the rows of C again: C ← C F with F = E[h h'ᵀ] E[h' h'ᵀ]⁻¹ over all channels and a sample of the data,
    h' the new states. It makes errors smaller and has to simulate the layer twice.
    """

    two_sided: bool = False
    refit: bool = False

    def __post_init__(self) -> None:
        require_truth(self, two_sided=self.two_sided, refit=self.refit)

    def require(self, name: str, module: nn.Module, adapter: SelectiveAdapter[Any]) -> None:
        _require_shared_states(self, name, module, adapter)

    def spectrum(self, layer: Calibrated) -> Float[Tensor, " n"]:
        P, Q = shared_gramians(layer.system.rates, *layer.gramians)
        return hankel_values(GramianPair.of(P[None], Q[None]))[0]

    def reduce(self, layer: Calibrated, kept: Sequence[Int[Tensor, " _"]]) -> SharedReduction:
        (states,) = kept
        projection = shared_projection(
            layer.system.rates, *layer.gramians, len(states), states=states, two_sided=self.two_sided
        )
        reduction = SharedReduction.of(projection)
        if not self.refit:
            return reduction
        new = reduction.applied(layer.system)
        return reduction.refitted(refitted_readout(layer.system, new, layer.seen.sample, reduction.E_C))


@final
@dataclass(frozen=True)
class SharedIndex(SelectiveMethod):
    """States themselves are kept or dropped, the same in all channels, by s_j = Σ_channels √(P_jj Q_jj).

    The yardstick: rates stay as they are, rows of x_proj and columns of A_log are left out. With `refit` the rows of C
    that stay take over what they can of the others: C ← C F with F = P_k P_kk⁻¹, P the sum of the channels' Gramians,
    k the states kept and P_k their columns. Of all F it makes Σ E[(C h − C F h_k)²] smallest, C and h taken to be
    independent: then E[C Cᵀ] cancels in the normal equations E[C Cᵀ] F P_kk = E[C Cᵀ] P_k.
    """

    refit: bool = False

    def __post_init__(self) -> None:
        require_truth(self, refit=self.refit)

    def require(self, name: str, module: nn.Module, adapter: SelectiveAdapter[Any]) -> None:
        _require_shared_states(self, name, module, adapter)

    def spectrum(self, layer: Calibrated) -> Float[Tensor, " n"]:
        return _scores(layer).sort(descending=True).values

    def reduce(self, layer: Calibrated, kept: Sequence[Int[Tensor, " _"]]) -> SharedReduction:
        (places,) = kept
        ranking = _scores(layer).argsort(descending=True, stable=True)
        states = ranking[places.to(ranking.device)].sort().values
        slices = torch.eye(layer.system.order, dtype=torch.float64, device=ranking.device)[states]
        reduction = SharedReduction(slices, slices.mT, slices)
        if not self.refit:
            return reduction
        P = layer.gramians[0].sum(0)
        # P_kk is singular where states go together.
        inverse = torch.linalg.pinv(P[states][:, states], hermitian=True, rtol=1e-10)
        return reduction.refitted(P[:, states] @ inverse)


def _require_shared_states(
    method: SelectiveMethod, name: str, module: nn.Module, adapter: SelectiveAdapter[Any]
) -> None:
    if adapter.keeps_maps and adapter.read(module).maps is not None:
        raise CompressionError(
            f"{name}: channels have states of their own since an earlier cut, of which {method} can make nothing;"
            " expected selective=PerChannel(...)"
        )


def _scores(layer: Calibrated) -> Float[Tensor, " n"]:
    P, Q = layer.gramians
    squares = P.diagonal(dim1=-2, dim2=-1) * Q.diagonal(dim1=-2, dim2=-1)
    return torch.sqrt(squares.clamp_min(0)).sum(0)


def require_truth(method: object, **given: object) -> None:
    """Refuse by name what is neither True nor False."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise CompressionError(f"{type(method).__name__}: {name} is {value!r}, expected True or False")
