"""The family of layers with full real matrices (S4): balanced truncation of matrices, the result stored as modes.

The spectrum has one value for a mode, σ₂ⱼ₋₁ + σ₂ⱼ of the real system of 2n states: a mode stands for two of them. A
reduced real pole takes a mode for itself; the cut then keeps fewer states, and its bound says so.

An optimizer's gradients are pulled back along θ' → modes → matrices → θ and updates pushed forward along θ → matrices →
modes → θ', as in `linear.transport`: `encode` and `read` of the adapter are the outer maps, the projection is between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from compressm.adapters.base import parameter_of, read_with
from compressm.adapters.dense import DenseAdapter, modes_with
from compressm.control import DenseSystem, DiagonalSystem, hankel_singular_values
from compressm.control.folding import PairTruncation, pair_truncation
from compressm.control.validation import values_unread
from compressm.errors import CompressionError
from compressm.families.base import Change, PlannedCut, SeparateFamily, Values, Writing, energy_lost, reads
from compressm.families.choices import Choices, Largest
from compressm.families.linear import simulation
from compressm.families.linear.family import SystemLayer
from compressm.families.linear.observer import SequenceObserver, squared_change
from compressm.families.linear.transport import Jacobian
from compressm.families.observing import Observations, ratio_of, sequences_at_once
from compressm.layers.base import StateMap
from compressm.ops.lti.dense import dense_bank

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
        kept = moment.narrow(axis, 0, self.values[name].shape[axis])
        # With the momentum of matrices, those that rest would move again.
        return torch.zeros_like(kept) if name in self.adapter.RESTING else kept.clone()

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
            return Jacobian(parts, self.adapter.encode(self.module, DenseSystem._unchecked(*parts.values())))

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
            return Jacobian(parts, self.adapter.encode(self.module, DiagonalSystem(*parts.values())))


@final
@dataclass
class DenseObserver(SequenceObserver):
    """The observer of a layer with full matrices, whose states are all formed, some sequences at a time."""

    system: DenseSystem

    def accumulate(self, u: Tensor, counts: Tensor | None) -> None:
        covariance, system = self.observations.covariance, self.system
        assert covariance is not None
        steps = self.sampled_steps(u, counts)
        everything = torch.eye(system.order, dtype=u.dtype, device=u.device).expand(*system.bank, -1, -1)
        share = sequences_at_once(u.shape[1], system.B.numel())
        for start in range(0, len(u), share):
            part = slice(start, start + share)
            h, _ = dense_bank(u[part], system.A, system.B[..., 0], everything, keep_state=False)
            places = steps[part][..., None, None].expand(-1, -1, *h.shape[2:])
            samples = h.gather(1, places).flatten(0, 1).movedim(0, -2)
            mask = None if counts is None else counts[part].gather(1, steps[part]).flatten()
            covariance.add(samples, None if mask is None else mask.expand(samples.shape[:-1]))


@final
@dataclass(frozen=True)
class DenseLayer(SystemLayer):
    """A module, its system of full matrices, and its observations if there is data."""

    name: str
    module: nn.Module
    adapter: DenseAdapter[Any]
    system: DenseSystem
    observations: Observations | None = None

    @property
    def order(self) -> int:
        return self.system.order // 2

    def observer(self, choices: Choices) -> DenseObserver:
        return DenseObserver(Observations(self.name), self.module, self.system, choices.measurement)

    def received(self, sent: Any) -> DenseCut:
        system, left, right, bound, lost = sent
        device = self.system.device
        projection = Projection(left.to(device), right.to(device))
        return DenseCut(self, system.to(device), projection, bound, None, lost)


@final
@dataclass(frozen=True)
class DenseCut(PlannedCut):
    """The modes of a layer's reduced system, the projection on them, and the error."""

    layer: DenseLayer
    system: DiagonalSystem
    projection: Projection
    error_bound: float | None
    measured_error: float | None
    energy_lost: float

    @property
    def rank(self) -> int:
        return self.system.order

    def change(self) -> DenseChange:
        layer = self.layer
        writing = Writing.of(layer.module, layer.adapter, self.system, self.rank)
        return DenseChange(layer.module, layer.adapter, layer.system, self.system, self.projection, writing)

    def following(self, module: nn.Module, adapter: DenseAdapter[Any]) -> Writing:
        moved = self.projection.system(read_with(adapter, module).detach())
        return Writing.of(module, adapter, moved, self.rank)

    def state_map(self, module: nn.Module, adapter: DenseAdapter[Any], values: Values) -> StateMap | None:
        projection = self.projection

        def carried(state: Float[Tensor, "batch 2 width n"]) -> Float[Tensor, "batch 2 width r"]:
            z = state.double().movedim(1, -2).flatten(-2)
            h = (projection.left @ z[..., None].to(projection.left.dtype))[..., 0]
            return torch.stack([h.real, h.imag], dim=1).to(state.dtype)

        return carried

    def sent(self) -> Any:
        sides = (self.projection.left.to("cpu"), self.projection.right.to("cpu"))
        return self.system.to("cpu"), *sides, self.error_bound, self.energy_lost

    def squared_change(self) -> Float[Tensor, "2"] | None:
        observations = self.layer.observations
        if observations is None:
            return None
        return squared_change(self.layer.system, self.system, observations, _outputs)


def _outputs(system: DenseSystem | DiagonalSystem, u: Tensor) -> Tensor:
    if isinstance(system, DiagonalSystem):
        return simulation.outputs(system, u)
    return dense_bank(u, system.A, system.B[..., 0], system.C, keep_state=False)[0][..., 0]


@reads(DenseAdapter)
@final
class DenseFamily(SeparateFamily):
    """Balanced truncation of full matrices; the reduced systems are diagonalised and stored as modes."""

    called = "layers with full matrices"
    uses = frozenset()

    def require_choices(self, names: Sequence[str], choices: Choices) -> None:
        super().require_choices(names, choices)
        said = ", ".join(name or "the model" for name in names)
        if choices.is_modal:
            raise CompressionError(
                f"{said}: gramian is Modal(), which drops modes of a diagonal A; {self.called} have none before their"
                " first cut: expected WhiteNoise() or Measured()"
            )
        if not isinstance(choices.select, Largest):
            raise CompressionError(
                f"{said}: select is {choices.select}; {self.called} keep the largest values: expected Largest()"
            )

    def read(self, name: str, module: nn.Module, adapter: DenseAdapter[Any], choices: Choices) -> DenseLayer:
        return DenseLayer(name, module, adapter, read_with(adapter, module).detach())

    def is_bounded(self, choices: Choices) -> bool:
        return not choices.is_measured

    def spectra(self, layers: Sequence[DenseLayer], choices: Choices) -> dict[str, Float[Tensor, "*bank n"]]:
        """σ₂ⱼ₋₁ + σ₂ⱼ of the real systems."""
        found = {}
        for layer in layers:
            P, scale = layer.measured if choices.is_measured else (None, None)
            sigma = hankel_singular_values(layer.system, P=P)
            sigma = sigma if scale is None else sigma * scale[..., None]
            found[layer.name] = (sigma[..., ::2] + sigma[..., 1::2]).cpu()
        return found

    def planned(self, layer: DenseLayer, order: int, sigma: Tensor, choices: Choices, salt: int) -> DenseCut:
        found = pair_truncation(layer.system, order, P=layer.measured[0] if choices.is_measured else None)
        cut = _cut_of(layer, found, energy_lost(sigma, torch.arange(order)))
        squares = cut.squared_change()
        return cut if squares is None else replace(cut, measured_error=ratio_of(squares))


def _cut_of(layer: DenseLayer, found: PairTruncation, lost: float) -> DenseCut:
    bound = None if found.error_bound is None else float(found.error_bound.max())
    return DenseCut(layer, found.system, Projection(found.left, found.right), bound, None, lost)
