"""Changes of Hankel singular values while a layer trains (sec:why of the paper)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor

from compressm.control import validation
from compressm.control.factors import psd_factor
from compressm.control.gramians import gramians
from compressm.control.system import LinearSystem, require_system
from compressm.control.validation import OrderChangedError, ShapeError

# A share of the distance between neighbours: if values move less between snapshots, crossings can be followed.
_RESOLVED = 0.25


def hankel_hermitian(system: LinearSystem) -> Inexact[Tensor, "*bank n n"]:
    """H = (P^½ Q P^½)^½, a Hermitian matrix whose eigenvalues are the Hankel singular values."""
    P, Q = gramians(require_system("hankel_hermitian", system))
    root = _hermitian_root(P)
    # P^½ Q P^½ = M Mᴴ with M = P^½ Lo: the SVD of M gives its root, and nothing is squared.
    U, sigma, _ = torch.linalg.svd(root @ psd_factor((Q + Q.mH) / 2, "Q"))
    return (U * sigma[..., None, :].to(U.dtype)) @ U.mH


@dataclass(frozen=True)
class HankelChange:
    """σ of two snapshots, with |σᵢ' − σᵢ| ≤ `weyl_bound` = max |eig(H' − H)| for every i (lem:hsv_cont)."""

    sigma_before: Float[Tensor, "*bank n"]
    sigma_after: Float[Tensor, "*bank n"]
    weyl_bound: Float[Tensor, "*bank"]

    @property
    def largest_shift(self) -> Float[Tensor, "*bank"]:
        return (self.sigma_after - self.sigma_before).abs().amax(-1)


def hankel_change(before: LinearSystem, after: LinearSystem) -> HankelChange:
    """Compare two snapshots of one layer; a cut between them is refused, because δH is undefined across a cut."""
    for snapshot in (before, after):
        require_system("hankel_change", snapshot)
    if before.order != after.order:
        raise OrderChangedError(f"order {before.order} before and {after.order} after: δH is undefined across a cut")
    validation.require_one_device(before=before.B, after=after.B)
    if before.bank != after.bank:
        raise ShapeError(f"bank {tuple(before.bank)} before and {tuple(after.bank)} after")
    old, new = hankel_hermitian(before), hankel_hermitian(after)
    sigma, sigma_after = (torch.linalg.eigvalsh(matrix).flip(-1).clamp_min(0) for matrix in (old, new))
    return HankelChange(sigma, sigma_after, torch.linalg.eigvalsh(new - old).abs().amax(-1))


@dataclass(frozen=True)
class Trajectories:
    """values[k, j]: σ of state j at snapshot k, NaN after its removal; crossings[k]: pairs that changed order at k.

    `resolved`: snapshots are close enough to detect crossings; otherwise states are followed by rank, and none cross.
    """

    values: Float[Tensor, "steps n"]
    crossings: Int[Tensor, " steps"]
    resolved: bool


def trajectories(spectra: Sequence[Float[Tensor, " _"]]) -> Trajectories:
    """Follow each σ through a sequence of falling spectra, by linear assignment to its extrapolated value.

    State j is expected at σⱼ + (σⱼ − its value before). Assignment to the nearest values could never find a crossing,
    because the cheapest matching of two sorted lists is the sorted one. If values typically move by more than a quarter
    of the distance to their neighbours, states cannot be told apart and are followed by rank. A spectrum may be shorter
    than the one before, after a cut, but not longer.
    """
    from scipy.optimize import linear_sum_assignment  # SciPy takes longer to import than the rest of the package

    if not isinstance(spectra, Sequence):
        raise ShapeError(f"spectra are a {type(spectra).__name__}, expected a list of tensors (n,)")
    spectra = [_checked_spectrum(k, spectrum) for k, spectrum in enumerate(spectra)]
    if not spectra:
        raise ShapeError("no spectra given: trajectories need at least one")
    values = [spectra[0]]
    crossings = [0]
    expected = spectra[0]
    above = _order(spectra[0])
    resolved = _are_resolved(spectra)
    for k, spectrum in enumerate(spectra[1:], start=1):
        alive = torch.nonzero(~torch.isnan(values[-1])).flatten()
        if len(spectrum) > len(alive):
            raise OrderChangedError(
                f"spectrum {k} has {len(spectrum)} values after {len(alive)}: an order can only fall"
            )
        # Squared: with |·| every matching of a list to itself, shifted past its neighbours, costs the same.
        distance = (expected[alive, None] - spectrum[None, :]) ** 2
        rows, columns = (torch.from_numpy(index) for index in linear_sum_assignment(distance.numpy()))
        current = torch.full_like(values[0], torch.nan)
        current[alive[rows]] = spectrum[columns]
        now = _order(current)
        crossings.append(int((above * now < 0).sum()) // 2)
        above = torch.where(now == 0, above, now)  # equal values keep their order until they part
        # A cut changes the basis and so every σ: the velocity across it means nothing.
        trusted = resolved and len(spectrum) == len(alive)
        expected = (2 * current - values[-1]).clamp_min(0) if trusted else current
        values.append(current)
    return Trajectories(torch.stack(values), torch.tensor(crossings, device="cpu"), resolved)


def _are_resolved(spectra: Sequence[Float[Tensor, " _"]]) -> bool:
    """True if values typically move little compared with the distance to their nearest neighbour."""
    moves = []
    for before, after in pairwise(spectra):
        if len(before) == len(after) > 1:
            gaps = -before.diff()
            nearest = torch.minimum(torch.cat([gaps[:1], gaps]), torch.cat([gaps, gaps[-1:]]))
            moves.append((after - before).abs() / nearest.clamp_min(torch.finfo(torch.float64).tiny))
    return not moves or bool(torch.cat(moves).median() <= _RESOLVED)


def _order(values: Tensor) -> Tensor:
    """sign(σᵢ − σⱼ), 0 if a cut has removed one of them."""
    return torch.sign(values[:, None] - values[None, :]).nan_to_num(0)


def _checked_spectrum(k: int, spectrum: Tensor) -> Float[Tensor, " n"]:
    validation.require_tensor(f"spectra[{k}]", spectrum, "n")
    if spectrum.ndim != 1:
        raise ShapeError(
            f"spectra[{k}] has shape {tuple(spectrum.shape)}, expected (n,): follow each member of a bank separately"
        )
    validation.require_real(f"spectra[{k}]", spectrum)
    validation.require_finite(f"spectra[{k}]", spectrum)
    return spectrum.detach().to("cpu", torch.float64)


def _hermitian_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * torch.sqrt(values.clamp_min(0))[..., None, :].to(vectors.dtype)) @ vectors.mH
