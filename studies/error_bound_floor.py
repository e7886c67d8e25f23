"""A search for violations of the error bound: is any reduced system, as it is computed, further off than its bound?

Random systems with poles up to 1 − 1e-8 are cut where 2 Σ of the dropped σ is at the level of rounding. Errors are
evaluated in extended precision, at the angle of every pole and at several of its half-widths beside it: a lower bound
of the H∞ norm, which is what finds violations.

python studies/error_bound_floor.py --seeds 10000
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import torch
from numpy.typing import NDArray

from command import Progress, run, silent
from compressm.control import (
    DenseSystem,
    DiagonalSystem,
    LinearSystem,
    balanced_truncation,
    conjugate_pairs,
    error_bounds,
    hankel_singular_values,
)
from compressm.families.linear.reduction import drop_modes, reduce_system
from compressm_lab.runs.measurement import Measurement, Row

KINDS = ("spread", "slow", "clusters", "nearly defective", "ties", "real", "lru")
# diagonal: the system whose poles are stored. folded: the real map Re(C h) after a cut of a layer. modal: modes are
# dropped. bank: the system is cut beside another. dense: the result before its eigenvectors are taken, if it is small.
FORMS = ("diagonal", "folded", "modal", "bank", "dense")
_EPS = 2.0**-52
_DENSE_ORDER = 10
_OFFSETS = np.array([0, 0.3, -0.3, 0.6, -0.6, 1, -1, 3, -3], dtype=np.longdouble)


@dataclass(frozen=True)
class Case:
    """A cut of one system: its error, 2 Σ of the dropped σ, its bound, and what they depend on."""

    kind: str
    form: str
    order: int
    rank: int
    margin: float
    sigma: float
    error: float
    tail: float
    bound: float

    @property
    def excess(self) -> float:
        """The error beyond the tail."""
        return self.error - self.tail

    @property
    def floors(self) -> float:
        """The error beyond the tail, in units of the floor without its factor, max(n, κ) ε σ₁ / (1 − ρ)."""
        return 16 * self.excess / (self.bound - self.tail) if self.bound > self.tail else math.inf


def measure_error_bound_floor(
    *, seeds: int = 10_000, quick: bool = False, progress: Progress = silent, processes: int = 1
) -> Measurement:
    """Measure one row for every kind of system and every form of the result, and one for every decade of 1 − ρ."""
    count = min(seeds, 200) if quick else seeds
    found: list[Case] = []
    with ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for seed, more in enumerate(pool.map(cases, range(count), chunksize=50), start=1):
            found += more
            if seed % 1000 == 0:
                progress(f"{seed} systems, {sum(case.error > case.bound for case in found)} violations")
    groups = [[case for case in found if (case.kind, case.form) == pair] for pair in _pairs()]
    decades = [[case for case in found if _decade(case) == decade] for decade in range(9)]
    rows = [_row(group, group[0].kind, group[0].form) for group in groups if group]
    rows += [_row(group, f"1 - ρ from 1e-{k + 1} to 1e-{k}", "all") for k, group in enumerate(decades) if group]
    return Measurement("error_bound_floor", "The error bound and its rounding", count, rows)


def _pairs() -> Iterable[tuple[str, str]]:
    return ((kind, form) for kind in KINDS for form in FORMS)


def _decade(case: Case) -> int:
    return min(8, math.floor(-math.log10(case.margin)))


def _row(group: list[Case], systems: str, form: str) -> Row:
    return {
        "systems": systems,
        "form": form,
        "cuts": len(group),
        "violations_of_the_tail": sum(case.error > case.tail for case in group),
        "violations": sum(case.error > case.bound for case in group),
        "largest_share": max(case.error / case.bound for case in group),
        "largest_floors": max(case.floors for case in group),
        "largest_in_n_eps_sigma": max(case.excess / (case.order * _EPS * case.sigma) for case in group),
        "device": "cpu",
    }


def cases(seed: int, largest_order: int = 64) -> list[Case]:
    """The cuts of one system: in the form that is stored, and in another one."""
    kind, numbers = KINDS[seed % len(KINDS)], np.random.default_rng(seed)
    system = random_system(kind, numbers, largest_order)
    rank = _rank(hankel_singular_values(system), numbers)
    cut = balanced_truncation(system, rank)
    diagonal = cut.diagonalise()
    found = [_case(kind, "diagonal", system, diagonal.system, diagonal.sigma, diagonal.error_bound)]
    form = FORMS[1 + seed // len(KINDS) % (len(FORMS) - 1)]
    if form == "folded" and system.poles.is_complex():
        real = reduce_system(system, rank)
        pairs = conjugate_pairs(system), conjugate_pairs(real.system)
        found.append(_case(kind, form, *pairs, real.sigma, real.error_bound))
    elif form == "modal":
        kept = drop_modes(system, rank)
        found.append(_case(kind, form, system, kept.system, kept.sigma, kept.error_bound))
    elif form == "bank":
        both = balanced_truncation(_beside_another(system), rank).diagonalise()
        assert both.error_bound is not None
        found.append(_case(kind, form, system, both.system[0], both.sigma[0], both.error_bound[0]))
    elif form == "dense" and system.order <= _DENSE_ORDER:
        found.append(_case(kind, form, system, cut.system, cut.sigma, cut.error_bound))
    return found


def _beside_another(system: DiagonalSystem) -> DiagonalSystem:
    """A bank of the system and one with faster poles."""
    B, C = torch.stack([system.B, system.B.flip(-2)]), torch.stack([system.C, system.C])
    if system.log_poles is None:
        return DiagonalSystem(torch.stack([system.poles, 0.9 * system.poles]), B, C)
    return DiagonalSystem.from_log_poles(torch.stack([system.log_poles, system.log_poles - 0.1]), B, C)


def _case(
    kind: str, form: str, system: DiagonalSystem, reduced: LinearSystem, sigma: torch.Tensor, bound: torch.Tensor | None
) -> Case:
    assert bound is not None
    # Conjugate pairs have two poles for every state.
    order = len(sigma)
    kept = reduced.order * order // system.order
    margin, tail = float(system.stability_margin), float(error_bounds(sigma)[kept])
    error = error_in_extended_precision(system, reduced)
    return Case(kind, form, order, kept, margin, float(sigma.max()), error, tail, float(bound))


def _rank(sigma: torch.Tensor, numbers: np.random.Generator) -> int:
    """Mostly where the tail falls to the level of rounding, sometimes any rank."""
    n = len(sigma)
    if numbers.random() < 0.2:
        return int(numbers.integers(1, n + 1))
    allowed = float(sigma[0]) * 10 ** -numbers.uniform(6, 17)
    return min(n, max(1, int((error_bounds(sigma) > allowed).sum())))


def random_system(kind: str, numbers: np.random.Generator, largest_order: int) -> DiagonalSystem:
    """A random system of at least 2 modes; 1 − |λ| goes down to 1e-8."""
    n, p, q = (int(numbers.integers(low, high)) for low, high in ((2, largest_order + 1), (1, 5), (1, 5)))
    gap, phase = _poles(kind, n, numbers)
    gap = np.clip(gap, 1e-8, 0.999999)
    gains = numbers.standard_normal((n, p + q)) + (0 if kind == "real" else 1j * numbers.standard_normal((n, p + q)))
    gains = gains * 10 ** (4 * numbers.random((n, 1)) - 2) if numbers.random() < 0.5 else gains
    B, C = gains[:, :p], np.ascontiguousarray(gains[:, p:].T)
    B = B * np.sqrt(gap)[:, None] if numbers.random() < 0.5 else np.ascontiguousarray(B)
    if kind == "real":
        return DiagonalSystem(*map(torch.from_numpy, ((1 - gap) * np.sign(np.cos(phase)), B, C)))
    log_poles = torch.from_numpy(np.log1p(-gap) + 1j * phase)
    if numbers.random() < 0.5:
        return DiagonalSystem.from_log_poles(log_poles, torch.from_numpy(B), torch.from_numpy(C))
    return DiagonalSystem(torch.exp(log_poles), torch.from_numpy(B), torch.from_numpy(C))


def _poles(kind: str, n: int, numbers: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """1 − |λ| and the phase of every pole."""
    gap, phase = 10 ** (-8 * numbers.random(n)), 2 * np.pi * numbers.random(n)
    if kind == "spread":
        return 1 - 0.9999 * numbers.random(n), phase
    if kind == "clusters":
        width = gap[0] * 10 ** numbers.uniform(-3, 3)
        gap = gap[0] * (1 + 10 ** -numbers.uniform(0, 9) * numbers.random(n))
        return gap, phase[0] + width * numbers.standard_normal(n)
    if kind == "nearly defective":
        near, pairs = 10 ** -numbers.uniform(1, 9), np.arange(n) // 2
        gap, phase = gap[pairs], phase[pairs]
        return gap * (1 + near * numbers.random(n)), phase + near * gap * numbers.standard_normal(n)
    if kind == "ties":
        same = numbers.integers(0, max(1, n // 3), n)
        return gap[same], phase[same]
    if kind == "lru":
        return 1 - np.sqrt(0.9**2 + numbers.random(n) * (0.999**2 - 0.9**2)), phase
    return gap, phase


def error_in_extended_precision(system: DiagonalSystem, reduced: LinearSystem) -> float:
    """The largest gain of the difference on a grid, from the stored float64 numbers in 80-bit arithmetic."""
    gaps, angles = zip(*(_resonances(one) for one in (system, reduced)), strict=True)
    gap, angle = np.concatenate(gaps), np.concatenate(angles)
    uniform = np.linspace(-np.pi, np.pi, 64).astype(np.longdouble)
    omega = np.concatenate([(angle[:, None] + gap[:, None] * _OFFSETS).ravel(), uniform])
    delay = np.cos(omega) - 1j * np.sin(omega)
    difference = (_response(system, delay) - _response(reduced, delay)).astype(np.complex128)
    return float(np.linalg.norm(difference, 2, axis=(-2, -1)).max())


def _extended(tensor: torch.Tensor) -> NDArray[np.clongdouble]:
    return tensor.detach().cpu().numpy().astype(np.clongdouble)


def _exact_poles(system: LinearSystem) -> NDArray[np.clongdouble]:
    if isinstance(system, DenseSystem):
        return np.linalg.eigvals(system.A.numpy()).astype(np.clongdouble)
    assert isinstance(system, DiagonalSystem)
    if system.log_poles is None:
        return _extended(system.poles)
    logarithms = _extended(system.log_poles)
    return np.exp(logarithms.real) * (np.cos(logarithms.imag) + 1j * np.sin(logarithms.imag))


def _resonances(system: LinearSystem) -> tuple[NDArray[np.longdouble], NDArray[np.longdouble]]:
    poles = _exact_poles(system)
    return 1 - np.hypot(poles.real, poles.imag), np.arctan2(poles.imag, poles.real)


def _response(system: LinearSystem, delay: NDArray[np.clongdouble]) -> NDArray[np.clongdouble]:
    """C (I − e^{−iω} A)⁻¹ B at every e^{−iω} of `delay`."""
    B, C = _extended(system.B), _extended(system.C)
    if isinstance(system, DenseSystem):
        identity = np.eye(len(B), dtype=np.clongdouble)
        return C @ _solved(identity - delay[:, None, None] * _extended(system.A), B)
    modes = (C.T[:, :, None] * B[:, None, :]).reshape(len(B), -1)
    response = (1 / (1 - delay[:, None] * _exact_poles(system))) @ modes
    return response.reshape(len(delay), len(C), B.shape[1])


def _solved(A: NDArray[np.clongdouble], B: NDArray[np.clongdouble]) -> NDArray[np.clongdouble]:
    """A⁻¹ B for many A by Gaussian elimination with pivots: LAPACK has no extended precision."""
    n = A.shape[-1]
    both = np.concatenate([A, np.broadcast_to(B, (len(A), *B.shape))], axis=-1)
    every = np.arange(len(A))
    for k in range(n):
        pivot = k + np.abs(both[:, k:, k]).argmax(-1)
        both[every, k], both[every, pivot] = both[every, pivot].copy(), both[every, k].copy()
        both[:, k] /= both[:, k, k, None]
        factors = both[:, :, k].copy()
        factors[:, k] = 0
        both -= factors[:, :, None] * both[:, None, k]
    return both[:, :, n:]


if __name__ == "__main__":
    run(measure_error_bound_floor, seeds=10_000, description=__doc__ or "", parallel=True)
