"""Adapters that read full matrices: their base class, and the promises that they keep, those of linear adapters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressm.adapters import promises
from compressm.adapters.base import Adapter, Basis, Module, encode_with, parameter_of, read_with, with_values
from compressm.adapters.promises import Finding, Trial, difference, simulated
from compressm.adapters.writing import write
from compressm.control import DenseSystem, DiagonalSystem
from compressm.control.folding import PairTruncation, pair_truncation


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


@dataclass(frozen=True)
class DenseTrial(Trial):
    """A module with full matrices under test."""

    def order(self, module: nn.Module) -> int:
        return int(self.adapter.order(module))

    def cut(self, module: nn.Module, order: int, *, folded: bool = True) -> Any:
        truncation: PairTruncation = pair_truncation(self.read(module), order)
        write(module, self.adapter.encode(module, truncation.system))
        return truncation


def encoding(trial: DenseTrial) -> Iterator[Finding]:
    """encode(read) gives the same values and output; a cut module computes its modes; encode changes no module."""
    module, twin = trial.module(), trial.module()
    u = trial.noise(module)
    system, before = trial.read(module), trial.output(module, u)
    values = trial.adapter.encode(module, system)
    wrong = [name for name, value in values.items() if value.dtype != torch.float64]
    yield Finding.none_of(wrong, "encode gives float64")
    yield Finding.none_of(promises.changed(module, twin), "encode leaves the module alone")
    moved = max(difference(parameter_of(module, name).detach(), value.detach()) for name, value in values.items())
    yield Finding("encode(read) gives the values back", moved, trial.tolerance)
    write(module, values)
    yield Finding("encode(read) keeps the output", difference(before, trial.output(module, u)), trial.tolerance)
    skip = trial.output(module, u) - simulated(system, u)
    modes = trial.cut(module, trial.half(module)).system
    expected, found = simulated(modes, u) + skip, trial.output(module, u)
    yield Finding("the module computes the modes", difference(expected, found), trial.tolerance)
    again = modes_with(trial.adapter, module).detach()
    expected = simulated(again, u) + skip
    yield Finding("the modes that are read are those of the module", difference(expected, found), trial.tolerance)
    resting = [name for name in trial.adapter.RESTING if bool(parameter_of(module, name).any())]
    yield Finding.none_of(resting, "resting parameters are 0 after a cut")


def derivatives(trial: DenseTrial) -> Iterator[Finding]:
    """The derivatives of read, modes and encode equal finite differences."""
    module = trial.module(torch.float64)
    names, tensors = zip(*((name, p.detach().clone()) for name, p in module.named_parameters()), strict=True)

    def read(*values: Tensor) -> Tensor:
        system = read_with(trial.adapter, module, dict(zip(names, values, strict=True)))
        return promises.in_one(system.A, system.B, system.C)

    def modes(*values: Tensor) -> Tensor:
        system = modes_with(trial.adapter, module, dict(zip(names, values, strict=True)))
        return promises.in_one(system.poles, system.B, system.C)

    yield promises.gradients("read", read, tensors)
    yield promises.gradients("modes", modes, tensors)
    system = pair_truncation(trial.read(module), trial.half(module)).system

    def encode(moves: Tensor, B: Tensor, C: Tensor) -> Tensor:
        near = DiagonalSystem(system.poles + system.decay * moves, B, C)
        return promises.in_one(*encode_with(trial.adapter, module, {}, near).values())

    yield promises.gradients("encode of modes", encode, (torch.zeros_like(system.poles), system.B, system.C))


DENSE_PROMISES: tuple[Callable[[DenseTrial], Iterator[Finding]], ...] = (
    promises.reading,
    encoding,
    promises.zero_states,
    promises.bound,
    promises.parameters,
    promises.training,
    promises.saving,
    promises.streaming,
    derivatives,
)
