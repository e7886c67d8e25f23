import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressm.control import (
    DenseSystem,
    balanced_truncation,
    controllability_gramian,
    diagonalise,
    error_bounds,
    h_infinity_norm,
    hankel_singular_values,
    input_output_ratio,
    observability_gramian,
)
from compressm.control import balancing as balancing_module
from tests import oracles
from tests.strategies import diagonal_systems, few
from tests.systems import lru_at_initialisation, lru_trained_like


def check_bound_and_stability(system, order, points=64):
    truncation = balanced_truncation(system, order)
    reduced = truncation.system
    assert np.abs(np.linalg.eigvals(reduced.A.numpy())).max() < 1
    # Both gains are lower bounds of the true error: ours, refined around peaks, and NumPy's on a plain grid.
    plain = oracles.gain_on_a_grid(*oracles.difference(oracles.as_arrays(system), oracles.as_arrays(reduced)), points)
    refined = system.h_infinity_error(reduced).item()
    rounding = 1e-9 * h_infinity_norm(system).item() + 1e-12
    assert refined >= plain * (1 - 1e-6) - rounding
    assert refined <= truncation.error_bound.item() + rounding


@few
@given(system=diagonal_systems(), data=st.data())
def test_truncation_error_is_within_the_bound_and_the_result_is_stable(system, data):
    check_bound_and_stability(system, data.draw(st.integers(1, system.order)))


@pytest.mark.slow
@settings(max_examples=1000)
@given(system=diagonal_systems(), data=st.data())
def test_truncation_error_is_within_the_bound_on_a_thousand_systems(system, data):
    check_bound_and_stability(system, data.draw(st.integers(1, system.order)))


@few
@given(system=diagonal_systems(max_order=32, max_channels=4), data=st.data())
def test_for_any_selection_the_error_is_within_twice_the_sum_of_the_dropped_values(system, data):
    kept = data.draw(st.lists(st.integers(0, system.order - 1), min_size=1, unique=True))
    truncation = balanced_truncation(system, states=kept)
    dropped = 2 * sum(float(s) for i, s in enumerate(truncation.sigma) if i not in kept)
    rounding = 1e-9 * h_infinity_norm(system).item() + 1e-12
    floor = 16 * system.order * 2**-52 * truncation.sigma.max().item() / (1 - system.poles.abs().max().item())
    assert truncation.error_bound.item() == pytest.approx(dropped + floor, rel=1e-9, abs=1e-300)
    assert system.h_infinity_error(truncation.system).item() <= dropped + rounding
    assert np.abs(np.linalg.eigvals(truncation.system.A.numpy())).max() < 1


def test_the_tail_bound_does_not_hold_for_other_selections():
    system = lru_trained_like(16, 2)
    smallest = balanced_truncation(system, states=list(range(8, 16)))
    assert system.h_infinity_error(smallest.system) > error_bounds(smallest.sigma)[8]


@pytest.mark.parametrize("make", [lru_at_initialisation, lru_trained_like])
@pytest.mark.parametrize("order", [4, 16, 32])
def test_gramians_of_the_balanced_system_are_equal_and_diagonal(make, order):
    truncation = balanced_truncation(make(32, 8), 32)
    balanced = truncation.system
    sigma = torch.diag(truncation.sigma).to(torch.complex128)
    tolerance = 1e-8 * truncation.sigma[0].item()
    torch.testing.assert_close(controllability_gramian(balanced), sigma, rtol=0, atol=tolerance)
    torch.testing.assert_close(observability_gramian(balanced), sigma, rtol=0, atol=tolerance)
    part = balanced_truncation(make(32, 8), order)
    torch.testing.assert_close(part.left.mH @ part.right, torch.eye(order, dtype=torch.complex128), rtol=0, atol=1e-12)


@few
@given(diagonal_systems(max_order=24, max_channels=4))
def test_keeping_every_state_keeps_the_system(system):
    truncation = balanced_truncation(system, system.order)
    scale = h_infinity_norm(system).item() + 1e-300
    assert system.h_infinity_error(truncation.system).item() <= 1e-8 * scale


def test_the_result_is_the_projection_of_the_system():
    system = lru_trained_like(24, 3)
    for truncation in (balanced_truncation(system, 7), balanced_truncation(system, 7).diagonalise()):
        W, T = truncation.left, truncation.right
        torch.testing.assert_close(W.mH @ system.A @ T, truncation.system.A, rtol=0, atol=1e-12)
        torch.testing.assert_close(W.mH @ system.B, truncation.system.B, rtol=0, atol=1e-12)
        torch.testing.assert_close(system.C @ T, truncation.system.C, rtol=0, atol=1e-12)
        torch.testing.assert_close(W.mH @ T, torch.eye(7, dtype=torch.complex128), rtol=0, atol=1e-12)


def test_both_routes_give_the_same_reduction(monkeypatch):
    for make, order in ((lru_at_initialisation, 16), (lru_trained_like, 8)):
        system = make(64, 8, seed=2)
        fast = balanced_truncation(system, order)
        with monkeypatch.context() as patch:
            patch.setattr(balancing_module, "_TRUSTED", 2.0)  # trust no member: the SVD for all
            exact = balanced_truncation(system, order)
        assert fast.system.h_infinity_error(exact.system) < 1e-10 * h_infinity_norm(system)
        assert (fast.sigma - exact.sigma).abs().max() < 1e-14 * exact.sigma[0]


def test_the_spectrum_of_a_truncation_is_the_spectrum_of_the_system():
    for make in (lru_at_initialisation, lru_trained_like):
        for width in (1, 8):
            system = make(128, width)
            sigma = hankel_singular_values(system)
            assert (balanced_truncation(system, 5).sigma - sigma).abs().max() < 1e-13 * sigma[0]


def test_a_bank_of_truncations_is_a_loop_over_its_members():
    bank = lru_trained_like(20, 2, bank=(2, 2))
    whole = balanced_truncation(bank, 6)
    for i in range(2):
        for j in range(2):
            alone = balanced_truncation(bank[i, j], 6)
            assert whole.system[i, j].h_infinity_error(alone.system) < 1e-10 * h_infinity_norm(bank[i, j])
            torch.testing.assert_close(whole.error_bound[i, j], alone.error_bound, rtol=1e-10, atol=1e-12)


def test_a_bank_may_keep_other_states_in_every_member():
    bank = lru_at_initialisation(10, 2, bank=(2,))
    states = torch.tensor([[0, 3, 5], [1, 2, 9]])
    whole = balanced_truncation(bank, states=states)
    for i in range(2):
        alone = balanced_truncation(bank[i], states=states[i].tolist())
        assert whole.system[i].h_infinity_error(alone.system) < 1e-10 * h_infinity_norm(bank[i])


def test_an_order_above_the_numerical_rank_keeps_that_many_states():
    system = lru_at_initialisation(16, 4)
    equal = type(system)(torch.full_like(system.poles, 0.9), system.B, system.C)
    truncation = balanced_truncation(equal, 12)
    assert truncation.order == 4
    assert equal.h_infinity_error(truncation.system) < 1e-12 * h_infinity_norm(equal)


def test_diagonalising_keeps_the_system_and_the_ratio_of_the_layer():
    system = lru_trained_like(32, 4)
    truncation = balanced_truncation(system, 12).diagonalise()
    reduced = truncation.system
    assert balanced_truncation(system, 12).system.h_infinity_error(reduced) < 1e-10 * h_infinity_norm(system)
    sizes = reduced.B.norm(dim=-1) / reduced.decay.sqrt() / reduced.C.norm(dim=-2)
    torch.testing.assert_close(sizes, input_output_ratio(system).expand(12))
    even = diagonalise(truncation.system)
    torch.testing.assert_close(input_output_ratio(even), torch.tensor(1.0, dtype=torch.float64))


def test_members_side_by_side_on_threads_diagonalise_like_one_after_the_other():
    bank = balanced_truncation(lru_at_initialisation(16, 2, bank=(5,)), 6).system
    alone = diagonalise(bank)
    torch.set_num_threads(3)
    try:
        together = diagonalise(bank)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone.poles, together.poles)
    assert torch.equal(alone.B, together.B)


def test_a_gradient_flowing_into_the_system_does_not_disturb_a_truncation():
    system = lru_at_initialisation(8, 2)
    leaf = system.B.clone().requires_grad_()
    truncation = balanced_truncation(type(system)(system.poles, leaf, system.C), 4)
    assert not truncation.system.A.requires_grad


def test_a_dense_system_is_truncated_like_its_diagonal_form():
    system = lru_at_initialisation(20, 3)
    dense = balanced_truncation(DenseSystem(system.A, system.B, system.C), 7)
    diagonal = balanced_truncation(system, 7)
    assert dense.system.h_infinity_error(diagonal.system) < 1e-8 * h_infinity_norm(system)
    assert dense.error_bound.item() == pytest.approx(diagonal.error_bound.item(), rel=1e-8)


def test_error_bounds_are_twice_the_tails_at_every_order():
    sigma = torch.tensor([4.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(error_bounds(sigma), torch.tensor([15.0, 7.0, 3.0, 1.0, 0.0], dtype=torch.float64))
    assert error_bounds(sigma.expand(2, 3, 4)).shape == (2, 3, 5)
