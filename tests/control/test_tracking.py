"""How Hankel singular values move: Weyl's bound, the paths of single values, and the shares of the small ones."""

import itertools

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm.control import (
    DenseSystem,
    DiagonalSystem,
    OrderChangedError,
    balanced_truncation,
    bottom_shares,
    hankel_change,
    hankel_hermitian,
    hankel_singular_values,
    numerical_rank,
    trajectories,
)
from tests import oracles
from tests.strategies import diagonal_systems
from tests.systems import lru_at_initialisation, lru_trained_like


def falling(*values):
    return torch.tensor(sorted(values, reverse=True), dtype=torch.float64)


def gramian_scale(system):
    """√(‖P‖ ‖Q‖): P^½ is known to 1e-8 of ‖P‖^½ where P is singular."""
    P, Q = oracles.gramians(*oracles.as_arrays(system))
    return float(np.sqrt(np.linalg.norm(P, 2) * np.linalg.norm(Q, 2)))


def hermitian_by_scipy(system):
    P, Q = oracles.gramians(*oracles.as_arrays(system))
    root = scipy.linalg.sqrtm(P)
    return scipy.linalg.sqrtm(root @ Q @ root)


def moved(system, size, seed):
    """One training step away: every number of the layer changed by about `size` of itself."""
    generator = torch.Generator().manual_seed(seed)
    shift = torch.rand(3, system.order, generator=generator, dtype=torch.float64)
    poles = system.poles * (1 - size * shift[0])
    poles = poles * torch.exp(1j * size * (shift[1] - 0.5)) if poles.is_complex() else poles
    return DiagonalSystem(poles, system.B * (1 + size * (shift[2, :, None] - 0.5)), system.C * (1 + size * shift[2]))


@given(diagonal_systems(max_order=24, max_channels=6))
def test_the_eigenvalues_of_H_are_the_hankel_singular_values(system):
    H = hankel_hermitian(system).numpy()
    scale = gramian_scale(system)
    np.testing.assert_allclose(H, H.conj().T, rtol=0, atol=1e-12 * scale)
    eigenvalues = np.linalg.eigvalsh(H)[::-1]
    np.testing.assert_allclose(eigenvalues, hankel_singular_values(system).numpy(), rtol=0, atol=1e-7 * scale)


@pytest.mark.parametrize("form", [lambda system: system, lambda system: DenseSystem(system.A, system.B, system.C)])
def test_H_is_the_root_of_its_definition(form):
    system = lru_at_initialisation(10, 6, seed=3)
    expected = hermitian_by_scipy(system)
    np.testing.assert_allclose(hankel_hermitian(form(system)).numpy(), expected, atol=1e-7 * np.abs(expected).max())


def test_a_bank_of_H_is_a_loop_over_its_members():
    bank = lru_trained_like(6, 3, bank=(2, 2))
    together = hankel_hermitian(bank)
    for i in range(2):
        for j in range(2):
            torch.testing.assert_close(together[i, j], hankel_hermitian(bank[i, j]), rtol=1e-9, atol=1e-9)


@given(diagonal_systems(max_order=16, max_channels=4), st.floats(1e-6, 0.5), st.integers(0, 2**32 - 1))
def test_no_value_moves_further_than_weyls_bound(before, size, seed):
    after = moved(before, size, seed)
    change = hankel_change(before, after)
    slack = 1e-7 * (gramian_scale(before) + gramian_scale(after))
    shift = (hankel_singular_values(after) - hankel_singular_values(before)).abs().max()
    assert shift <= change.weyl_bound + slack
    assert change.largest_shift <= change.weyl_bound * (1 + 1e-12) + 1e-6 * slack
    assert float(change.largest_shift) == pytest.approx(float(shift), abs=slack)


def test_weyls_bound_is_the_norm_of_the_change_of_H():
    before = lru_at_initialisation(8, 6, seed=1)
    after = moved(before, 0.05, seed=2)
    expected = np.linalg.norm(hermitian_by_scipy(after) - hermitian_by_scipy(before), 2)
    assert float(hankel_change(before, after).weyl_bound) == pytest.approx(expected, rel=1e-5)
    assert float(hankel_change(before, before).weyl_bound) == 0


def test_weyls_bound_shrinks_with_the_step():
    before = lru_at_initialisation(16, 4)
    bounds = [float(hankel_change(before, moved(before, size, seed=0)).weyl_bound) for size in (1e-2, 1e-4)]
    assert bounds[1] < 0.05 * bounds[0]


def test_a_change_across_a_cut_is_refused():
    before = lru_at_initialisation(8, 3)
    with pytest.raises(OrderChangedError, match=r"8 .*5"):
        hankel_change(before, balanced_truncation(before, 5).system)


def test_two_values_that_cross_are_followed_and_counted_once():
    k = np.arange(11)
    down, up = 2.05 - 0.1 * k, 1 + 0.1 * k
    found = trajectories([falling(a, b) for a, b in zip(down, up, strict=True)])
    np.testing.assert_allclose(found.values.numpy(), np.stack([down, up], axis=1))
    assert found.crossings.tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]


def test_two_values_that_meet_at_a_snapshot_and_pass_are_counted_once():
    k = np.arange(11)
    down, up = 2 - 0.125 * k, 0.75 + 0.125 * k  # equal at k = 5, exactly
    found = trajectories([falling(a, b) for a, b in zip(down, up, strict=True)])
    np.testing.assert_allclose(found.values.numpy(), np.stack([down, up], axis=1))
    assert found.crossings.sum() == 1


def test_two_values_that_come_near_and_part_do_not_cross():
    gap = (1.0, 0.6, 0.4, 0.6, 1.0)
    assert trajectories([falling(2 + g, 2 - g) for g in gap]).crossings.sum() == 0


def test_one_value_that_falls_through_two_others_crosses_twice():
    fall = np.linspace(3.03, 0.03, 13)
    found = trajectories([falling(x, 2.0, 1.0) for x in fall])
    np.testing.assert_allclose(found.values.numpy()[:, 0], fall)
    assert found.crossings.sum() == 2
    assert found.crossings.max() == 1


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=8, unique=True), st.floats(0.001, 3))
def test_parallel_motion_has_no_crossings_however_fast(hundredths, step):
    spectrum = falling(*hundredths) / 100
    found = trajectories([spectrum + k * step for k in range(5)])
    assert found.crossings.sum() == 0
    np.testing.assert_allclose(found.values[:, 0].numpy(), spectrum[0].item() + step * np.arange(5))


def test_a_cut_ends_the_trajectories_of_what_it_removes():
    nan = np.nan
    found = trajectories([falling(4, 3, 2, 1), falling(4.1, 3.1), falling(4.2, 3.2), falling(4.3)])
    expected = [[4, 3, 2, 1], [4.1, 3.1, nan, nan], [4.2, 3.2, nan, nan], [4.3, nan, nan, nan]]
    np.testing.assert_allclose(found.values.numpy(), expected)
    assert found.crossings.sum() == 0


def test_crossings_go_on_being_counted_after_a_cut():
    spectra = [falling(3, 2, 0.1), *(falling(3.05 - 0.1 * k, 2 + 0.1 * k) for k in range(11))]
    found = trajectories(spectra)
    assert found.crossings.sum() == 1
    assert float(found.values[-1, 0]) == pytest.approx(2.05)


@given(st.data())
def test_each_row_is_a_permutation_of_its_spectrum(data):
    lengths = sorted(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=6)), reverse=True)
    spectra = [falling(*data.draw(st.lists(st.floats(0, 5), min_size=n, max_size=n))) for n in lengths]
    found = trajectories(spectra)
    assert found.values.shape == (len(lengths), lengths[0])
    for row, spectrum in zip(found.values, spectra, strict=True):
        assert torch.equal(row[~row.isnan()].sort(descending=True).values, spectrum)


def test_a_single_spectrum_is_its_own_trajectory():
    found = trajectories([falling(3, 1)])
    assert found.values.tolist() == [[3, 1]]
    assert found.crossings.tolist() == [0]


def shares_by_a_loop(values):
    ordered = sorted(values)
    return [sum(ordered[:r]) / sum(ordered) for r in range(len(ordered) + 1)]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_bottom_shares_climb_from_0_to_1_as_a_loop_says(values):
    shares = bottom_shares(torch.tensor(values, dtype=torch.float64)).tolist()
    assert shares[0] == 0
    assert shares[-1] == 1
    assert all(a <= b for a, b in itertools.pairwise(shares))
    assert shares == pytest.approx(shares_by_a_loop(values), rel=1e-12)


def test_bottom_shares_of_a_bank_are_a_loop_over_its_members():
    sigma = hankel_singular_values(lru_trained_like(9, 3, bank=(2, 3)))
    shares = bottom_shares(sigma)
    for i in range(2):
        for j in range(3):
            assert shares[i, j].tolist() == pytest.approx(shares_by_a_loop(sigma[i, j].tolist()), rel=1e-12)


def test_bottom_shares_of_zeros_are_zero():
    assert bottom_shares(torch.zeros(3, dtype=torch.float64)).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_the_numerical_rank_counts_values_above_n_eps_of_the_largest(scale):
    floor = 4 * 2.0**-52
    sigma = scale * torch.tensor([[1, 1.01 * floor, 0.99 * floor, 0], [1, 1, 1, 1]], dtype=torch.float64)
    assert numerical_rank(sigma).tolist() == [2, 4]


def test_the_numerical_rank_of_zeros_is_zero():
    assert numerical_rank(torch.zeros(2, 5, dtype=torch.float64)).tolist() == [0, 0]


@pytest.mark.parametrize("reached", [1, 5, 12])
def test_the_numerical_rank_is_the_number_of_states_that_inputs_reach(reached):
    system = lru_at_initialisation(12, 8, seed=4)
    B = torch.where(torch.arange(12)[:, None] < reached, system.B, 0)
    assert int(numerical_rank(hankel_singular_values(DiagonalSystem(system.poles, B, system.C)))) == reached


def test_values_that_move_further_than_they_are_apart_are_followed_by_rank():
    """Expecting each to go on as it went sent large values through the small ones."""
    generator = torch.Generator().manual_seed(0)
    base = torch.logspace(2, 0, 60, dtype=torch.float64)
    noisy = [base * torch.exp(0.2 * torch.randn(60, generator=generator, dtype=torch.float64)) for _ in range(30)]
    spectra = [values.sort(descending=True).values for values in noisy]
    found = trajectories(spectra)
    assert torch.equal(found.values, torch.stack(spectra))
    assert int(found.crossings.sum()) == 0
