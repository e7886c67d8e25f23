"""Gramians measured on data: a plain mean of h hᴴ, and what balancing with it keeps of the theory."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from compressm.control import (
    DenseSystem,
    DiagonalSystem,
    StateCovariance,
    balanced_truncation,
    controllability_gramian,
    measured_gramian,
)
from tests import oracles
from tests.strategies import diagonal_systems
from tests.systems import lru_at_initialisation, lru_trained_like


def random_states(*shape, dtype=torch.complex128, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mean_outer_product(states):
    """E[h hᴴ] entry by entry, one sample after the other."""
    n = len(states[0])
    total = [[0j] * n for _ in range(n)]
    for h in states:
        for i in range(n):
            for j in range(n):
                total[i][j] += complex(h[i]) * complex(h[j]).conjugate()
    return np.array(total) / len(states)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_measured_gramian_is_the_plain_mean_of_outer_products(dtype):
    states = random_states(37, 4, dtype=dtype)
    measured = measured_gramian(states)
    assert measured.dtype == dtype
    np.testing.assert_allclose(measured.numpy(), mean_outer_product(states), rtol=1e-13, atol=1e-14)


def test_the_measured_gramian_is_hermitian_to_the_last_bit():
    measured = measured_gramian(random_states(1000, 9))
    assert torch.equal(measured, measured.mH)


@pytest.mark.parametrize("pieces", [(50,), (1, 49), (20, 20, 10), (1,) * 50])
def test_streaming_in_pieces_equals_one_go(pieces):
    states = random_states(50, 5)
    covariance = StateCovariance()
    for piece in states.split(pieces):
        covariance.add(piece)
    torch.testing.assert_close(covariance.gramian(), measured_gramian(states), rtol=1e-13, atol=1e-14)


def test_merging_weighs_each_accumulator_by_its_samples():
    states = random_states(50, 5)
    merged = StateCovariance().add(states[:7]).merge(StateCovariance().add(states[7:]))
    torch.testing.assert_close(merged.gramian(), measured_gramian(states), rtol=1e-13, atol=1e-14)


def test_merging_leaves_the_other_accumulator_as_it_was():
    other = StateCovariance().add(random_states(6, 3, seed=1))
    before = other.gramian()
    StateCovariance().merge(other).add(random_states(8, 3, seed=2))
    assert torch.equal(other.gramian(), before)


def test_an_empty_accumulator_is_neutral_on_both_sides():
    states = random_states(6, 3)
    expected = measured_gramian(states)
    assert torch.equal(StateCovariance().merge(StateCovariance().add(states)).gramian(), expected)
    assert torch.equal(StateCovariance().add(states).merge(StateCovariance()).gramian(), expected)


@pytest.mark.parametrize("padding", [torch.nan, torch.inf, 1e30])
def test_padding_is_ignored_whatever_it_holds(padding):
    states, mask = random_states(20, 3), torch.arange(20) % 3 != 0
    padded = torch.where(mask[:, None], states, padding)
    expected = mean_outer_product(states[mask])
    np.testing.assert_allclose(measured_gramian(padded, mask).numpy(), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("single", "double"), [(torch.float32, torch.float64), (torch.complex64, torch.complex128)])
def test_single_precision_states_are_accumulated_in_double(single, double):
    # 4096² = 2²⁴: a float32 sum that starts there cannot see a 1 any more.
    states = torch.ones(1001, 1, dtype=single)
    states[0] = 4096
    measured = measured_gramian(states)
    assert measured.dtype == double
    assert measured.real.item() * 1001 == pytest.approx(4096**2 + 1000, rel=1e-14)


def test_a_bank_of_measured_gramians_is_a_loop_over_its_members():
    states = random_states(2, 3, 20, 4)
    mask = torch.arange(20) < torch.tensor([[20, 1, 7], [4, 13, 2]])[..., None]
    bank = measured_gramian(states, mask)
    for i in range(2):
        for j in range(3):
            expected = mean_outer_product(states[i, j][mask[i, j]])
            np.testing.assert_allclose(bank[i, j].numpy(), expected, rtol=1e-12, atol=1e-13)


def states_under_white_noise(system, *, sequences, warm_up, length, seed):
    """The recurrence written out, with independent unit inputs."""
    A, B, _ = oracles.as_arrays(system)
    generator = np.random.default_rng(seed)
    h, visited = np.zeros((sequences, system.order), dtype=complex), []
    for k in range(warm_up + length):
        h = h @ A.T + generator.standard_normal((sequences, system.inputs)) @ B.T
        if k >= warm_up:
            visited.append(h)
    return torch.from_numpy(np.concatenate(visited))


def test_white_noise_measures_the_exact_gramian():
    system = lru_at_initialisation(6, 2, seed=3)
    exact = controllability_gramian(system)
    deviation = torch.sqrt(exact.diagonal().real)
    states = states_under_white_noise(system, sequences=512, warm_up=600, length=600, seed=0)
    correlation_error = (measured_gramian(states) - exact).abs() / (deviation[:, None] * deviation[None, :])
    assert correlation_error.max() < 0.05
    # The measurement is sharp enough to tell P from its conjugate.
    assert ((exact.mT - exact).abs() / (deviation[:, None] * deviation[None, :])).max() > 0.2


def spectral_radius(truncation):
    return np.abs(np.linalg.eigvals(truncation.system.A.numpy())).max()


@given(diagonal_systems(max_order=16, max_channels=4), st.data())
def test_truncation_with_any_semidefinite_P_is_stable_and_claims_no_bound(system, data):
    n = system.order
    rank, order = data.draw(st.integers(1, n)), data.draw(st.integers(1, n))
    root = random_states(n, rank, dtype=system.dtype, seed=data.draw(st.integers(0, 2**32 - 1)))
    truncation = balanced_truncation(system, order, P=root @ root.mH)
    assert truncation.error_bound is None
    assert spectral_radius(truncation) < 1


@given(diagonal_systems(max_order=16, max_channels=4), st.data())
def test_both_projections_are_biorthogonal_with_any_P(system, data):
    n = system.order
    root = random_states(n, data.draw(st.integers(1, n)), dtype=system.dtype, seed=data.draw(st.integers(0, 2**32 - 1)))
    truncation = balanced_truncation(system, data.draw(st.integers(1, n)), P=root @ root.mH)
    kept = truncation.sigma[: truncation.order]
    assume(kept[0] > 0)
    product = truncation.left.mH @ truncation.right
    # Rounding of σ₁ is seen through the scaling 1/σᵣ of the last column.
    tolerance = 1e-14 * n * float(kept[0] / kept[-1])
    torch.testing.assert_close(product, torch.eye(truncation.order).to(product), rtol=0, atol=tolerance)


def system_with_tied_poles(seed):
    """Two poles, six times each, one output: the exact Q has rank two."""
    radius, phase = torch.tensor([[0.999, 0.9], [0.3, 1.0]], dtype=torch.float64)
    poles = torch.polar(radius, phase).repeat(6)
    return DiagonalSystem(poles, random_states(12, 1, seed=seed), random_states(1, 12, seed=seed + 1))


@pytest.mark.parametrize("order", [2, 4, 6, 8, 12])
def test_states_that_no_output_sees_are_not_kept_and_do_not_destabilise(order):
    for seed in range(0, 20, 2):
        root = random_states(12, 12, seed=seed + 100)
        truncation = balanced_truncation(system_with_tied_poles(seed), order, P=root @ root.mH)
        assert spectral_radius(truncation) < 1
        assert truncation.order == 2


@pytest.mark.parametrize("samples", [1, 4, 9])
def test_an_order_above_the_rank_of_P_keeps_the_rank(samples):
    P = measured_gramian(random_states(samples, 16))
    assert balanced_truncation(lru_at_initialisation(16, 4), 12, P=P).order == samples


@pytest.mark.parametrize("form", [lambda system: system, lambda system: DenseSystem(system.A, system.B, system.C)])
@pytest.mark.parametrize("make", [lru_at_initialisation, lru_trained_like])
def test_the_exact_gramian_as_P_gives_the_ordinary_truncation(make, form):
    system = form(make(24, 4, seed=5))
    ordinary = balanced_truncation(system, 6)
    measured = balanced_truncation(system, 6, P=controllability_gramian(system))
    torch.testing.assert_close(measured.sigma, ordinary.sigma, rtol=1e-9, atol=1e-12 * float(ordinary.sigma[0]))
    omega = np.linspace(-np.pi, np.pi, 101)
    first, second = (oracles.transfer(*oracles.as_arrays(t.system), omega) for t in (ordinary, measured))
    np.testing.assert_allclose(second, first, rtol=0, atol=1e-8 * abs(first).max())


def test_a_bank_truncated_with_measured_P_is_a_loop_over_its_members():
    bank = lru_at_initialisation(12, 3, seed=2, bank=(3,))
    P = measured_gramian(random_states(3, 40, 12))
    together = balanced_truncation(bank, 5, P=P)
    omega = np.linspace(-np.pi, np.pi, 31)
    for i in range(3):
        alone = oracles.transfer(*oracles.as_arrays(balanced_truncation(bank[i], 5, P=P[i]).system), omega)
        member = oracles.transfer(*oracles.as_arrays(together.system[i]), omega)
        np.testing.assert_allclose(member, alone, rtol=0, atol=1e-9 * abs(alone).max())


def test_the_measured_P_of_narrow_inputs_serves_those_inputs_better():
    """Only channel 0 of 4 is fed: balancing by what is visited must beat balancing by white noise on that channel."""
    system = lru_at_initialisation(32, 4, seed=1)
    fed = DiagonalSystem(system.poles, system.B[:, :1], system.C)
    P = controllability_gramian(fed)
    omega = np.linspace(-np.pi, np.pi, 801)
    exact = oracles.transfer(*oracles.as_arrays(fed), omega)
    errors = {}
    for name, truncation in {
        "white": balanced_truncation(system, 8),
        "measured": balanced_truncation(system, 8, P=P),
    }.items():
        A, B, C = oracles.as_arrays(truncation.system)
        errors[name] = np.sqrt((np.abs(oracles.transfer(A, B[:, :1], C, omega) - exact) ** 2).mean())
    assert errors["measured"] < 0.8 * errors["white"]


@pytest.mark.parametrize("dense", [False, True])
def test_a_complex_input_covariance_of_a_real_system_keeps_its_imaginary_part(dense):
    poles = torch.tensor([0.9, -0.5, 0.3], dtype=torch.float64)
    B = torch.tensor([[1.0, 0], [0, 1], [1, 1]], dtype=torch.float64)
    covariance = torch.tensor([[2, 1 + 0.5j], [1 - 0.5j, 1]], dtype=torch.complex128)
    system = DenseSystem(poles.diag(), B, B.mT) if dense else DiagonalSystem(poles, B, B.mT)
    expected = (B + 0j).numpy() @ covariance.numpy() @ B.mT.numpy() / (1 - np.outer(poles, poles))
    np.testing.assert_allclose(controllability_gramian(system, covariance).numpy(), expected, rtol=1e-13, atol=1e-14)
