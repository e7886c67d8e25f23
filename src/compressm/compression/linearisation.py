"""An adapter's two functions to first order: what a small change of parameters is as one of the system, and back.

θ → s is `read`, s → θ is `encode`. Gradients go against the arrow, by vector-Jacobian products; updates go along it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compressm.adapters import SSMAdapter
from compressm.compression.basis import Triple
from compressm.compression.change import Values
from compressm.control import DiagonalSystem


@final
@dataclass(frozen=True)
class Jacobian:
    """Of `outputs`, which were computed from `inputs`, leaves of their graph; both keep it.

    Where only some inputs or outputs matter the others are left out by None, and with them the part of the graph that
    leads there: on a GPU a cut waits for launches, of which each pass has some ten to forty.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]

    def transposed(
        self,
        cotangents: Sequence[Tensor | None],
        *,
        wanted: Collection[int] | None = None,
        differentiable: bool = False,
    ) -> list[Tensor | None]:
        """Jᵀ c; None stands for zeros, on both sides, and for inputs whose numbers are not `wanted`."""
        places = range(len(self.inputs)) if wanted is None else sorted(wanted)
        found: list[Tensor | None] = [None] * len(self.inputs)
        pairs = [
            (output, cotangent)
            for output, cotangent in zip(self.outputs, cotangents, strict=True)
            if output.requires_grad and cotangent is not None
        ]
        if not pairs or not places:
            return found
        outputs, given = zip(*pairs, strict=True)
        inputs = [self.inputs[place] for place in places]
        parts = torch.autograd.grad(
            outputs, inputs, given, retain_graph=True, allow_unused=True, create_graph=differentiable
        )
        for place, part in zip(places, parts, strict=True):
            found[place] = part
        return found

    def times(self, tangents: Sequence[Tensor | None], *, wanted: Collection[int] | None = None) -> list[Tensor | None]:
        """J t, as the transpose of c → Jᵀ c: what that function leaves out (a detached value) this one does too.

        None stands for zeros, on both sides, and for outputs whose numbers are not `wanted`.
        """
        moving = [k for k, tangent in enumerate(tangents) if tangent is not None]
        places = range(len(self.outputs)) if wanted is None else sorted(wanted)
        moved: list[Tensor | None] = [None] * len(self.outputs)
        with torch.enable_grad():
            zeros = {place: torch.zeros_like(self.outputs[place], requires_grad=True) for place in places}
            cotangents = [zeros.get(place) for place in range(len(self.outputs))]
            gradients = self.transposed(cotangents, wanted=moving, differentiable=True)
            pairs = [
                (gradient, tangent)
                for gradient, tangent in zip(gradients, tangents, strict=True)
                if gradient is not None and tangent is not None and gradient.requires_grad
            ]
            if not pairs:
                return moved
            along, given = zip(*pairs, strict=True)
            parts = torch.autograd.grad(along, list(zeros.values()), given, allow_unused=True)
        for place, part in zip(places, parts, strict=True):
            moved[place] = None if part is None else part.detach()
        return moved

    def reached(self, output: int) -> set[int]:
        """The numbers of the inputs that an output was computed from."""
        places = {id(leaf): k for k, leaf in enumerate(self.inputs)}
        found, seen = set(), set()
        waiting = [self.outputs[output].grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)  # only nodes of leaves have one
            if id(leaf) in places:
                found.add(places[id(leaf)])
            waiting += [before for before, _ in node.next_functions]
        return found


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

    def gradient_part(self, kind: int, name: str, moment: Tensor) -> Tensor:
        """Of poles (0), B (1) or C (2) alone, from that of one parameter."""
        given = [moment if name == other else None for other in self.names]
        return _or_zeros(self.jacobian.transposed(given, wanted=[kind])[kind], self.jacobian.inputs[kind])

    def vector(self, direction: Triple) -> dict[str, Tensor]:
        """dθ from ds."""
        moved = self.jacobian.times([direction.poles, direction.B, direction.C])
        pairs = zip(self.names, moved, self.jacobian.outputs, strict=True)
        return {name: _or_zeros(move, like) for name, move, like in pairs}


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

    def gradient_parts(self, kind: int, part: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Of some parameters, from that of poles (0), B (1) or C (2) alone."""
        given = [part if kind == other else None for other in range(3)]
        places = {name: self.names.index(name) for name in names}
        found = self.jacobian.transposed(given, wanted=places.values())
        return {name: _or_zeros(found[place], self.jacobian.inputs[place]) for name, place in places.items()}

    def vector(self, direction: Values) -> Triple:
        """ds from dθ; names that are left out do not move."""
        moved = self.jacobian.times([direction.get(name) for name in self.names])
        return Triple(*(_or_zeros(part, like) for part, like in zip(moved, self.jacobian.outputs, strict=True)))

    def vector_parts(self, name: str, direction: Tensor, kinds: Sequence[int]) -> dict[int, Tensor]:
        """Of poles, B and C those of `kinds`, when one parameter moves."""
        given = [direction if name == other else None for other in self.names]
        moved = self.jacobian.times(given, wanted=kinds)
        return {kind: _or_zeros(moved[kind], self.jacobian.outputs[kind]) for kind in kinds}


class _Read(nn.Module):
    """`functional_call` swaps the parameters of a module while its forward runs: here, while it is read."""

    def __init__(self, module: nn.Module, adapter: SSMAdapter[Any]) -> None:
        super().__init__()
        self.module, self.adapter = module, adapter

    def forward(self) -> DiagonalSystem:
        return self.adapter.read(self.module)


def _or_zeros(part: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if part is None else part.detach()
