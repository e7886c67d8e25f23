"""Time one reduction beside the paper's formulas as they stand, in NumPy and SciPy.

The plain formulas: Gramians by the closed form (with the conjugates it needs), σ = √spec(P Q), T from matrix square
roots, T⁻¹ A T in full, then a slice and a diagonalisation (sec:algorithm).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import scipy.linalg
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressm.control import DiagonalSystem, balanced_truncation, hankel_singular_values
from compressm.control.gramians import gramians
from compressm_lab.bench.timing import Progress, columns, measure_each, median_seconds, silent
from compressm_lab.runs.measurement import Measurement, Row

Array = NDArray[np.complex128]


@dataclass(frozen=True)
class PlainSystem:
    """A diagonal system as NumPy arrays."""

    poles: Array
    B: Array
    C: Array

    @classmethod
    def of(cls, system: DiagonalSystem) -> PlainSystem:
        return cls(system.poles.numpy(), system.B.numpy(), system.C.numpy())


def plain_gramians(system: PlainSystem) -> tuple[Array, Array]:
    """Step 2: P and Q, entry by entry."""
    denominators = 1 - system.poles[:, None] * system.poles[None, :].conj()
    P = system.B @ system.B.conj().T / denominators
    Q = system.C.conj().T @ system.C / denominators.conj()
    return P, Q


def plain_hankel_values(P: Array, Q: Array) -> NDArray[np.float64]:
    """Step 3: the roots of the eigenvalues of P Q."""
    squares = np.linalg.eigvals(P @ Q).real
    return np.sort(np.sqrt(np.maximum(squares, 0)))[::-1]


def plain_reduction(system: PlainSystem, order: int) -> PlainSystem:
    """The whole reduction, steps 2 to 8."""
    P, Q = plain_gramians(system)
    plain_hankel_values(P, Q)
    # Steps 5 and 6: T = P^½ U Σ^{-½} with P^½ Q P^½ = U Σ² Uᴴ, and all of (T⁻¹ A T, T⁻¹ B, C T).
    root = scipy.linalg.sqrtm(P)
    U, squares, _ = np.linalg.svd(root @ Q @ root)
    T = root @ U / np.sqrt(np.sqrt(squares))
    inverse = np.linalg.inv(T)
    A, B, C = inverse @ np.diag(system.poles) @ T, inverse @ system.B, system.C @ T
    # Steps 7 and 8: slice, and diagonalise again.
    poles, X = np.linalg.eig(A[:order, :order])
    return PlainSystem(poles, np.linalg.inv(X) @ B[:order], C[:, :order] @ X)


def lru_at_initialisation(order: int, width: int, *, seed: int = 0, bank: tuple[int, ...] = ()) -> DiagonalSystem:
    """An LRU layer before training: |λ| in the ring [0.9, 0.999], phases up to 6.28 (Orvieto et al. 2023)."""
    draw = _Draw(seed, bank)
    radius = torch.sqrt(0.9**2 + draw.uniform(order) * (0.999**2 - 0.9**2))
    log_poles = torch.complex(torch.log(radius), 6.28 * draw.uniform(order))
    gamma = torch.sqrt(1 - radius**2)
    B = gamma[..., None] * draw.complex_normal(order, width) / math.sqrt(2 * width)
    return DiagonalSystem.from_log_poles(log_poles, B, draw.complex_normal(width, order) / math.sqrt(order))


def lru_trained_like(order: int, width: int, *, seed: int = 0, bank: tuple[int, ...] = ()) -> DiagonalSystem:
    """An LRU layer as if trained: many slow modes, half of the phases near 0, few strong channels, unequal gains."""
    draw = _Draw(seed, bank)
    slow, near_zero = draw.uniform(order) < 0.25, draw.uniform(order) < 0.5
    gap = torch.where(slow, _log_uniform(draw.uniform(order), 1e-4, 3e-3), _log_uniform(draw.uniform(order), 3e-3, 0.1))
    phase = torch.where(near_zero, 0.5 * draw.uniform(order) ** 3, 6.28 * draw.uniform(order))
    channel = torch.arange(1, width + 1, dtype=torch.float64) ** -1.0
    gain = torch.exp(draw.normal(order)) * torch.sqrt(gap)
    B = gain[..., None] * draw.complex_normal(order, width) * channel
    C = draw.complex_normal(width, order) * channel[:, None] / math.sqrt(order)
    return DiagonalSystem.from_log_poles(torch.complex(torch.log1p(-gap), phase), B, C)


class _Draw:
    """Random tensors with the bank axes in front, from one seed."""

    def __init__(self, seed: int, bank: tuple[int, ...]) -> None:
        self.generator, self.bank = torch.Generator().manual_seed(seed), bank

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*self.bank, *shape, generator=self.generator, dtype=torch.float64)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*self.bank, *shape, generator=self.generator, dtype=torch.float64)

    def complex_normal(self, *shape: int) -> Tensor:
        return torch.complex(self.normal(*shape), self.normal(*shape))


def _log_uniform(uniform: Tensor, low: float, high: float) -> Tensor:
    return torch.exp(math.log(low) + uniform * math.log(high / low))


SYSTEMS: dict[str, Callable[..., DiagonalSystem]] = {"initial": lru_at_initialisation, "trained": lru_trained_like}


@dataclass(frozen=True)
class Case:
    """Reduce `members` LRU systems of `width` channels from `order` to `rank` in one call."""

    order: int
    rank: int
    width: int = 8
    members: int = 1
    kind: str = "initial"

    def __str__(self) -> str:
        return f"n = {self.order} → {self.rank}, {self.width} channels, {self.members} system(s), {self.kind}"


CPU_CASES = (
    *(Case(n, max(1, n // 4)) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)),
    Case(256, 64, kind="trained"),
    Case(384, 161, width=512),
)
GPU_CASES = (
    Case(256, 28),
    Case(384, 161, width=512, members=6),
    Case(161, 93, width=512, members=6),
    Case(384, 161, width=512, members=6, kind="trained"),
    Case(1024, 256),
)


def measure_reduction(
    cases: Iterable[Case] | None = None,
    *,
    device: str = "cpu",
    repeats: int = 9,
    compare: bool = True,
    progress: Progress = silent,
) -> Measurement:
    """Time each case; on the CPU with one thread and, if `compare`, beside the plain formulas."""
    if cases is None:
        cases = CPU_CASES if device == "cpu" else GPU_CASES
    title = "One reduction: Gramians, Hankel singular values, balancing, truncation, diagonalisation"
    row = partial(_row, compare=compare and device == "cpu")
    return measure_each("reduction", title, cases, row, device, repeats, progress)


def _row(case: Case, device: torch.device, repeats: int, compare: bool) -> Row:
    repeats = _affordable(repeats, case)
    bank = (case.members,) if case.members > 1 else ()
    system = SYSTEMS[case.kind](case.order, case.width, bank=bank).to(device)
    stages: dict[str, Callable[[], object]] = {
        "gramians": lambda: gramians(system),
        "hankel": lambda: hankel_singular_values(system),
        "balance": lambda: balanced_truncation(system, case.rank),
        "reduction": lambda: balanced_truncation(system, case.rank).diagonalise(),
    }
    row = columns(case, "order", "rank", "width", "members")
    row |= {"system": case.kind, "device": device.type, "repeats": repeats}
    row |= {f"{name}_s": median_seconds(work, repeats=repeats, device=device) for name, work in stages.items()}
    if compare and case.members == 1:
        row |= _plain_columns(system, case.rank, repeats)
        row["speedup"] = float(row["plain_reduction_s"]) / float(row["reduction_s"])
    return row


def _plain_columns(system: DiagonalSystem, rank: int, repeats: int) -> Row:
    given = PlainSystem.of(system)
    P, Q = plain_gramians(given)
    sigma, ours = plain_hankel_values(P, Q), hankel_singular_values(system).numpy()
    return {
        "plain_gramians_s": median_seconds(lambda: plain_gramians(given), repeats=repeats),
        "plain_hankel_s": median_seconds(lambda: plain_hankel_values(*plain_gramians(given)), repeats=repeats),
        "plain_reduction_s": median_seconds(lambda: plain_reduction(given, rank), repeats=repeats),
        "plain_hankel_difference": float(np.abs(sigma - ours).max() / ours[0]),
    }


def _affordable(repeats: int, case: Case) -> int:
    """Fewer repeats where one takes seconds, more where it takes milliseconds and noise is large."""
    if case.order >= 1024:
        return max(3, repeats // 3)
    return 3 * repeats if case.order <= 256 and repeats > 1 else repeats
