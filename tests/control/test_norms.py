import math

import numpy as np
import pytest
import torch
from hypothesis import given

from compressm.control import DenseSystem, DiagonalSystem, controllability_gramian, h2_norm, h_infinity_norm
from compressm.control.factors import cauchy_factor
from tests import oracles
from tests.strategies import diagonal_systems, few
from tests.systems import lru_at_initialisation, lru_trained_like


def single_mode(radius, phase, gain=1.0):
    pole = torch.polar(torch.tensor([radius], dtype=torch.float64), torch.tensor([phase], dtype=torch.float64))
    return DiagonalSystem(
        pole, torch.full((1, 1), gain, dtype=torch.complex128), torch.ones(1, 1, dtype=torch.complex128)
    )


@pytest.mark.parametrize("radius", [0.0, 0.5, 0.999, 1 - 1e-6])
@pytest.mark.parametrize("phase", [0.0, 1.0, math.pi - 1e-5, -2.5])
def test_the_h_infinity_norm_of_one_mode_is_its_resonance(radius, phase):
    """|b c| / (1 − |λ|), attained at the pole's angle."""
    assert h_infinity_norm(single_mode(radius, phase, 3.0)).item() == pytest.approx(3 / (1 - radius), rel=1e-9)


def test_the_h_infinity_error_of_two_modes_is_found_between_grid_points():
    """Two resonances that cancel at their own angles peak somewhere else: a fine scan of one arc finds where."""
    first, second = single_mode(0.999, 0.5), single_mode(0.999, 0.5013)
    omega = np.linspace(0.499, 0.503, 40_001)
    one, two = (oracles.transfer(*oracles.as_arrays(s), omega)[:, 0, 0] for s in (first, second))
    assert first.h_infinity_error(second).item() == pytest.approx(abs(one - two).max(), rel=1e-7)


@few
@given(diagonal_systems(max_order=16, max_channels=4))
def test_the_h_infinity_norm_is_no_smaller_than_on_a_plain_grid(system):
    plain = oracles.gain_on_a_grid(*oracles.as_arrays(system), points=200)
    assert h_infinity_norm(system).item() >= plain * (1 - 1e-9)


@given(diagonal_systems(max_order=16, max_channels=4))
def test_the_h2_norm_is_the_trace_formula(system):
    P, _ = oracles.gramians(*oracles.as_arrays(system))
    C = system.C.numpy()
    expected = math.sqrt(max(np.trace(C @ P @ C.conj().T).real, 0))
    scale = np.linalg.norm(C) * math.sqrt(np.trace(P).real)
    assert h2_norm(system).item() == pytest.approx(expected, rel=1e-6, abs=1e-6 * scale)


def test_the_h2_norm_is_the_energy_of_the_impulse_response():
    system = lru_at_initialisation(12, 3)
    energy = (system.impulse_response(30_000).abs() ** 2).sum().sqrt()
    assert h2_norm(system).item() == pytest.approx(energy.item(), rel=1e-10)


@pytest.mark.parametrize("make", [lru_at_initialisation, lru_trained_like])
def test_small_h2_errors_are_seen_below_the_square_root_of_rounding(make):
    system = make(32, 4)
    shifted = DiagonalSystem(system.poles, system.B * (1 + 1e-11), system.C)
    assert system.h2_error(shifted).item() == pytest.approx(1e-11 * h2_norm(system).item(), rel=1e-2)
    assert system.h2_error(system).item() < 1e-13 * h2_norm(system).item()


def test_errors_between_diagonal_and_dense_forms_of_one_system_vanish():
    system = lru_trained_like(16, 2)
    dense = DenseSystem(system.A, system.B, system.C)
    assert system.h2_error(dense).item() < 1e-12 * h2_norm(system).item()
    assert system.h_infinity_error(dense).item() < 1e-10 * h_infinity_norm(system).item()


def test_a_jordan_block_has_norms_although_it_has_no_eigenbasis():
    A = torch.tensor([[0.5, 1.0], [0.0, 0.5]], dtype=torch.float64)
    system = DenseSystem(A, torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    energy = (system.impulse_response(200) ** 2).sum().sqrt()
    assert h2_norm(system).item() == pytest.approx(energy.item(), rel=1e-12)
    plain = oracles.gain_on_a_grid(*oracles.as_arrays(system), points=2001)
    assert h_infinity_norm(system).item() == pytest.approx(plain, rel=1e-5)
    other = single_input_identity(2)
    assert system.h2_error(other).item() > 0


def single_input_identity(channels):
    eye = torch.eye(channels, dtype=torch.float64)
    return DiagonalSystem(torch.full((channels,), 0.5, dtype=torch.float64), eye, eye)


@given(diagonal_systems(max_order=24, max_channels=5))
def test_the_cauchy_factor_squares_to_the_gramian(system):
    factor = cauchy_factor(system)
    P = controllability_gramian(system)
    size = P.diagonal().real.sqrt()
    assert ((factor @ factor.mH - P).abs() <= 1e-12 * size[:, None] * size[None, :] + 1e-300).all()


def test_norms_of_a_bank_are_those_of_its_members():
    bank = lru_trained_like(8, 2, bank=(2, 2))
    for norm in (h2_norm, h_infinity_norm):
        expected = torch.stack([torch.stack([norm(bank[i, j]) for j in range(2)]) for i in range(2)])
        torch.testing.assert_close(norm(bank), expected, rtol=1e-8, atol=0)
