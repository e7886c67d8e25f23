"""What an optimizer has learned about the parameters of a module, carried through a cut of that module.

Gradients go θ → s by the transpose of `encode`, through the change of basis, and s' → θ' by the transpose of `read`;
updates go the other way round. Squares go by the squared entries of the same maps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from compressm.adapters import SSMAdapter, state_axes
from compressm.adapters.base import parameter_of
from compressm.compression.basis import BasisChange, Triple
from compressm.compression.change import Change, Values, Writing
from compressm.compression.linearisation import Encoding, Reading
from compressm.compression.spread import Spread
from compressm.control import DiagonalSystem

_POLES, _B, _C = range(3)


@final
@dataclass(frozen=True)
class ModuleChange(Change):
    """A module as it still is, the system it will be, and the parameter values that make it that."""

    module: nn.Module
    adapter: SSMAdapter[Any]
    old: DiagonalSystem
    new: DiagonalSystem
    basis: BasisChange
    writing: Writing

    @classmethod
    def to(
        cls,
        module: nn.Module,
        adapter: SSMAdapter[Any],
        old: DiagonalSystem,
        new: DiagonalSystem,
        basis: BasisChange,
    ) -> ModuleChange:
        """With the values that the adapter gives the new system."""
        with torch.no_grad():
            values = adapter.encode(module, new)
        return cls(module, adapter, old, new, basis, Writing(values))

    @property
    def resized(self) -> Sequence[str]:
        return [name for name in self.values if name in self.axes]

    def first(self, name: str, moment: Tensor) -> Tensor:
        axis = self.axes[name]
        return moment.narrow(axis, 0, self.values[name].shape[axis]).clone()

    def gradient(self, moments: Values) -> dict[str, Tensor]:
        return carry_gradient(self, moments)

    def gradient_squares(self, squares: Values) -> dict[str, Tensor]:
        return carry_gradient_squares(self, squares)

    def update(self, moments: Values) -> dict[str, Tensor]:
        return carry_update(self, moments)

    def update_squares(self, squares: Values) -> dict[str, Tensor]:
        return carry_update_squares(self, squares)

    @cached_property
    def axes(self) -> dict[str, int]:
        """The axis of the states, of every parameter that has one."""
        if self.new.order == self.old.order:  # no axis changes, and the adapter has to be asked
            return state_axes(self.module, self.adapter)
        shapes = {name: (parameter_of(self.module, name).shape, value.shape) for name, value in self.values.items()}
        changed = {name: [a != b for a, b in zip(*pair, strict=True)] for name, pair in shapes.items()}
        return {name: axes.index(True) for name, axes in changed.items() if any(axes)}

    @cached_property
    def encoding(self) -> Encoding:
        """At the old system, where it gives the values that are there."""
        return Encoding.at(self.adapter, self.module, self.old)

    @cached_property
    def reading(self) -> Reading:
        """At the new values."""
        return Reading.at(self.adapter, self.module, self.values)

    @cached_property
    def old_reading(self) -> Reading:
        """At the values that are there."""
        return Reading.at(self.adapter, self.module, {name: parameter_of(self.module, name) for name in self.values})

    @cached_property
    def new_encoding(self) -> Encoding:
        """At the new system, as the module stores it."""
        return Encoding.at(self.adapter, self.module, self.reading.system)

    @cached_property
    def stored_basis(self) -> BasisChange:
        """From the old system to the new one as the module stores it."""
        return self.basis.onto(self.new, self.reading.system)

    @cached_property
    def kinds(self) -> dict[str, list[int]]:
        """Which of poles, B and C each parameter has a part in."""
        reached = [self.reading.jacobian.reached(kind) for kind in range(3)]
        names = {name: k for k, name in enumerate(self.reading.names)}
        return {name: [kind for kind in range(3) if names[name] in reached[kind]] for name in self.values}

    @cached_property
    def redundant(self) -> set[str]:
        """Parameters that a system leaves open, as the LRU's γ, whose work B could do."""
        return {name for name in self.encoding.names if self.leaves_open(name)}

    def leaves_open(self, name: str) -> bool:
        """Whether no change of the system asks this parameter to change."""
        (one,) = (torch.ones_like(v) for n, v in zip(*self._encoded(), strict=True) if n == name)
        gradient = self.encoding.gradient({name: one})
        return not any(bool(part.any()) for part in (gradient.poles, gradient.B, gradient.C))

    def _encoded(self) -> tuple[Sequence[str], Sequence[Tensor]]:
        return self.encoding.names, self.encoding.jacobian.outputs


def carry_gradient(change: ModuleChange, moments: Values) -> dict[str, Tensor]:
    """The first moments of gradients with respect to the new parameters; a name left out counts as zeros."""
    return change.reading.gradient(change.stored_basis.gradient(change.encoding.gradient(moments)))


def carry_update(change: ModuleChange, moments: Values) -> dict[str, Tensor]:
    """Steps in the new parameters from steps in the old ones."""
    return change.new_encoding.vector(change.stored_basis.vector(change.old_reading.vector(moments)))


def carry_gradient_squares(change: ModuleChange, squares: Values) -> dict[str, Tensor]:
    """E[g²] of the new parameters, if no two old ones vary together.

    A parameter speaks for the first of poles, B and C that it has a part in, and hears from that one: what S5's poles
    do to B as well cancels in sums, and would count twice in sums of squares. What a system leaves open (γ) hears from
    all that it has a part in.
    """
    spreads = _through(change.stored_basis.dual(), [_spread(change, kind, squares, _pulled) for kind in range(3)])
    results = {name: torch.zeros_like(change.values[name]) for name in squares}
    heard = {name: _heard(change, name) for name in squares}
    by_mode = [name for name in squares if change.values[name].shape == change.new.poles.shape]
    for name in by_mode:
        kinds = [kind for kind in heard[name] if spreads[kind] is not None]
        moved = change.reading.vector_parts(name, torch.ones_like(results[name]), kinds)
        for kind, part in moved.items():
            spread = spreads[kind]
            assert spread is not None
            results[name] += spread.along(_with_modes_first(kind, part)).sum(-1)
    for kind, spread in enumerate(spreads):
        names = [name for name in squares if kind in heard[name] and name not in by_mode]
        for factor in spread.factors() if spread is not None and names else ():
            found = change.reading.gradient_parts(kind, _from_mode(kind, factor), names)
            for name, gradient in found.items():
                results[name] += gradient * gradient
    return results


def _heard(change: ModuleChange, name: str) -> list[int]:
    """From which of poles, B and C a parameter hears."""
    kinds = change.kinds[name]
    return kinds if len(kinds) > 1 and change.leaves_open(name) else kinds[:1]


def carry_update_squares(change: ModuleChange, squares: Values) -> dict[str, Tensor]:
    """The same for the squares of updates; what a system leaves open gets the mean of what it had."""
    spreads = _through(change.stored_basis, [_spread(change, kind, squares, _pushed) for kind in range(3)])
    results = {name: torch.zeros_like(change.values[name]) for name in squares}
    for kind, spread in enumerate(spreads):
        if spread is None:
            continue
        for factor in spread.factors():
            moved = change.new_encoding.vector(_only(kind, factor, change.reading.system))
            for name in squares:
                results[name] += moved[name] * moved[name] if change.kinds[name][:1] == [kind] else 0
    for name in change.redundant & squares.keys():
        results[name] = torch.full_like(results[name], float(squares[name].mean()))
    return results


Source = Callable[[ModuleChange, int, str, Tensor], Tensor]


def _spread(change: ModuleChange, kind: int, squares: Values, source: Source) -> Spread | None:
    """Of poles, B or C of the old system, from the parameters that speak for it."""
    speaking = [name for name in squares if change.kinds[name][:1] == [kind]]
    sources = []
    for name in speaking:
        root = torch.sqrt(squares[name])
        part = source(change, kind, name, root)
        # Where one tensor holds real and imaginary parts, on an axis more, each is a source of its own: once with equal
        # and once with opposite signs their product is zero on the average.
        if root.ndim > (change.old.poles, change.old.B, change.old.C)[kind].ndim:
            sources += [part / 2**0.5, source(change, kind, name, root * _checkerboard(root)) / 2**0.5]
        else:
            sources.append(part)
    return Spread.of(sources) if sources else None


def _pulled(change: ModuleChange, kind: int, name: str, root: Tensor) -> Tensor:
    return _with_modes_first(kind, change.encoding.gradient_part(kind, name, root))


def _pushed(change: ModuleChange, kind: int, name: str, root: Tensor) -> Tensor:
    return _with_modes_first(kind, change.old_reading.vector_parts(name, root, [kind])[kind])


def _through(basis: BasisChange, spreads: Sequence[Spread | None]) -> list[Spread | None]:
    maps = (basis.mixing(), basis.left.mH, basis.right.mT)
    return [
        None if spread is None else spread.conjugated(basis.old_conjugated).through(z).conjugated(basis.new_conjugated)
        for z, spread in zip(maps, spreads, strict=True)
    ]


def _only(kind: int, factor: Tensor, system: DiagonalSystem) -> Triple:
    parts = [torch.zeros_like(part) for part in (system.poles, system.B, system.C)]
    parts[kind] = _from_mode(kind, factor)
    return Triple(*(part.to(torch.complex128) for part in parts))


def _with_modes_first(kind: int, part: Tensor) -> Tensor:
    """Poles, B or C with the modes on the last axis but one."""
    return part[..., None] if kind == _POLES else part if kind == _B else part.mT


def _from_mode(kind: int, entries: Tensor) -> Tensor:
    return entries[..., 0] if kind == _POLES else entries if kind == _B else entries.mT


def _checkerboard(like: Tensor) -> Tensor:
    index = torch.zeros_like(like)
    for axis, size in enumerate(like.shape):
        steps = torch.arange(size, device=like.device, dtype=like.dtype)
        index = index + steps.reshape([-1 if other == axis else 1 for other in range(like.ndim)])
    return 1 - 2 * (index % 2)
