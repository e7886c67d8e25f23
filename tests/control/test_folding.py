import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm.control import (
    DiagonalSystem,
    balanced_truncation,
    conjugate_pairs,
    controllability_gramian,
    fold,
    h2_error,
    h2_norm,
    h_infinity_norm,
    hankel_singular_values,
    observability_gramian,
    real_balanced_truncation,
    real_form,
)
from compressm.control.folding import _real_gramians
from tests.marks import later
from tests.strategies import diagonal_systems, few
from tests.systems import lru_at_initialisation, lru_trained_like


def real_error(system, reduced):
    """‖Re G − Re G_r‖∞ over real inputs."""
    return conjugate_pairs(system).h_infinity_error(conjugate_pairs(reduced)).item()


@given(diagonal_systems(max_order=24, max_channels=4), st.integers(0, 100))
def test_folding_leaves_the_real_output_unchanged(system, seed):
    inputs = torch.randn(50, system.inputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    before, after = system.simulate(inputs), fold(system).simulate(inputs)
    before, after = (y.real if y.is_complex() else y for y in (before, after))
    assert (after - before).abs().max() <= 1e-12 * (before.abs().max() + system.B.norm() * system.C.norm())


@pytest.mark.parametrize("make", [lru_at_initialisation, lru_trained_like])
def test_folding_leaves_the_real_output_of_an_lru_unchanged_to_1e_12(make):
    system = make(64, 8)
    inputs = torch.randn(200, 8, dtype=torch.float64)
    before, after = system.simulate(inputs).real, fold(system).simulate(inputs).real
    assert (after - before).norm() <= 1e-12 * before.norm()


def test_folded_poles_lie_in_the_upper_half_disc():
    system = lru_at_initialisation(64, 2)
    assert (system.poles.imag < 0).any()
    for form in (system, DiagonalSystem(system.poles, system.B, system.C)):
        folded = fold(form)
        assert (folded.poles.imag >= 0).all()
        torch.testing.assert_close(folded.poles.abs(), form.poles.abs())
    assert (fold(system).log_poles.imag <= torch.pi).all()
    assert (fold(system).log_poles.imag >= 0).all()


def test_folding_twice_is_folding_once_and_a_real_system_needs_none():
    folded = fold(lru_at_initialisation(16, 2))
    assert torch.equal(fold(folded).poles, folded.poles)
    real = DiagonalSystem(*(torch.full(shape, 0.5, dtype=torch.float64) for shape in ((3,), (3, 1), (1, 3))))
    assert fold(real) is real


def test_the_real_form_and_the_conjugate_pairs_compute_the_real_output():
    system = lru_trained_like(12, 3)
    inputs = torch.randn(60, 3, dtype=torch.float64)
    expected = system.simulate(inputs).real
    torch.testing.assert_close(real_form(system).simulate(inputs), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(conjugate_pairs(system).simulate(inputs).real, expected, rtol=1e-10, atol=1e-12)
    assert conjugate_pairs(system).simulate(inputs).imag.abs().max() < 1e-10 * expected.abs().max()


def test_real_gramians_in_closed_form_solve_the_equations_of_the_real_form():
    system = lru_at_initialisation(10, 2)
    P, Q = _real_gramians(system)
    real = real_form(system)
    torch.testing.assert_close(P, controllability_gramian(real), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(Q, observability_gramian(real), rtol=1e-9, atol=1e-11)


@few
@given(system=diagonal_systems(max_order=20, max_channels=3).filter(lambda s: s.poles.is_complex()), data=st.data())
def test_real_balancing_is_stable_and_within_its_bound(system, data):
    order = data.draw(st.integers(1, system.order))
    truncation = real_balanced_truncation(system, order)
    assert truncation.system.order == order
    assert truncation.system.poles.abs().max() < 1
    # The reduced poles are eigenvalues of a dense matrix, right to ε, and so a resonance to ε/(1 − |λ|).
    rounding = (1e-11 + 1e-14 / system.decay.min().item()) * h_infinity_norm(conjugate_pairs(system)).item() + 1e-300
    assert real_error(system, truncation.system) <= truncation.error_bound.item() + rounding


@pytest.mark.parametrize("seed", later(range(3), 0))
def test_real_balancing_and_folding_beat_plain_balancing_on_dense_spectra(seed):
    system = lru_at_initialisation(128, 4, seed=seed)
    whole = conjugate_pairs(system)

    def error(reduced):
        return (h2_error(whole, conjugate_pairs(reduced)) / h2_norm(whole)).item()

    plain, folded = (error(balanced_truncation(s, 48).diagonalise().system) for s in (system, fold(system)))
    real = error(real_balanced_truncation(system, 48).system)
    assert folded < plain
    assert real < 1.05 * folded


def test_real_balancing_reports_the_spectrum_of_the_real_form():
    system = lru_at_initialisation(12, 2)
    truncation = real_balanced_truncation(system, 5)
    torch.testing.assert_close(truncation.sigma, hankel_singular_values(real_form(system)), rtol=1e-9, atol=1e-11)
    assert truncation.real_order <= 10


def test_a_bank_of_real_truncations_is_a_loop_over_its_members():
    bank = lru_at_initialisation(10, 2, bank=(3,))
    whole = real_balanced_truncation(bank, 4)
    for i in range(3):
        alone = real_balanced_truncation(bank[i], 4)
        assert whole.real_order[i] == alone.real_order
        np.testing.assert_allclose(whole.error_bound[i].item(), alone.error_bound.item(), rtol=1e-9)
        assert real_error(whole.system[i], alone.system) < 1e-9


def test_real_balancing_survives_poles_that_cluster_on_the_real_axis():
    """Its Gramians are singular to rounding there; factors of them would be noise."""
    generator = torch.Generator().manual_seed(0)
    phases = 1e-8 * torch.rand(17, generator=generator, dtype=torch.float64)
    poles = torch.polar(0.3 + 0.6 * torch.rand(17, generator=generator, dtype=torch.float64), phases)
    gains = torch.randn(2, 17, 3, generator=generator, dtype=torch.float64)
    gains = torch.complex(gains[0], gains[1])
    system = DiagonalSystem(poles, gains[:, :2], gains[:, 2:].mT)
    for order in (4, 9, 13, 17):
        truncation = real_balanced_truncation(system, order)
        rounding = 1e-12 * h_infinity_norm(conjugate_pairs(system)).item()
        assert real_error(system, truncation.system) <= truncation.error_bound.item() + rounding
    real_poles = DiagonalSystem(poles.real + 0j, gains[:, :1], gains[:, 1:2].mT)
    assert real_balanced_truncation(real_poles, 5).system.poles.abs().max() < 1


@pytest.mark.parametrize("phase", [-1e-4, 2 * math.pi - 1e-4, -1e-4 - 2 * math.pi, -math.pi, 1e-4])
def test_folding_slow_modes_beside_the_real_axis_leaves_the_real_output_unchanged(phase):
    log_poles = torch.tensor([complex(-1e-4, phase)], dtype=torch.complex128)
    B, C = (torch.tensor([[gain]], dtype=torch.complex128) for gain in (1 + 2j, 0.5 - 1j))
    system = DiagonalSystem.from_log_poles(log_poles, B, C)
    inputs = torch.cos(phase * torch.arange(30_000, dtype=torch.float64))[:, None]
    before, after = system.simulate(inputs).real, fold(system).simulate(inputs).real
    assert (after - before).abs().max() <= 1e-12 * before.abs().max()
    assert 0 <= fold(system).log_poles.imag.item() <= math.pi
