import math

import numpy as np
import pytest
import torch

from compressm.layers import Inv, Legs, Lin
from compressm.layers.initialisation import inv_poles, legs_modes, legs_poles, lin_poles

ORDERS = [1, 2, 7, 64]


def as_complex(pair):
    return torch.complex(*pair).numpy()


def legs_by_loops(size):
    """HiPPO-LegS and the rank-one term ½ √((2i+1)(2j+1)), entry by entry."""
    matrix = np.zeros((size, size))
    for i in range(size):
        for j in range(i + 1):
            matrix[i, j] = -(i + 1) if i == j else -math.sqrt((2 * i + 1) * (2 * j + 1))
    root = np.sqrt(2 * np.arange(size) + 1)
    return matrix + np.outer(root, root) / 2


@pytest.mark.parametrize("n", ORDERS)
def test_legs_poles_are_the_upper_eigenvalues_of_the_normal_part(n):
    values = np.linalg.eigvals(legs_by_loops(2 * n))
    upper = np.sort_complex(1j * values[values.imag > 0].imag) - 0.5
    np.testing.assert_allclose(values.real, -0.5, atol=1e-11 * n * n)
    assert legs_poles(n).shape == (2, n)
    np.testing.assert_allclose(as_complex(legs_poles(n)), upper, rtol=1e-11, atol=1e-13 * n * n)


@pytest.mark.parametrize("n", ORDERS)
def test_legs_modes_and_their_conjugates_are_the_whole_matrix(n):
    poles, vectors = legs_modes(n)
    matrix = 2 * ((vectors * torch.complex(*poles)) @ vectors.mH).real
    np.testing.assert_allclose(matrix.numpy(), legs_by_loops(2 * n), atol=1e-12 * n * n)
    torch.testing.assert_close(vectors.mH @ vectors, torch.eye(n, dtype=torch.complex128), rtol=0, atol=1e-12)
    assert (vectors.mT @ vectors).abs().max() < 1e-12


def test_lin_poles_are_evenly_spaced():
    np.testing.assert_allclose(as_complex(lin_poles(3)), [-0.5, -0.5 + math.pi * 1j, -0.5 + 2 * math.pi * 1j])


def test_inv_poles_fall_like_one_over_k():
    expected = [-0.5 + 1j * (8 / math.pi) * (8 / (2 * k + 1) - 1) for k in range(4)]
    np.testing.assert_allclose(as_complex(inv_poles(4)), expected)


def test_the_fastest_inv_pole_is_near_the_fastest_of_legs():
    """N²/π to leading order, both."""
    fastest = legs_poles(64)[1].max().item()
    assert inv_poles(64)[1].max().item() == pytest.approx(fastest, rel=0.02)


@pytest.mark.parametrize(("initialisation", "poles"), [(Lin(), lin_poles), (Inv(), inv_poles), (Legs(), legs_poles)])
def test_initialisations_are_values_that_give_their_poles(initialisation, poles):
    torch.testing.assert_close(initialisation(5), poles(5))
    assert initialisation(5).dtype == torch.float64
    assert initialisation == type(initialisation)()
    assert repr(initialisation) == f"{type(initialisation).__name__}()"
