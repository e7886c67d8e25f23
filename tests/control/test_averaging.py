"""Averages over data that stand in for a time-varying system: means (the paper's), and second moments."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from compressm.control import (
    DenseSystem,
    DiagonalSystem,
    controllability_gramian,
    mean_dynamics,
    mean_selective_system,
    observability_gramian,
    second_moment_gramians,
    second_moment_system,
)
from tests import oracles


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def semidefinite(*bank, n, seed=0, dtype=torch.float64):
    root = normal(*bank, n, n + 1, seed=seed, dtype=dtype)
    return root @ root.mH


def sampled_matrices(samples=6, n=4, seed=0, dtype=torch.complex128, bank=()):
    B, C = (
        normal(*bank, samples, n, 2, seed=seed, dtype=dtype),
        normal(*bank, samples, 3, n, seed=seed + 1, dtype=dtype),
    )
    return B, C


def mean_by_a_loop(samples):
    total = np.zeros(samples.shape[1:], dtype=complex)
    for sample in samples.numpy():
        total = total + sample
    return total / len(samples)


def test_stable_diagonal_means_are_plain_means():
    poles = 0.9 * torch.tanh(normal(6, 4)) * torch.exp(1j * normal(6, 4, seed=1))
    B, C = sampled_matrices()
    system = mean_dynamics(poles, B, C)
    assert isinstance(system, DiagonalSystem)
    for found, samples in ((system.poles, poles), (system.B, B), (system.C, C)):
        np.testing.assert_allclose(found.numpy(), mean_by_a_loop(samples), rtol=1e-14, atol=1e-15)


def test_stable_dense_means_are_plain_means():
    A = 0.2 * normal(6, 4, 4)
    B, C = sampled_matrices()
    assert np.abs(np.linalg.eigvals(A.mean(0).numpy())).max() < 0.9
    system = mean_dynamics(A, B, C)
    assert isinstance(system, DenseSystem)
    for found, samples in ((system.A, A), (system.B, B), (system.C, C)):
        np.testing.assert_allclose(found.numpy(), mean_by_a_loop(samples), rtol=1e-14, atol=1e-15)


def test_a_mean_pole_outside_is_pulled_back_along_its_ray_and_the_others_stay():
    outside, inside = 1.5 * np.exp(0.7j), 0.5 * np.exp(-2j)
    B, C = sampled_matrices(samples=2, n=2)
    poles = torch.tensor([[outside + 0.1, inside], [outside - 0.1, inside]])
    system = mean_dynamics(poles, B, C, largest_radius=0.98)
    np.testing.assert_allclose(system.poles.numpy(), [0.98 * np.exp(0.7j), inside], rtol=1e-14)


def test_samples_that_are_all_stable_can_have_an_unstable_mean_which_is_scaled_back():
    """Two nilpotent matrices whose mean [[0, 2], [2, 0]] has radius 2."""
    A = torch.tensor([[[0, 4.0], [0, 0]], [[0, 0], [4, 0]]], dtype=torch.float64)
    B, C = sampled_matrices(samples=2, n=2, dtype=torch.float64)
    system = mean_dynamics(A, B, C, largest_radius=0.95)
    np.testing.assert_allclose(system.A.numpy(), [[0, 0.95], [0.95, 0]], rtol=1e-14)
    P, _ = oracles.gramians(*oracles.as_arrays(system))
    np.testing.assert_allclose(controllability_gramian(system).numpy(), P, rtol=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_every_regularised_mean_is_stable(seed):
    B, C = sampled_matrices(seed=seed)
    diagonal = mean_dynamics(3 * normal(6, 4, seed=seed, dtype=torch.complex128), B, C)
    dense = mean_dynamics(3 * normal(6, 4, 4, seed=seed), B, C)
    for system in (diagonal, dense):
        radius = np.abs(np.linalg.eigvals(system.A.numpy())).max()
        assert radius == pytest.approx(1 - 1e-6, abs=1e-9)


def test_only_the_unstable_member_of_a_bank_is_touched():
    A = torch.stack([0.2 * normal(6, 4, 4), 5 * normal(6, 4, 4, seed=1)])
    B, C = sampled_matrices(bank=(2,))
    system = mean_dynamics(A, B, C, largest_radius=0.9)
    np.testing.assert_allclose(system.A[0].numpy(), mean_by_a_loop(A[0]), rtol=1e-13, atol=1e-15)
    radius = np.abs(np.linalg.eigvals(mean_by_a_loop(A[1]))).max()
    np.testing.assert_allclose(system.A[1].numpy(), mean_by_a_loop(A[1]) * 0.9 / radius, rtol=1e-12)


def test_the_mean_selective_system_is_exp_mean_step_times_rate():
    rates = -torch.exp(normal(3, 5))
    step, B, C = torch.exp(normal(3, seed=3)), normal(3, 5, seed=1), normal(3, 5, seed=2)
    system = mean_selective_system(rates, step, B, C)
    for i in range(3):
        for j in range(5):
            assert system.poles[i, j].item() == pytest.approx(math.exp(step[i].item() * rates[i, j].item()), rel=1e-14)
            assert system.B[i, j, 0].item() == pytest.approx(step[i].item() * B[i, j].item(), rel=1e-14)
            assert system.C[i, 0, j].item() == C[i, j].item()


def test_a_mean_selective_pole_too_near_1_is_pulled_back_alone():
    rates = torch.tensor([-1e-9, -1.0], dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)
    system = mean_selective_system(rates, torch.tensor(0.1, dtype=torch.float64), ones, ones, largest_radius=0.999)
    assert system.poles[0] == 0.999
    assert system.poles[1].item() == pytest.approx(math.exp(-0.1), rel=1e-14)


def test_the_second_moment_system_has_the_gramians_of_the_moments():
    poles = 0.99 * torch.tanh(normal(2, 4)) * torch.exp(1j * normal(2, 4, seed=1))
    moment_B, moment_C = (semidefinite(2, n=4, seed=seed, dtype=torch.complex128) for seed in (2, 3))
    system = second_moment_system(poles, moment_B, moment_C)
    for member in range(2):
        pole = poles[member].numpy()
        P = moment_B[member].numpy() / (1 - pole[:, None] * pole[None, :].conj())
        Q = moment_C[member].numpy() / (1 - pole[:, None].conj() * pole[None, :])
        np.testing.assert_allclose(controllability_gramian(system)[member].numpy(), P, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(observability_gramian(system)[member].numpy(), Q, rtol=1e-11, atol=1e-12)


def test_rank_deficient_moments_are_factored():
    poles = torch.tensor([0.5, -0.3, 0.9], dtype=torch.float64)
    b, c = normal(3, 1), normal(1, 3, seed=1)
    P, Q = oracles.gramians(np.diag(poles.numpy()), b.numpy(), c.numpy())
    system = second_moment_system(poles, b @ b.mT, c.mT @ c)
    np.testing.assert_allclose(controllability_gramian(system).numpy(), P, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(observability_gramian(system).numpy(), Q, rtol=1e-12, atol=1e-13)


def random_input_matrices(generator, shape):
    """Bₖ: a mean, and around it a correlated deviation as large."""
    mean, mixing = np.array([1.0, -0.5, 0.3]), np.array([[1.0, 0, 0], [0.8, 0.5, 0], [-0.6, 0.2, 0.7]])
    return mean + generator.standard_normal((*shape, 3)) @ mixing.T, mean, mixing


def test_white_time_varying_B_visits_the_gramian_of_its_second_moment():
    """h ← λ h + Bₖ uₖ with Bₖ and uₖ fresh in every step, in 8000 runs of 300 steps."""
    poles = np.array([0.97, 0.9, -0.6])
    generator = np.random.default_rng(0)
    h = np.zeros((8000, 3))
    for _ in range(300):
        B, mean, mixing = random_input_matrices(generator, (8000,))
        h = poles * h + B * generator.standard_normal((8000, 1))
    visited = h.T @ h / 8000
    moment = torch.from_numpy(np.outer(mean, mean) + mixing @ mixing.T)
    P = controllability_gramian(second_moment_system(torch.from_numpy(poles), moment, torch.eye(3).double())).numpy()
    deviation = np.sqrt(np.diag(P))
    assert np.abs((visited - P) / np.outer(deviation, deviation)).max() < 0.06
    # The system of the mean B misses most of it.
    by_the_mean = np.outer(mean, mean) / (1 - np.outer(poles, poles))
    assert np.abs((visited - by_the_mean) / np.outer(deviation, deviation)).max() > 0.3


def test_white_time_varying_C_weighs_states_by_the_gramian_of_its_second_moment():
    """E Σₖ |Cₖ Aᵏ x|² = xᵀ Q x, in 20 000 runs."""
    poles, x = np.array([0.8, 0.5, -0.6]), np.array([1.0, 2.0, -1.0])
    C, mean, mixing = random_input_matrices(np.random.default_rng(1), (20_000, 60))
    states = poles ** np.arange(60)[:, None] * x
    energy = (np.einsum("skn,kn->sk", C, states) ** 2).sum(1).mean()
    moment = torch.from_numpy(np.outer(mean, mean) + mixing @ mixing.T)
    Q = observability_gramian(second_moment_system(torch.from_numpy(poles), torch.eye(3).double(), moment)).numpy()
    assert x @ Q @ x == pytest.approx(energy, rel=0.03)


@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_second_moment_gramians_solve_the_continuous_lyapunov_equation(n):
    rates = -torch.exp(normal(3, n))
    moment_B, moment_C = semidefinite(3, n=n, seed=1), semidefinite(3, n=n, seed=2)
    P, Q = second_moment_gramians(rates, moment_B, moment_C)
    for i in range(3):
        A = np.diag(rates[i].numpy())
        for found, moment in ((P[i].numpy(), moment_B[i].numpy()), (Q[i].numpy(), moment_C[i].numpy())):
            np.testing.assert_allclose(A @ found + found @ A.T + moment, 0, atol=1e-13 * np.abs(moment).max())
            expected = scipy.linalg.solve_continuous_lyapunov(A, -moment)
            np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12 * np.abs(expected).max())


def test_second_moment_gramians_are_the_limit_of_small_steps():
    """P/Δ of the discrete system (exp(Δa), Δ²S) tends to the continuous P, with an error of order Δ."""
    rates, moment = -torch.exp(normal(4)), semidefinite(n=4, seed=1)
    P, _ = second_moment_gramians(rates, moment, moment)
    gaps = []
    for step in (1e-3, 1e-4):
        poles = torch.exp(step * rates)
        discrete = step**2 * moment / (1 - poles[:, None] * poles[None, :])
        gaps.append((discrete / step - P).abs().max().item())
    assert gaps[1] == pytest.approx(gaps[0] / 10, rel=0.01)
