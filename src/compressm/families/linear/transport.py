"""Second moments of complex entries that vary independently, and how they pass through linear maps.

An optimizer keeps E[g²] of every real parameter and nothing between two of them. For x' = Σᵢ zᵢ xᵢ with independent xᵢ
the squares are E[(Re x')²] = Σ (Re zᵢ)² E[(Re xᵢ)²] + (Im zᵢ)² E[(Im xᵢ)²] − 2 Re zᵢ Im zᵢ E[Re xᵢ Im xᵢ].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor, nn
from torch.func import functional_call

from compressm.adapters import SSMAdapter, state_axes
from compressm.adapters.base import parameter_of
from compressm.control import DiagonalSystem
from compressm.families.base import Change, Values, Writing
from compressm.families.linear.reduction import BasisChange, Triple


@final
@dataclass(frozen=True)
class Spread:
    """E[(Re x)²], E[(Im x)²] and E[Re x Im x] of entries x, modes on the last axis but one."""

    re: Float[Tensor, "*bank n h"]
    im: Float[Tensor, "*bank n h"]
    mixed: Float[Tensor, "*bank n h"]

    @classmethod
    def of(cls, sources: Iterable[Complex[Tensor, "*bank n h"]]) -> Spread:
        """Of x = Σ ±source with signs that are independent of each other, in every entry."""
        parts = [(source.real, source.imag) for source in sources]
        sums = ([a * a for a, _ in parts], [b * b for _, b in parts], [a * b for a, b in parts])
        return cls(*(torch.stack(terms).sum(0) for terms in sums))

    def conjugated(self, modes: Bool[Tensor, "*bank n"]) -> Spread:
        """With the entries of these modes conjugated."""
        return Spread(self.re, self.im, torch.where(modes[..., None], -self.mixed, self.mixed))

    def through(self, z: Complex[Tensor, "*bank r n"]) -> Spread:
        """Of z x."""
        a, b = z.real, z.imag
        stacked = torch.cat([self.re, self.im, self.mixed], dim=-2)
        rows = (
            torch.cat([a * a, b * b, -2 * a * b], dim=-1),
            torch.cat([b * b, a * a, 2 * a * b], dim=-1),
            torch.cat([a * b, -a * b, a * a - b * b], dim=-1),
        )
        re, im, mixed = (row @ stacked for row in rows)
        # The sums are not negative, their rounding may be.
        return Spread(re.clamp_min(0), im.clamp_min(0), mixed)

    def along(self, direction: Complex[Tensor, "*bank n h"]) -> Float[Tensor, "*bank n h"]:
        """E[(Re d̄ x)²]."""
        a, b = direction.real, direction.imag
        return (a * a * self.re + b * b * self.im + 2 * a * b * self.mixed).clamp_min(0)

    def factors(self) -> tuple[Complex[Tensor, "*bank n h"], Complex[Tensor, "*bank n h"]]:
        """Two sources that have this spread."""
        first = torch.sqrt(self.re)
        usable = first > 0
        beside = torch.where(usable, self.mixed / torch.where(usable, first, 1), 0)
        rest = torch.sqrt((self.im - beside * beside).clamp_min(0))
        return torch.complex(first, beside), torch.complex(torch.zeros_like(rest), rest)


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
            writing = Writing.of(module, adapter, new, new.order)
        return cls(module, adapter, old, new, basis, writing)

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
