"""Reduction of a diagonal system, and the change of basis from its modes to those of the smaller system.

Inputs are real and y = Re(C h), so a mode may be conjugated (`fold`) before balancing. After that a cut is linear:
B' = Ψᴴ B, C' = C Φ, Λ' = diag(Ψᴴ Λ Φ), Ψᴴ Φ = I.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, SupportsIndex, final

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from compressm.control import DiagonalSystem
from compressm.control import fold as fold_modes
from compressm.control.balancing import GramianPair, balance, rounding_floor
from compressm.control.folding import lower_half
from compressm.control.hankel import gramian_pair
from compressm.control.linear_algebra import largest_part, modulus, power_of_two, square_modulus
from compressm.control.truncation import mode_norms, truncated


@final
@dataclass(frozen=True)
class Triple:
    """Poles, B and C of a system, of a direction in which it moves, or of a gradient ∂/∂Re + i ∂/∂Im."""

    poles: Complex[Tensor, "*bank n"]
    B: Complex[Tensor, "*bank n p"]
    C: Complex[Tensor, "*bank q n"]

    @classmethod
    def of(cls, system: DiagonalSystem | Triple) -> Triple:
        return cls(*(part.detach().to(torch.complex128) for part in (system.poles, system.B, system.C)))

    def conjugated(self, modes: Bool[Tensor, "*bank n"]) -> Triple:
        """The same with these modes conjugated."""
        return Triple(
            torch.where(modes, self.poles.conj(), self.poles),
            torch.where(modes[..., :, None], self.B.conj(), self.B),
            torch.where(modes[..., None, :], self.C.conj(), self.C),
        )


@final
@dataclass(frozen=True)
class BasisChange:
    """A projection of old modes on `right` = Φ along `left` = Ψ, between two conjugations.

    `old_conjugated` marks the old modes that are conjugated before it (by `fold`), `new_conjugated` the new modes that
    are conjugated after it.
    """

    right: Complex[Tensor, "*bank n r"]
    left: Complex[Tensor, "*bank n r"]
    old_conjugated: Bool[Tensor, "*bank n"]
    new_conjugated: Bool[Tensor, "*bank r"]

    def __getitem__(self, member: Any) -> BasisChange:
        """The change of one or several members of the bank."""
        parts = (self.right, self.left, self.old_conjugated, self.new_conjugated)
        return BasisChange(*(part[member] for part in parts))

    @classmethod
    def stack(cls, changes: Sequence[BasisChange]) -> BasisChange:
        """The changes of several systems of equal shapes as those of a bank."""
        return cls(*(torch.stack([getattr(change, part.name) for change in changes]) for part in fields(cls)))

    def to(self, device: torch.device | str) -> BasisChange:
        """A copy on `device`."""
        parts = (self.right, self.left, self.old_conjugated, self.new_conjugated)
        return BasisChange(*(part.to(device) for part in parts))

    def vector(self, old: Triple) -> Triple:
        """Push a direction, or the system itself, forward: dB' = Ψᴴ dB, dC' = dC Φ, dλ' the diagonal of Ψᴴ dΛ Φ."""
        old = old.conjugated(self.old_conjugated)
        poles = (self.mixing() @ old.poles[..., None])[..., 0]
        return Triple(poles, self.left.mH @ old.B, old.C @ self.right).conjugated(self.new_conjugated)

    def state(self, h: Complex[Tensor, "batch *bank n"]) -> Complex[Tensor, "batch *bank r"]:
        """Project states of the large system: h' = Ψᴴ h, as the input matrix."""
        h = torch.where(self.old_conjugated, h.conj(), h)
        projected = (self.left.mH @ h[..., None])[..., 0]
        return torch.where(self.new_conjugated, projected.conj(), projected)

    def gradient(self, old: Triple) -> Triple:
        """Pull a gradient back: a step dB' of the small system is a step Φ dB' of the large one, hence g_B' = Φᴴ g_B.

        Only the diagonal of the gradient with respect to A counts in a diagonal system.
        """
        return self.dual().vector(old)

    def dual(self) -> BasisChange:
        """The change with Φ and Ψ exchanged: it pushes gradients forward as this one pushes vectors."""
        return BasisChange(self.left, self.right, self.old_conjugated, self.new_conjugated)

    def mixing(self) -> Complex[Tensor, "*bank r n"]:
        """The weights Ψ̄ ∘ Φ with which each new pole is a mean of old ones; each row sums to 1."""
        return (self.left.conj() * self.right).mT

    def onto(self, new: DiagonalSystem | Triple, stored: DiagonalSystem | Triple) -> BasisChange:
        """The change to `stored`, which is `new` with states scaled or conjugated, as a module stores it."""
        there, here = Triple.of(stored), Triple.of(new)
        mirrored = square_modulus(there.poles - here.poles.conj()) < square_modulus(there.poles - here.poles)
        here = here.conjugated(mirrored)
        conjugated = self.new_conjugated ^ mirrored
        # B'' = f B' and C'' = C'/f; f comes from B unless that is zero, else from C. Squares are of scaled numbers.
        b, c = (power_of_two(largest_part(part))[..., None, None] for part in (here.B, there.C))
        by_input, size_in = (here.B.conj() / b * (there.B / b)).sum(-1), square_modulus(here.B / b).sum(-1)
        by_output, size_out = (there.C.conj() / c * (here.C / c)).sum(-2), square_modulus(there.C / c).sum(-2)
        factor = torch.where(size_in > 0, _ratio(by_input, size_in), _ratio(by_output, size_out))
        # The factor belongs to the projection, before the last conjugation.
        factor = torch.where(conjugated, factor.conj(), factor)[..., None, :]
        return BasisChange(self.right / factor, self.left * factor.conj(), self.old_conjugated, conjugated)


@final
@dataclass(frozen=True)
class LinearReduction:
    """A smaller system, its change of basis, all σ, and the error bound: 2 Σ of the dropped σ plus `rounding_floor`.

    There is none for a given P. Leading axes are those of the given system; `error_bound` has one value for each of its
    members.
    """

    system: DiagonalSystem
    change: BasisChange
    sigma: Float[Tensor, "*bank n"]
    error_bound: Float[Tensor, "*bank"] | None


def reduce_system(
    system: DiagonalSystem,
    order: SupportsIndex | None = None,
    *,
    states: Sequence[int] | Int[Tensor, "..."] | None = None,
    fold: bool = True,
    P: Complex[Tensor, "*bank n n"] | Float[Tensor, "*bank n n"] | None = None,
    pair: GramianPair | None = None,
) -> LinearReduction:
    """Balance, keep `order` states (or those that `states` names) and diagonalise; batched over all leading axes.

    The error of Re(C h) is at most `error_bound`. A measured `P` belongs to the states of `fold(system)`, or, with
    fold=False (the paper's arithmetic), to those of the system itself; so do both Gramians of a `pair`. Modes get the
    mean ratio of ‖b‖ to ‖c‖ of the old system and the phase closest to that of the old modes: stored values keep their
    size and their meaning. An order above the numerical rank #{σ > n ε σ₁} gives that rank, because the other states
    have no effect.
    """
    system = system.detach()
    balanced = fold_modes(system) if fold else system
    both = gramian_pair(balanced, P) if pair is None else pair
    bounded = not both.P_is_measured
    truncation = truncated(balanced, order, states, lambda _, kept: balance(both, kept), bounded=bounded).diagonalise()
    nothing = torch.zeros_like(system.poles, dtype=torch.bool)
    phase = _turn(truncation.right)
    right, left = truncation.right * phase, truncation.left * phase
    assert isinstance(truncation.system, DiagonalSystem)
    turned = DiagonalSystem(
        truncation.system.poles.to(torch.complex128), truncation.system.B * phase.mH, truncation.system.C * phase
    )
    mirrored = lower_half(turned) if fold else nothing[..., : turned.order]
    change = BasisChange(right, left, lower_half(system) if fold else nothing, mirrored)
    return LinearReduction(fold_modes(turned) if fold else turned, change, truncation.sigma, truncation.error_bound)


def _turn(right: Complex[Tensor, "*bank n r"]) -> Complex[Tensor, "*bank 1 r"]:
    """Phases that make the largest entry of each column positive, so that an unchanged mode keeps its phase."""
    largest = right.gather(-2, square_modulus(right).argmax(-2, keepdim=True))
    size = modulus(largest)
    return torch.where(size > 0, largest.conj() / torch.where(size > 0, size, 1), 1)


def _ratio(product: Tensor, square: Tensor) -> Tensor:
    usable = (square > 0) & (product != 0)
    return torch.where(usable, product / torch.where(usable, square, 1), 1)


def mode_sizes(system: DiagonalSystem) -> Float[Tensor, "*bank n"]:
    """½ ‖bᵢ‖ ‖cᵢ‖ / (1 − |λᵢ|), half the H∞ norm of a mode's part of the output (the score of Gwak et al. 2024).

    With the factor ½, 2 Σ over the dropped modes bounds the error by the triangle inequality, as with σ.
    """
    # 1 − |λ| = (1 − |λ|²) / (1 + |λ|) keeps all digits.
    b, c = mode_norms(system)
    return b * c * (1 + modulus(system.poles)) / system.decay / 2


def sorted_sizes(system: DiagonalSystem) -> Float[Tensor, "*bank n"]:
    """The sizes of the modes in falling order, like a spectrum."""
    return mode_sizes(system).sort(dim=-1, descending=True).values


def drop_modes(system: DiagonalSystem, order: int, states: Int[Tensor, "*bank r"] | None = None) -> LinearReduction:
    """Keep the `order` largest modes, or those at the places `states` of the falling sizes; modes do not change."""
    system = system.detach()
    sizes = mode_sizes(system)
    places = sizes.argsort(dim=-1, descending=True, stable=True)
    kept = places[..., :order] if states is None else places.gather(-1, states.to(places.device))
    kept = kept.sort(dim=-1).values
    poles, B, C = (part.to(torch.complex128) for part in (system.poles, system.B, system.C))
    smaller = DiagonalSystem(
        poles.gather(-1, kept),
        B.gather(-2, kept[..., :, None].expand(*kept.shape, B.shape[-1])),
        C.gather(-1, kept[..., None, :].expand(*C.shape[:-1], kept.shape[-1])),
    )
    columns = torch.nn.functional.one_hot(kept, system.order).mT.to(poles.dtype)
    nothing = torch.zeros_like(poles.real, dtype=torch.bool)
    change = BasisChange(columns, columns, nothing, nothing[..., : kept.shape[-1]])
    bound = 2 * sizes.scatter(-1, kept, 0).sum(-1) + rounding_floor(sizes, system.stability_margin)
    return LinearReduction(smaller, change, sizes.gather(-1, places), bound)
