"""Moments of an optimizer carried through a cut of a layer with full matrices, from its parameters to those of modes.

Gradients are pulled back along θ' → modes → matrices → θ and updates pushed forward along θ → matrices → modes → θ', as
in `linear.transport`; `encode` and `read` of the adapter give the outer maps, the projection gives the middle one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from jaxtyping import Complex
from torch import Tensor, nn

from compressm.adapters.base import encode_with, parameter_of, read_with
from compressm.adapters.dense import DenseAdapter, modes_with
from compressm.control import DenseSystem, DiagonalSystem
from compressm.control.validation import values_unread
from compressm.families.base import Change, Values, Writing
from compressm.families.linear.transport import Jacobian

# Means of squares are those of this many draws of signs; with 32 they are off by a fifth.
_DRAWS = 32


@final
@dataclass(frozen=True)
class Projection:
    """Modes h = left z of real states z, which are about Re(right h)."""

    left: Complex[Tensor, "*bank r n"]
    right: Complex[Tensor, "*bank n r"]

    def system(self, old: DenseSystem) -> DiagonalSystem:
        """The modes of a system near the one that was cut: of A only the diagonal counts, and C reads pairs."""
        A, B, C = self.parts(old.A, old.B, old.C)
        return DiagonalSystem(A, B, C)

    def parts(self, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Poles, B and C of the modes, from matrices, or from directions in which these move."""
        A, B, C = (part.to(self.left.dtype) for part in (A, B, C))
        # Columns of `right` have the weight of a pair, 2, so that Re(right h) is the state.
        weight = (self.left @ self.right).diagonal(dim1=-2, dim2=-1)
        weight = torch.where(weight.abs() > 0, weight, 1)
        poles = (self.left @ A * self.right.mT).sum(-1) / weight
        return poles, self.left @ B, C @ self.right


@final
@dataclass(frozen=True)
class DenseChange(Change):
    """A module before the cut, its matrices, the modes that replace them, and the parameter values of these."""

    module: nn.Module
    adapter: DenseAdapter[Any]
    old: DenseSystem
    new: DiagonalSystem
    projection: Projection
    writing: Writing

    @property
    def resized(self) -> Sequence[str]:
        return list(self.values)

    @cached_property
    def axes(self) -> dict[str, int]:
        """The axis of the states in every parameter."""
        return {name: growth.axis for name, growth in self.adapter.growth(self.module).items()}

    def first(self, name: str, moment: Tensor) -> Tensor:
        axis = self.axes[name]
        return moment.narrow(axis, 0, self.values[name].shape[axis]).clone()

    def gradient(self, moments: Values) -> dict[str, Tensor]:
        found = self.encoding.pullback(moments)
        return self.reading.pullback(self._lifted(found))

    def _lifted(self, found: Values) -> dict[str, Tensor]:
        """Pull back along z = Re(right h): a step of a mode's B is a step Re(right dB) of the matrix."""
        left, right = self.projection.left, self.projection.right
        A, B, C = (found[name].to(left.dtype) for name in ("A", "B", "C"))
        return {"poles": (right.mH @ A @ left.mH).diagonal(dim1=-2, dim2=-1), "B": right.mH @ B, "C": C @ left.mH}

    def update(self, moments: Values) -> dict[str, Tensor]:
        moved = self.old_reading.pushforward({name: moments[name] for name in moments if name in self._present})
        poles, B, C = self.projection.parts(*(moved[name] for name in ("A", "B", "C")))
        found = self.new_encoding.pushforward({"poles": poles, "B": B, "C": C})
        return {name: value.real if value.is_complex() else value for name, value in found.items()}

    def gradient_squares(self, squares: Values) -> dict[str, Tensor]:
        return self._squares(squares, self.gradient)

    def update_squares(self, squares: Values) -> dict[str, Tensor]:
        return self._squares(squares, self.update)

    def _squares(self, squares: Values, carry: Callable[[Values], dict[str, Tensor]]) -> dict[str, Tensor]:
        """E[(M x)²] for independent entries x, each kind of parameter from its own kind, by draws of signs."""
        results = {name: torch.zeros_like(self.values[name]) for name in squares}
        for kind in {self.kinds[name] for name in squares} - {""}:
            own = [name for name in squares if self.kinds[name] == kind]
            generator = torch.Generator().manual_seed(0)
            for _ in range(_DRAWS):
                drawn = {name: torch.zeros_like(value) for name, value in squares.items()}
                for name in own:
                    signs = torch.randint(0, 2, squares[name].shape, generator=generator, device="cpu") * 2 - 1
                    drawn[name] = signs.to(squares[name]) * torch.sqrt(squares[name])
                for name, value in carry(drawn).items():
                    if name in own:
                        results[name] += value * value / _DRAWS
        return results

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The first of poles, B and C that depends on each parameter; "" for those that rest."""
        reached = {part: self.reading.reached(part) for part in ("poles", "B", "C")}
        return {name: next((part for part, names in reached.items() if name in names), "") for name in self.values}

    @cached_property
    def _present(self) -> Values:
        return {name: parameter_of(self.module, name).detach().double() for name in self.values}

    @cached_property
    def encoding(self) -> Jacobian:
        """Matrices → θ at the old system."""
        with torch.enable_grad(), values_unread():
            parts = {"A": self.old.A, "B": self.old.B, "C": self.old.C}
            parts = {name: part.detach().clone().requires_grad_() for name, part in parts.items()}
            return Jacobian(parts, encode_with(self.adapter, self.module, {}, DenseSystem._unchecked(*parts.values())))

    @cached_property
    def old_reading(self) -> Jacobian:
        """θ → matrices at the present values."""
        with torch.enable_grad(), values_unread():
            leaves = {name: value.clone().requires_grad_() for name, value in self._present.items()}
            system = read_with(self.adapter, self.module, leaves)
            return Jacobian(leaves, {"A": system.A, "B": system.B, "C": system.C})

    @cached_property
    def reading(self) -> Jacobian:
        """θ' → modes at the new values."""
        with torch.enable_grad(), values_unread():
            leaves = {name: value.detach().double().clone().requires_grad_() for name, value in self.values.items()}
            system = modes_with(self.adapter, self.module, leaves)
            return Jacobian(leaves, {"poles": system.poles, "B": system.B, "C": system.C})

    @cached_property
    def new_encoding(self) -> Jacobian:
        """Modes → θ' at the new system."""
        with torch.enable_grad(), values_unread():
            parts = {"poles": self.new.poles, "B": self.new.B, "C": self.new.C}
            parts = {name: part.detach().clone().requires_grad_() for name, part in parts.items()}
            return Jacobian(parts, encode_with(self.adapter, self.module, {}, DiagonalSystem(*parts.values())))
