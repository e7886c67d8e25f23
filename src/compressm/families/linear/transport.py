"""Moments of an optimizer carried through a cut of a linear layer, from parameters θ to new parameters θ'.

With s the old system and s' the new one, gradients are pulled back along θ' → s' → s → θ and updates are pushed forward
along θ → s → s' → θ'. The maps between θ and s are an adapter's `read` and `encode`, whose Jacobians autograd gives.

An optimizer keeps E[g²] of every real parameter and no covariance of two parameters. For x' = Σᵢ zᵢ xᵢ with independent
xᵢ the squares are E[(Re x')²] = Σ (Re zᵢ)² E[(Re xᵢ)²] + (Im zᵢ)² E[(Im xᵢ)²] − 2 Re zᵢ Im zᵢ E[Re xᵢ Im xᵢ].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor, nn
from torch.nn.functional import pad

from compressm.adapters import SSMAdapter, state_axes
from compressm.adapters.base import encode_with, parameter_of, read_with, stacked_parameters, stacking_key
from compressm.control import DiagonalSystem
from compressm.control.validation import values_unread
from compressm.families.base import Change, Values, Writing
from compressm.families.linear.reduction import BasisChange, Triple

# Carries some tensors by name to those of its results that are named.
Carry: TypeAlias = Callable[[Values, Collection[str] | None], dict[str, Tensor]]


@final
@dataclass(frozen=True)
class Spread:
    """E[(Re x)²], E[(Im x)²] and E[Re x Im x] of entries x; modes are on the last axis but one."""

    re: Float[Tensor, "*bank n h"]
    im: Float[Tensor, "*bank n h"]
    mixed: Float[Tensor, "*bank n h"]

    @classmethod
    def of(cls, sources: Iterable[Complex[Tensor, "*bank n h"]]) -> Spread:
        """The spread of x = Σ ±source, whose signs are independent of each other in every entry."""
        parts = [(source.real, source.imag) for source in sources]
        sums = ([a * a for a, _ in parts], [b * b for _, b in parts], [a * b for a, b in parts])
        return cls(*(torch.stack(terms).sum(0) for terms in sums))

    def conjugated(self, modes: Bool[Tensor, "*bank n"]) -> Spread:
        """The spread after the entries of these modes are conjugated."""
        return Spread(self.re, self.im, torch.where(modes[..., None], -self.mixed, self.mixed))

    def through(self, z: Complex[Tensor, "*bank r n"]) -> Spread:
        """The spread of z x."""
        a, b = z.real, z.imag
        stacked = torch.cat([self.re, self.im, self.mixed], dim=-2)
        rows = (
            torch.cat([a * a, b * b, -2 * a * b], dim=-1),
            torch.cat([b * b, a * a, 2 * a * b], dim=-1),
            torch.cat([a * b, -a * b, a * a - b * b], dim=-1),
        )
        re, im, mixed = (row @ stacked for row in rows)
        # The sums are not negative, but rounding may make them so.
        return Spread(re.clamp_min(0), im.clamp_min(0), mixed)

    def along(self, direction: Complex[Tensor, "*bank n h"]) -> Float[Tensor, "*bank n h"]:
        """E[(Re d̄ x)²]."""
        a, b = direction.real, direction.imag
        return (a * a * self.re + b * b * self.im + 2 * a * b * self.mixed).clamp_min(0)

    def factors(self) -> tuple[Complex[Tensor, "*bank n h"], Complex[Tensor, "*bank n h"]]:
        """Two sources with this spread."""
        first = torch.sqrt(self.re)
        usable = first > 0
        beside = torch.where(usable, self.mixed / torch.where(usable, first, 1), 0)
        rest = torch.sqrt((self.im - beside * beside).clamp_min(0))
        return torch.complex(first, beside), torch.complex(torch.zeros_like(rest), rest)


@final
@dataclass(frozen=True)
class Jacobian:
    """The Jacobian of `outputs`, which were computed from `inputs`, the leaves of their graph; both have names.

    Inputs and outputs that do not matter are left out, and with them their part of the graph: on a GPU a cut waits for
    kernel launches, and each pass has ten to forty.
    """

    inputs: Values
    outputs: Values

    def pullback(self, cotangents: Values, wanted: Collection[str] | None = None) -> dict[str, Tensor]:
        """Jᵀ c for the `wanted` inputs, by default for all; an output without a cotangent counts as zeros."""
        found = self._transposed(cotangents, wanted)
        return {
            name: _or_zeros(found.get(name), self.inputs[name]) for name in (self.inputs if wanted is None else wanted)
        }

    def pushforward(self, tangents: Values, wanted: Collection[str] | None = None) -> dict[str, Tensor]:
        """J t for the `wanted` outputs, by default for all; an input without a tangent counts as zeros.

        It is the transpose of c → Jᵀ c, so both ignore the same detached values.
        """
        outputs = {name: output for name, output in self.outputs.items() if wanted is None or name in wanted}
        parts: Sequence[Tensor | None] = [None] * len(outputs)
        with torch.enable_grad():
            zeros = {name: torch.zeros_like(output, requires_grad=True) for name, output in outputs.items()}
            gradients = self._transposed(zeros, tangents.keys(), differentiable=True)
            pairs = [(gradient, tangents[name]) for name, gradient in gradients.items() if gradient.requires_grad]
            if pairs:
                along, given = zip(*pairs, strict=True)
                parts = torch.autograd.grad(along, list(zeros.values()), given, allow_unused=True)
        return {name: _or_zeros(part, outputs[name]) for name, part in zip(outputs, parts, strict=True)}

    def _transposed(
        self, cotangents: Values, wanted: Collection[str] | None, *, differentiable: bool = False
    ) -> dict[str, Tensor]:
        """Jᵀ c without the inputs for which it is zero."""
        inputs = {name: leaf for name, leaf in self.inputs.items() if wanted is None or name in wanted}
        moving = [name for name, output in self.outputs.items() if output.requires_grad]
        given = {name: cotangents[name] for name in moving if name in cotangents}
        if not given or not inputs:
            return {}
        parts = torch.autograd.grad(
            [self.outputs[name] for name in given],
            list(inputs.values()),
            list(given.values()),
            retain_graph=True,
            allow_unused=True,
            create_graph=differentiable,
        )
        return {name: part for name, part in zip(inputs, parts, strict=True) if part is not None}

    def reached(self, output: str) -> set[str]:
        """The names of the inputs that an output was computed from."""
        names = {id(leaf): name for name, leaf in self.inputs.items()}
        found, seen = set(), set()
        waiting = [self.outputs[output].grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)  # only nodes of leaves have one
            if id(leaf) in names:
                found.add(names[id(leaf)])
            waiting += [before for before, _ in node.next_functions]
        return found


def _or_zeros(part: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if part is None else part.detach()


@final
@dataclass(frozen=True)
class ModuleChange(Change):
    """A module before the cut, its old and new system, and the parameter values of the new one.

    Several modules whose cuts have the same shapes can be stacked: `present` then holds all their parameters, and
    these, the systems and the new values have one more axis, the first.
    """

    module: nn.Module
    adapter: SSMAdapter[Any]
    old: DiagonalSystem
    new: DiagonalSystem
    basis: BasisChange
    writing: Writing
    present: Values | None = None

    @property
    def stacking_key(self) -> Hashable | None:
        # An order that stays leaves no trace in the shapes.
        return None if self.new.order == self.old.order else stacking_key(self.module, self.adapter)

    @classmethod
    def together(cls, changes: Sequence[ModuleChange]) -> ModuleChange:
        order = max(change.new.order for change in changes)
        filled = [change._filled(order) for change in changes]
        first, present = filled[0], stacked_parameters([change.module for change in filled])
        values = {name: torch.stack([change.values[name] for change in filled]) for name in first.values}
        old, new = (DiagonalSystem.stack([getattr(change, which) for change in filled]) for which in ("old", "new"))
        basis = BasisChange.stack([change.basis for change in filled])
        return cls(first.module, first.adapter, old, new, basis, replace(first.writing, values=values), present)

    def _filled(self, order: int) -> ModuleChange:
        """The same change to a higher order: its last mode is repeated, and the copies take nothing from old modes.

        No mode depends on others, so the first ones are carried as without the copies.
        """
        if (more := order - self.new.order) == 0:
            return self
        poles, B, C = (_repeated(getattr(self.new, part), axis, more) for part, axis in _STATE_AXES.items())
        values = dict(self.values)
        for name in self.resized:
            values[name] = _repeated(values[name], self.axes[name], more)
        right, left = (pad(columns, (0, more)) for columns in (self.basis.right, self.basis.left))
        conjugated = _repeated(self.basis.new_conjugated, -1, more)
        basis = BasisChange(right, left, self.basis.old_conjugated, conjugated)
        new = DiagonalSystem._unchecked(poles, None, B, C)
        return replace(self, new=new, basis=basis, writing=replace(self.writing, values=values))

    @property
    def resized(self) -> Sequence[str]:
        return [name for name in self.values if name in self.axes]

    def first(self, name: str, moment: Tensor) -> Tensor:
        axis = self.axes[name]
        return moment.narrow(axis, 0, self.values[name].shape[axis]).clone()

    def gradient(self, moments: Values) -> dict[str, Tensor]:
        old = Triple(**self.encoding.pullback(moments))
        return self.reading.pullback(vars(self.stored_basis.gradient(old)))

    def update(self, moments: Values) -> dict[str, Tensor]:
        old = Triple(**self.old_reading.pushforward(moments))
        return self.new_encoding.pushforward(vars(self.stored_basis.vector(old)))

    def gradient_squares(self, squares: Values) -> dict[str, Tensor]:
        """E[g²] of the new parameters, if no two old ones vary together.

        A parameter gives to and takes from the first of poles, B and C that depends on it: the effect of S5's poles on
        B cancels in sums, and sums of squares would count it twice. A redundant parameter (γ) takes from all of them;
        if one of them has no squares, it gets the mean of its old ones.
        """
        spreads = self._spreads(squares, self.encoding.pullback, self.stored_basis.dual())
        results = {name: torch.zeros_like(self.values[name]) for name in squares}
        sources = {name: self._sources_of(name) for name in squares}
        by_mode = [name for name in squares if self.values[name].shape == self.new.poles.shape]
        for name in by_mode:
            wanted = [part for part in sources[name] if part in spreads]
            moved = self.reading.pushforward({name: torch.ones_like(results[name])}, wanted)
            for part, direction in moved.items():
                results[name] += spreads[part].along(_modes_first(part, direction)).sum(-1)
        for part, spread in spreads.items():
            names = [name for name in squares if part in sources[name] and name not in by_mode]
            for factor in spread.factors() if names else ():
                for name, gradient in self.reading.pullback({part: _from_modes_first(part, factor)}, names).items():
                    results[name] += gradient * gradient
        if any(name not in squares for name in self.resized):  # frozen, or of an optimizer without squares
            given = {self.parts[name][0] for name in squares if self.parts[name] and name not in self.redundant}
            for name in self.redundant & squares.keys():
                if not given.issuperset(sources[name]):
                    results[name] = self._means(squares[name], results[name])
        return results

    def _sources_of(self, name: str) -> list[str]:
        parts = self.parts[name]
        return parts if len(parts) > 1 and self._is_redundant(name) else parts[:1]

    def update_squares(self, squares: Values) -> dict[str, Tensor]:
        """Squared steps in the new parameters; a redundant parameter gets the mean of its old squares."""
        spreads = self._spreads(squares, self.old_reading.pushforward, self.stored_basis)
        results = {name: torch.zeros_like(self.values[name]) for name in squares}
        for part, spread in spreads.items():
            for factor in spread.factors():
                moved = self.new_encoding.pushforward({part: _from_modes_first(part, factor)})
                for name in squares:
                    results[name] += moved[name] * moved[name] if self.parts[name][:1] == [part] else 0
        for name in self.redundant & squares.keys():
            results[name] = self._means(squares[name], results[name])
        return results

    def _means(self, squares: Tensor, like: Tensor) -> Tensor:
        """The mean of the squares of every module, in the shape of `like`."""
        means = squares.flatten(self._leading).mean(-1)
        return means.reshape(*means.shape, *[1] * (like.ndim - self._leading)).expand_as(like).clone()

    def _spreads(self, squares: Values, carry: Carry, basis: BasisChange) -> dict[str, Spread]:
        """The spreads of poles, B and C of the new system; a part without a parameter is left out."""
        maps = {"poles": basis.mixing(), "B": basis.left.mH, "C": basis.right.mT}
        found = {part: self._roots(part, squares, carry) for part in maps}
        old = {part: Spread.of(sources).conjugated(basis.old_conjugated) for part, sources in found.items() if sources}
        return {part: spread.through(maps[part]).conjugated(basis.new_conjugated) for part, spread in old.items()}

    def _roots(self, part: str, squares: Values, carry: Carry) -> list[Tensor]:
        """Independent sources of poles, B or C of the old system, from the roots of its parameters' squares."""
        sources = []
        for name in squares:
            if self.parts[name][:1] != [part]:
                continue
            root = torch.sqrt(squares[name])
            carried = _modes_first(part, carry({name: root}, [part])[part])
            # A tensor with one more axis holds real and imaginary parts, and each is a source: with equal signs once
            # and with opposite signs once, their product is zero on average.
            if root.ndim > getattr(self.old, part).ndim:
                turned = _modes_first(part, carry({name: root * _checkerboard(root)}, [part])[part])
                sources += [carried / 2**0.5, turned / 2**0.5]
            else:
                sources.append(carried)
        return sources

    @cached_property
    def axes(self) -> dict[str, int]:
        """The axis of the states in every parameter that has one."""
        if self.new.order == self.old.order:  # no axis changes its size, so the adapter has to tell
            return {name: axis + self._leading for name, axis in state_axes(self.module, self.adapter).items()}
        shapes = {name: (self._present[name].shape, value.shape) for name, value in self.values.items()}
        changed = {name: [a != b for a, b in zip(*pair, strict=True)] for name, pair in shapes.items()}
        return {name: axes.index(True) for name, axes in changed.items() if any(axes)}

    @property
    def _leading(self) -> int:
        """The number of axes of the stack."""
        return 0 if self.present is None else 1

    @cached_property
    def _present(self) -> Values:
        return {name: parameter_of(self.module, name) for name in self.values} if self.present is None else self.present

    @cached_property
    def encoding(self) -> Jacobian:
        """s → θ at the old system, where it gives the present values."""
        return self._encoding_at(self.old)

    @cached_property
    def reading(self) -> Jacobian:
        """θ → s at the new values."""
        return self._reading_at(self.values)

    @cached_property
    def old_reading(self) -> Jacobian:
        """θ → s at the present values."""
        return self._reading_at({name: self._present[name] for name in self.values})

    @cached_property
    def new_encoding(self) -> Jacobian:
        """s → θ at the new system as the module stores it."""
        return self._encoding_at(self.stored)

    def _encoding_at(self, system: DiagonalSystem | Triple) -> Jacobian:
        """The Jacobian of s → θ at a system."""
        # Its values were read when the cut was planned.
        with torch.enable_grad(), values_unread():
            parts = {name: part.clone().requires_grad_() for name, part in vars(Triple.of(system)).items()}
            leaf = DiagonalSystem(*parts.values())
            return Jacobian(parts, encode_with(self.adapter, self.module, self.present or {}, leaf))

    def _reading_at(self, values: Values) -> Jacobian:
        """The Jacobian of θ → s at parameter values, whose order may differ from the module's."""
        with torch.enable_grad(), values_unread():
            leaves = {name: value.detach().double().clone().requires_grad_() for name, value in values.items()}
            system = read_with(self.adapter, self.module, {**(self.present or {}), **leaves})
            parts = {"poles": system.poles, "B": system.B, "C": system.C}
            return Jacobian(leaves, {name: part.to(torch.complex128) for name, part in parts.items()})

    @cached_property
    def stored(self) -> Triple:
        """The new system as the module stores it."""
        return Triple(**{name: part.detach() for name, part in self.reading.outputs.items()})

    @cached_property
    def stored_basis(self) -> BasisChange:
        """The change from the old system to the new one as the module stores it."""
        return self.basis.onto(self.new, self.stored)

    @cached_property
    def parts(self) -> dict[str, list[str]]:
        """The names of those of poles, B and C that depend on each parameter."""
        reached = {part: self.reading.reached(part) for part in self.reading.outputs}
        return {name: [part for part, names in reached.items() if name in names] for name in self.values}

    @cached_property
    def redundant(self) -> set[str]:
        """Parameters that no change of the system asks to change, such as the LRU's γ, whose effect B can have."""
        return {name for name in self.encoding.outputs if self._is_redundant(name)}

    def _is_redundant(self, name: str) -> bool:
        gradient = self.encoding.pullback({name: torch.ones_like(self.encoding.outputs[name])})
        return not bool(torch.stack([part.any() for part in gradient.values()]).any())


# The axis of the states in each part of a system.
_STATE_AXES = {"poles": -1, "B": -2, "C": -1}


def _repeated(tensor: Tensor, axis: int, more: int) -> Tensor:
    """The tensor with `more` copies of its last entry along an axis."""
    last = tensor.narrow(axis, tensor.shape[axis] - 1, 1)
    return torch.cat([tensor, *[last] * more], dim=axis)


def _modes_first(part: str, entries: Tensor) -> Tensor:
    """Poles, B or C with the modes on the last axis but one."""
    return entries[..., None] if part == "poles" else entries if part == "B" else entries.mT


def _from_modes_first(part: str, entries: Tensor) -> Tensor:
    return entries[..., 0] if part == "poles" else entries if part == "B" else entries.mT


def _checkerboard(like: Tensor) -> Tensor:
    index = torch.zeros_like(like)
    for axis, size in enumerate(like.shape):
        steps = torch.arange(size, device=like.device, dtype=like.dtype)
        index = index + steps.reshape([-1 if other == axis else 1 for other in range(like.ndim)])
    return 1 - 2 * (index % 2)
