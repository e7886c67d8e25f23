import numpy as np
import pytest
import torch
from hypothesis import given

from compressm.control import DenseSystem, DiagonalSystem, fold, hankel_nuclear_norm_majoriser, hankel_singular_values
from tests import oracles
from tests.control.test_gramians import in_another_basis
from tests.strategies import diagonal_systems
from tests.systems import lru_at_initialisation, lru_trained_like


def hankel_matrix_system(n, p, q, seed):
    """Poles below 0.8 in modulus, so that 80 block rows hold the whole Hankel operator to 1e-15."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(2, n, 1 + p + q, generator=generator, dtype=torch.float64)
    gains = torch.complex(*draw[..., 1:])
    radius = 0.8 * torch.rand(n, generator=generator, dtype=torch.float64)
    return DiagonalSystem(torch.polar(radius, draw[0, :, 0]), gains[:, :p], gains[:, p:].mT)


@pytest.mark.parametrize(("n", "p", "q"), [(1, 1, 1), (6, 1, 1), (8, 2, 3), (12, 4, 1)])
def test_hankel_singular_values_are_those_of_the_hankel_matrix(n, p, q):
    system = hankel_matrix_system(n, p, q, seed=n)
    expected = oracles.finite_hankel_values(*oracles.as_arrays(system), blocks=80)
    sigma = hankel_singular_values(system).numpy()
    np.testing.assert_allclose(sigma, expected[:n], atol=1e-13 * expected[0])
    assert expected[n] < 1e-12 * expected[0]


@given(diagonal_systems(max_order=24, max_channels=4))
def test_hankel_singular_values_survive_a_change_of_basis(system):
    sigma = hankel_singular_values(system)
    turned = hankel_singular_values(in_another_basis(system))
    scale = sigma[0] + 1e-4 * hankel_nuclear_norm_majoriser(system) + system.B.norm() * system.C.norm()
    assert (turned - sigma).abs().max() <= 1e-9 * scale


@given(diagonal_systems(max_order=32))
def test_hankel_singular_values_fall_and_are_those_of_the_product_of_the_gramians(system):
    sigma = hankel_singular_values(system).numpy()
    P, Q = oracles.gramians(*oracles.as_arrays(system))
    expected = np.sqrt(np.maximum(np.sort(np.linalg.eigvals(P @ Q).real)[::-1], 0))
    assert (np.diff(sigma) <= 0).all()
    assert (sigma >= 0).all()
    # The plain product keeps half the digits, and SciPy's solver loses 1/(1 − |λ|) of them.
    np.testing.assert_allclose(sigma, expected, atol=3e-5 * (expected[0] + 1e-300))


def test_the_adjoint_has_the_same_hankel_singular_values():
    system = lru_trained_like(32, 4)
    torch.testing.assert_close(hankel_singular_values(system.adjoint()), hankel_singular_values(system))


@pytest.mark.parametrize("make", [lru_at_initialisation, lru_trained_like])
def test_a_bank_of_spectra_is_a_loop_over_its_members(make):
    bank = make(20, 2, bank=(2, 3))
    expected = torch.stack([torch.stack([hankel_singular_values(bank[i, j]) for j in range(3)]) for i in range(2)])
    torch.testing.assert_close(hankel_singular_values(bank), expected, rtol=0, atol=1e-13 * expected.max().item())


def test_a_bank_may_mix_members_where_cholesky_fails_with_members_where_it_does_not():
    good = lru_at_initialisation(12, 2)
    dead = DiagonalSystem(good.poles, torch.zeros_like(good.B), good.C)
    low_rank = DiagonalSystem(torch.full_like(good.poles, 0.5), good.B, good.C)
    bank = DiagonalSystem(
        *(torch.stack([getattr(s, name) for s in (good, dead, low_rank)]) for name in ("poles", "B", "C"))
    )
    sigma = hankel_singular_values(bank)
    torch.testing.assert_close(sigma[0], hankel_singular_values(good))
    assert sigma[1].abs().max() == 0
    assert (sigma[2] > 1e-12 * sigma[2, 0]).sum() == 2  # two inputs can excite two directions of one pole


@pytest.mark.parametrize(("n", "width"), [(64, 8), (256, 8), (128, 64)])
@pytest.mark.parametrize("tau", [0.15, 0.05, 0.01])
def test_folding_needs_no_more_states_on_lru_systems(n, width, tau):
    system = lru_at_initialisation(n, width, seed=n)

    def states(sigma):
        held = sigma.cumsum(0) / sigma.sum()
        return int((held < 1 - tau).sum()) + 1

    assert states(hankel_singular_values(fold(system))) <= states(hankel_singular_values(system))


def test_a_system_with_a_dense_a_has_the_spectrum_of_its_diagonal_form():
    system = lru_at_initialisation(16, 3)
    dense = DenseSystem(system.A, system.B, system.C)
    torch.testing.assert_close(hankel_singular_values(dense), hankel_singular_values(system), rtol=1e-9, atol=1e-12)
