import numpy as np
import pytest
import torch
from hypothesis import given

from compressm.control import (
    DenseSystem,
    DiagonalSystem,
    IndefiniteGramianError,
    NonFiniteError,
    PrecisionError,
    UnstableSystemError,
    controllability_gramian,
    observability_gramian,
    solve_lyapunov,
)
from compressm.control.gramians import lyapunov_factor, lyapunov_residual
from tests import oracles
from tests.strategies import diagonal_systems
from tests.systems import lru_at_initialisation, lru_trained_like


def residual(A, P, M):
    return np.linalg.norm(A @ P @ A.conj().T - P + M) / max(np.linalg.norm(P), 1e-300)


@given(diagonal_systems())
def test_gramians_satisfy_their_equations(system):
    A, B, C = oracles.as_arrays(system)
    P, Q = controllability_gramian(system).numpy(), observability_gramian(system).numpy()
    assert residual(A, P, B @ B.conj().T) < 1e-13
    assert residual(A.conj().T, Q, C.conj().T @ C) < 1e-13


@given(diagonal_systems(max_order=24, max_channels=4))
def test_dense_gramians_have_a_relative_residual_below_1e_12(system):
    dense = in_another_basis(system)
    for form in (dense, dense.adjoint()):
        assert lyapunov_residual(form.A, form.B @ form.B.mH, controllability_gramian(form)) < 1e-12


def in_another_basis(system, seed=0):
    """The same system as seen from random coordinates of condition number below 10."""
    torch.manual_seed(seed)
    n = system.order
    U, _ = torch.linalg.qr(torch.randn(n, n, dtype=system.dtype))
    T = U * torch.logspace(0, 0.9, n, dtype=torch.float64)
    return DenseSystem._unchecked(torch.linalg.solve(T, system.A @ T), torch.linalg.solve(T, system.B), system.C @ T)


@pytest.mark.parametrize("seed", range(3))
def test_the_closed_form_agrees_with_scipy(seed):
    system = lru_at_initialisation(24, 3, seed=seed)
    P, Q = oracles.gramians(*oracles.as_arrays(system))
    np.testing.assert_allclose(controllability_gramian(system).numpy(), P, rtol=1e-9, atol=1e-11 * abs(P).max())
    np.testing.assert_allclose(observability_gramian(system).numpy(), Q, rtol=1e-9, atol=1e-11 * abs(Q).max())


def test_the_papers_formula_without_conjugates_is_wrong_for_complex_poles():
    system = lru_at_initialisation(8, 2)
    A, B, _ = oracles.as_arrays(system)
    poles = np.diag(A)
    without = (B @ B.T) / (1 - poles[:, None] * poles[None, :])
    assert residual(A, without, B @ B.conj().T) > 0.1
    assert residual(A, controllability_gramian(system).numpy(), B @ B.conj().T) < 1e-14


def test_the_doubling_solver_agrees_with_scipy_on_dense_systems():
    dense = in_another_basis(lru_at_initialisation(20, 3))
    P, Q = oracles.gramians(*oracles.as_arrays(dense))
    np.testing.assert_allclose(controllability_gramian(dense).numpy(), P, rtol=1e-8, atol=1e-10 * abs(P).max())
    np.testing.assert_allclose(observability_gramian(dense).numpy(), Q, rtol=1e-8, atol=1e-10 * abs(Q).max())


def test_the_doubling_solver_reaches_poles_at_1_minus_1e_8():
    poles = torch.tensor([1 - 1e-8, 0.5, -0.3, 0.0], dtype=torch.float64)
    system = DiagonalSystem(poles, torch.ones(4, 1, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64))
    dense = in_another_basis(system)
    assert lyapunov_residual(dense.A, dense.B @ dense.B.mH, controllability_gramian(dense)) < 1e-12


def test_an_input_covariance_colours_the_drive():
    system = lru_at_initialisation(6, 3)
    root = torch.randn(3, 3, dtype=torch.complex128)
    coloured = DiagonalSystem(system.poles, system.B @ root, system.C)
    for form in (system, DenseSystem(system.A, system.B, system.C)):
        torch.testing.assert_close(
            controllability_gramian(form, root @ root.mH), controllability_gramian(coloured), rtol=1e-10, atol=1e-12
        )


def test_a_bank_of_gramians_is_a_loop_over_its_members():
    bank = lru_trained_like(7, 2, bank=(2, 2))
    dense = DenseSystem(bank.A, bank.B, bank.C)
    for i in range(2):
        for j in range(2):
            expected = controllability_gramian(bank[i, j])
            torch.testing.assert_close(controllability_gramian(bank)[i, j], expected)
            torch.testing.assert_close(controllability_gramian(dense)[i, j], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("gap", [1e-3, 1e-8, 1e-12])
def test_slow_poles_lose_no_digits(gap):
    """One mode: P = |b|²/(1 − |λ|²) exactly; with nearby poles 1 − λᵢλ̄ⱼ must not cancel."""
    log_poles = torch.complex(
        torch.tensor([-gap, -2 * gap], dtype=torch.float64), torch.tensor([1.0, 1.0 + gap]).double()
    )
    ones = torch.ones(2, 1, dtype=torch.complex128)
    P = controllability_gramian(DiagonalSystem.from_log_poles(log_poles, ones, ones.mT))
    i, j = (complex(value) for value in log_poles)
    expected = -1 / np.expm1(np.array([[2 * i.real, i + j.conjugate()], [j + i.conjugate(), 2 * j.real]]))
    np.testing.assert_allclose(P.numpy(), expected, rtol=4e-15)


def test_the_factor_by_doubling_squares_to_the_gramian():
    dense = in_another_basis(lru_at_initialisation(9, 2))
    factor = lyapunov_factor(dense.A, dense.B)
    torch.testing.assert_close(factor @ factor.mH, controllability_gramian(dense), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loud", [1.0, 1e16, 1e18])
def test_a_quiet_member_of_a_bank_does_not_hide_behind_a_loud_one(loud):
    slow = torch.diag(torch.tensor([0.999, 0.99], dtype=torch.float64))
    A = torch.stack([torch.zeros(2, 2, dtype=torch.float64), slow])
    B = torch.stack([loud * torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)])
    factor = lyapunov_factor(A, B)[1]
    expected = torch.diag(1 / (1 - slow.diagonal() ** 2))
    torch.testing.assert_close(factor @ factor.mH, expected, rtol=1e-11, atol=0)


def test_the_public_solver_checks_what_it_is_given():
    eye = torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(solve_lyapunov(0.5 * eye, eye), eye / 0.75)
    with pytest.raises(UnstableSystemError, match=r"1\.1"):
        solve_lyapunov(1.1 * eye.float(), eye.float())
    with pytest.raises(PrecisionError, match="mixed"):
        solve_lyapunov(0.5 * eye, eye.float())
    with pytest.raises(IndefiniteGramianError, match="not Hermitian"):
        solve_lyapunov(0.5 * eye, eye + torch.tensor([[0, 1], [0, 0]], dtype=torch.float64))
    with pytest.raises(NonFiniteError, match="nan"):
        solve_lyapunov(torch.nan * eye, eye)
