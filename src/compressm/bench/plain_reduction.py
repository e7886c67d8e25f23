"""The paper's formulas as they stand, in NumPy and SciPy: the yardstick for `compressm bench reduction`.

Gramians by the closed form (with the conjugates it needs), σ = √spec(P Q), T from matrix square roots, T⁻¹ A T in
full, then a slice and a diagonalisation (sec:algorithm).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from compressm.control import DiagonalSystem

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


def plain_balance(system: PlainSystem, P: Array, Q: Array) -> tuple[Array, Array, Array]:
    """Steps 5 and 6: T = P^½ U Σ^{-½} with P^½ Q P^½ = U Σ² Uᴴ, and all of (T⁻¹ A T, T⁻¹ B, C T)."""
    root = scipy.linalg.sqrtm(P)
    U, squares, _ = np.linalg.svd(root @ Q @ root)
    T = root @ U / np.sqrt(np.sqrt(squares))
    inverse = np.linalg.inv(T)
    return inverse @ np.diag(system.poles) @ T, inverse @ system.B, system.C @ T


def plain_truncate(A: Array, B: Array, C: Array, order: int) -> PlainSystem:
    """Steps 7 and 8: slice, and diagonalise again."""
    poles, X = np.linalg.eig(A[:order, :order])
    return PlainSystem(poles, np.linalg.inv(X) @ B[:order], C[:, :order] @ X)


def plain_reduction(system: PlainSystem, order: int) -> PlainSystem:
    """All of it."""
    P, Q = plain_gramians(system)
    plain_hankel_values(P, Q)
    return plain_truncate(*plain_balance(system, P, Q), order)
