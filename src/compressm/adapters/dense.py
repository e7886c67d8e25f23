"""The base class of adapters that read full matrices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from compressm.adapters.base import Adapter, Basis, Module, with_values
from compressm.control import DenseSystem, DiagonalSystem


class DenseAdapter(Adapter[Module, DenseSystem]):
    """An adapter of layers whose channels have real systems with full matrices, and that store complex modes too.

    `read` gives a bank of systems of 2n states (Re h, Im h) with one input and one output for n modes h. `encode` takes
    a system of modes, of any order, or the dense system that was read. The order counts modes, pairs of poles.
    """

    SYSTEM = DenseSystem
    STORES = frozenset({Basis.ANY, Basis.SELECTED})
    RECURRENCE = "linear"

    @abstractmethod
    def modes(self, module: Module) -> DiagonalSystem:
        """The system of the modes, as it is if the resting parameters are 0; differentiable."""

    @abstractmethod
    def encode(self, module: Module, system: DenseSystem | DiagonalSystem) -> dict[str, Tensor]:
        """Parameter values in float64: a system of modes with resting parameters of 0, or the present dense system.

        Of a dense system near the present one those parts count that the parameters can change.
        """


def modes_with(adapter: DenseAdapter[Any], module: nn.Module, values: Mapping[str, Tensor] = {}) -> DiagonalSystem:
    """The modes that the module would have with these parameter values; differentiable."""
    system: DiagonalSystem = with_values(module, values, adapter.modes)
    return system
