"""An adapter's two functions to first order: what a small change of parameters is as one of the system, and back.

θ → s is `read`, s → θ is `encode`. Gradients go against the arrow, by vector-Jacobian products; updates go along it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compressm.adapters import SSMAdapter
from compressm.compression.basis import Triple
from compressm.control import DiagonalSystem

Values = Mapping[str, Tensor]


@final
@dataclass(frozen=True)
class Jacobian:
    """Of `outputs`, which were computed from `inputs`; both keep their graph."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]

    def transposed(self, cotangents: Sequence[Tensor | None], *, differentiable: bool = False) -> list[Tensor | None]:
        """Jᵀ c; None stands for zeros, on both sides."""
        pairs = [
            (output, cotangent)
            for output, cotangent in zip(self.outputs, cotangents, strict=True)
            if output.requires_grad and cotangent is not None
        ]
        if not pairs:
            return [None] * len(self.inputs)
        outputs, given = zip(*pairs, strict=True)
        return list(
            torch.autograd.grad(
                outputs, self.inputs, given, retain_graph=True, allow_unused=True, create_graph=differentiable
            )
        )

    def times(self, tangents: Sequence[Tensor | None]) -> list[Tensor]:
        """J t, as the transpose of c → Jᵀ c: what that function leaves out (a detached value) this one does too."""
        with torch.enable_grad():
            cotangents = [torch.zeros_like(output, requires_grad=True) for output in self.outputs]
            gradients = self.transposed(cotangents, differentiable=True)
            pairs = [
                (gradient, tangent)
                for gradient, tangent in zip(gradients, tangents, strict=True)
                if gradient is not None and tangent is not None and gradient.requires_grad
            ]
            if not pairs:
                return [torch.zeros_like(output) for output in self.outputs]
            along, given = zip(*pairs, strict=True)
            moved = torch.autograd.grad(along, cotangents, given, allow_unused=True)
        zeros = (torch.zeros_like(output) for output in self.outputs)
        return [zero if move is None else move.detach() for move, zero in zip(moved, zeros, strict=True)]


@final
@dataclass(frozen=True)
class Encoding:
    """s → θ at a system."""

    names: Sequence[str]
    jacobian: Jacobian
    system: Triple

    @classmethod
    def at(cls, adapter: SSMAdapter[Any], module: nn.Module, system: DiagonalSystem) -> Encoding:
        start = Triple.of(system)
        with torch.enable_grad():
            parts = tuple(part.clone().requires_grad_() for part in (start.poles, start.B, start.C))
            values = adapter.encode(module, DiagonalSystem(*parts))
        return cls(tuple(values), Jacobian(parts, tuple(values.values())), start)

    def gradient(self, moments: Values) -> Triple:
        """∂/∂s from ∂/∂θ; names without a moment count as zeros."""
        found = self.jacobian.transposed([moments.get(name) for name in self.names])
        return Triple(*(_or_zeros(part, like) for part, like in zip(found, self.jacobian.inputs, strict=True)))

    def vector(self, direction: Triple) -> dict[str, Tensor]:
        """dθ from ds."""
        moved = self.jacobian.times([direction.poles, direction.B, direction.C])
        return dict(zip(self.names, moved, strict=True))


@final
@dataclass(frozen=True)
class Reading:
    """θ → s at values of the parameters, which may be of another order than the module's own."""

    names: Sequence[str]
    jacobian: Jacobian
    system: DiagonalSystem

    @classmethod
    def at(cls, adapter: SSMAdapter[Any], module: nn.Module, values: Values) -> Reading:
        with torch.enable_grad():
            leaves = {name: value.detach().double().clone().requires_grad_() for name, value in values.items()}
            swapped = {f"module.{name}": leaf for name, leaf in leaves.items()}
            system: DiagonalSystem = functional_call(_Read(module, adapter), swapped, ())
            parts = tuple(part.to(torch.complex128) for part in (system.poles, system.B, system.C))
        return cls(tuple(leaves), Jacobian(tuple(leaves.values()), parts), system.detach())

    def gradient(self, triple: Triple) -> dict[str, Tensor]:
        """∂/∂θ from ∂/∂s."""
        found = self.jacobian.transposed((triple.poles, triple.B, triple.C))
        pairs = zip(self.names, found, self.jacobian.inputs, strict=True)
        return {name: _or_zeros(part, like) for name, part, like in pairs}

    def vector(self, direction: Values) -> Triple:
        """ds from dθ; names that are left out do not move."""
        return Triple(*self.jacobian.times([direction.get(name) for name in self.names]))


class _Read(nn.Module):
    """`functional_call` swaps the parameters of a module while its forward runs: here, while it is read."""

    def __init__(self, module: nn.Module, adapter: SSMAdapter[Any]) -> None:
        super().__init__()
        self.module, self.adapter = module, adapter

    def forward(self) -> DiagonalSystem:
        return self.adapter.read(self.module)


def _or_zeros(part: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if part is None else part.detach()
