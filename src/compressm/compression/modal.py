"""Modal truncation: modes are dropped as they are, the others stay untouched; a yardstick for balanced truncation."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressm.compression.basis import BasisChange, Reduction
from compressm.control import DiagonalSystem
from compressm.control.linear_algebra import column_norms, modulus, row_norms


def mode_sizes(system: DiagonalSystem) -> Float[Tensor, "*bank n"]:
    """½ ‖bᵢ‖ ‖cᵢ‖ / (1 − |λᵢ|), half the H∞ norm of what a mode adds (the score of Gwak et al. 2024).

    Half, so that 2 Σ over the dropped ones bounds the error, by the triangle inequality, as it does with σ.
    """
    # 1 − |λ| = (1 − |λ|²) / (1 + |λ|) keeps all digits.
    return row_norms(system.B) * column_norms(system.C) * (1 + modulus(system.poles)) / system.decay / 2


def sorted_sizes(system: DiagonalSystem) -> Float[Tensor, "*bank n"]:
    """Falling, as a spectrum is."""
    return mode_sizes(system).sort(dim=-1, descending=True).values


def drop_modes(system: DiagonalSystem, order: int, states: Int[Tensor, "*bank r"] | None = None) -> Reduction:
    """Keep the `order` largest modes, or those at the places `states` of the falling sizes; no basis changes."""
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
    bound = 2 * sizes.scatter(-1, kept, 0).sum(-1)
    return Reduction(smaller, change, sizes.gather(-1, places), bound)
