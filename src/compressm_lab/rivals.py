"""Other ways to choose the states of a matrix state, to compare with: indices by score or by RRQR, PCA of states.

Each is a form, so it takes the place of one: `compress_(model, form=StrongRRQR(), ...)`. They follow the papers' ideas,
not the code of their authors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressm.adapters import Basis
from compressm.compression import Form, Random, Selected
from compressm.control import ControlError
from compressm.families.choices import require_count
from compressm.families.memory.forms import ObservedMemory
from compressm.families.memory.reduction import MemoryReduction
from compressm.families.memory.simulation import sequences_together

# The score of GHOST (2602.11408), E[S Sᵀ]ᵢᵢ E[q qᵀ]ᵢᵢ pooled over a group, is the one that this library selects by.
GHOST = Selected()


@final
@dataclass(frozen=True)
class StrongRRQR(Form):
    """States chosen by a strong rank-revealing QR of all queries and keys (Nazari and Rusch, 2602.04852).

    Columns of [queries; keys], both of unit mean square here, are pivoted; then a kept and a dropped one swap while
    that makes the volume of the kept ones more than `factor` times larger, at most `swaps` times (Gu, Eisenstat 1996).
    """

    needs = Basis.SELECTED

    factor: float = 1.5
    swaps: int = 20

    def __post_init__(self) -> None:
        object.__setattr__(self, "swaps", require_count("StrongRRQR: swaps", self.swaps))
        if isinstance(self.factor, bool) or not isinstance(self.factor, int | float) or not self.factor >= 1:
            raise ControlError(f"StrongRRQR: factor is {self.factor!r}, expected a number of at least 1")

    def reduce(self, layer: ObservedMemory, kept: Int[Tensor, " r"]) -> MemoryReduction:
        _require_first(self, kept)
        gram = sum(moment / moment.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None] for moment in _moments(layer))
        assert isinstance(gram, Tensor)
        chosen = torch.stack([strong_rrqr(one, len(kept), self.factor, self.swaps) for one in gram])
        W = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)[chosen].mT
        return MemoryReduction(W, W)


@final
@dataclass(frozen=True)
class StatePCA(Form):
    """The leading eigenvectors of E[S Sᵀ], W = T: what states are, whatever queries read of them."""

    needs = Basis.MAPPED

    def values(self, layer: ObservedMemory) -> Float[Tensor, "bank n"]:
        P, _ = layer.moments
        return torch.linalg.eigvalsh(P).flip(-1).clamp_min(0)

    def reduce(self, layer: ObservedMemory, kept: Int[Tensor, " r"]) -> MemoryReduction:
        P, _ = layer.moments
        V = torch.linalg.eigh(P).eigenvectors.flip(-1)[..., kept.to(P.device)]
        return MemoryReduction(V, V, mapped=True)


def rivals(seed: int = 0) -> dict[str, dict[str, Any]]:
    """Options of `compress_` and `Compressor` by the name of the rival."""
    return {
        "GHOST": {"form": GHOST},
        "RRQR": {"form": StrongRRQR()},
        "PCA": {"form": StatePCA()},
        "random": {"form": Selected(), "select": Random(seed)},
    }


def strong_rrqr(
    gram: Float[Tensor, "n n"], order: int, factor: float = 1.5, swaps: int = 20
) -> Int[Tensor, " {order}"]:
    """The columns that a strong rank-revealing QR of M keeps, from gram = Mᵀ M, in rising order.

    With kept columns I and dropped ones J, a swap of i and j multiplies the volume of I by ρ_ij, where
    ρ_ij² = (G_II⁻¹ G_IJ)_ij² + (G_II⁻¹)_ii (G_JJ − G_JI G_II⁻¹ G_IJ)_jj. It ends when no ρ is above `factor`.
    """
    kept = _pivots(gram, order)
    for _ in range(swaps if order < len(gram) else 0):
        is_kept = torch.zeros(len(gram), dtype=torch.bool, device=gram.device).index_fill(0, kept, True)
        dropped = (~is_kept).nonzero().flatten()
        inverse = torch.linalg.pinv(gram[kept][:, kept], hermitian=True)
        crossed = gram[kept][:, dropped]
        weights = inverse @ crossed
        rest = gram.diagonal()[dropped] - (crossed * weights).sum(0)
        growth = weights.square() + inverse.diagonal()[:, None] * rest.clamp_min(0)
        best = int(growth.argmax())
        if float(growth.flatten()[best]) <= factor**2:
            break
        kept[best // len(dropped)] = dropped[best % len(dropped)]
    return kept.sort().values


def _pivots(gram: Float[Tensor, "n n"], order: int) -> Int[Tensor, " {order}"]:
    """The first pivots of a QR with column pivoting: each is the column with the largest part that the others lack."""
    rest, chosen = gram.clone(), []
    free = torch.ones(len(gram), dtype=torch.bool, device=gram.device)
    for _ in range(order):
        pick = int(torch.where(free, rest.diagonal(), -torch.inf).argmax())
        free[pick] = False
        chosen.append(pick)
        pivot = rest[pick, pick]
        if float(pivot) > 0:
            rest = rest - torch.outer(rest[:, pick], rest[pick]) / pivot
    return torch.tensor(chosen, device=gram.device)


def _moments(layer: ObservedMemory) -> list[Float[Tensor, "bank n n"]]:
    """E[q qᵀ] and E[k kᵀ] over the layer's sample."""
    sample, memory = layer.observations.sample, layer.memory
    total = [torch.zeros(memory.bank, memory.order, memory.order, dtype=torch.float64, device=memory.device)] * 2
    for x, counts in sample.parts(sequences_together(sample.longest, memory, 1, 1)):
        steps = layer.adapter.mapped_steps(layer.module, x, memory, counts)
        parts = (torch.where(counts[:, None, :, None], part, 0) for part in (steps.queries, steps.keys))
        total = [one + torch.einsum("bgtn,bgtm->gnm", part, part) for one, part in zip(total, parts, strict=True)]
    return total


def _require_first(form: Form, kept: Tensor) -> None:
    if kept.tolist() != list(range(len(kept))):
        raise ControlError(f"{form} chooses states itself, expected select=Largest() with it")
