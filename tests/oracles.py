"""Truths that share no code with the package: loops, NumPy and SciPy."""

from __future__ import annotations

import numpy as np
import scipy.linalg
from numpy.typing import NDArray


def as_arrays(system) -> tuple[NDArray, NDArray, NDArray]:
    """(A, B, C) of a single system."""
    return tuple(tensor.detach().cpu().numpy() for tensor in (system.A, system.B, system.C))


def simulate_step_by_step(A, B, C, inputs):
    """h ← A h + B u, y = C h, one step after the other."""
    state = np.zeros(A.shape[0], dtype=np.result_type(A, B, inputs))
    outputs = []
    for u in inputs:
        state = A @ state + B @ u
        outputs.append(C @ state)
    return np.stack(outputs)


def finite_hankel_values(A, B, C, blocks: int):
    """Singular values of the block Hankel matrix [C A^{i+j} B], i, j < blocks: those of the system as blocks → ∞."""
    powers = [np.eye(A.shape[0], dtype=A.dtype)]
    for _ in range(2 * blocks - 2):
        powers.append(A @ powers[-1])
    markov = [C @ power @ B for power in powers]
    return np.linalg.svd(np.block([[markov[i + j] for j in range(blocks)] for i in range(blocks)]), compute_uv=False)


def gramians(A, B, C):
    """SciPy's discrete Lyapunov solver (Bartels–Stewart or bilinear), not the closed form."""
    return (
        scipy.linalg.solve_discrete_lyapunov(A, B @ B.conj().T),
        scipy.linalg.solve_discrete_lyapunov(A.conj().T, C.conj().T @ C),
    )


def transfer(A, B, C, omega):
    """C (I − e^{−iω} A)⁻¹ B at each frequency, by LU."""
    identity = np.eye(A.shape[0])
    return np.stack([C @ np.linalg.solve(identity - np.exp(-1j * w) * A, B) for w in omega])


def gain_on_a_grid(A, B, C, points: int) -> float:
    """Largest singular value over a plain uniform grid and the angles of the poles: a lower bound of the H∞ norm."""
    omega = np.concatenate([np.linspace(-np.pi, np.pi, points), np.angle(np.linalg.eigvals(A))])
    return max(np.linalg.norm(G, 2) for G in transfer(A, B, C, omega))


def difference(first, second):
    """(A, B, C) of the system G − G'."""
    (A1, B1, C1), (A2, B2, C2) = first, second
    return scipy.linalg.block_diag(A1, A2), np.concatenate([B1, B2]), np.concatenate([C1, -C2], axis=1)
