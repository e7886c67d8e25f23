"""Balanced truncation of real systems with full matrices, as complex modes."""

import pytest
import torch

from compressm.control import (
    DenseSystem,
    DiagonalSystem,
    PrecisionError,
    controllability_gramian,
    h_infinity_error,
    hankel_singular_values,
    real_form,
)
from compressm.control.folding import conjugate_pairs, pair_truncation, real_balanced_truncation
from compressm.layers import S4
from tests.control.test_with_poles import random_system


def legs(order=16, width=3, seed=0):
    torch.manual_seed(seed)
    layer = S4(width, order, step_min=1e-2, step_max=0.1).double()
    A, B, C = (part.detach() for part in layer.discrete())
    return DenseSystem(A, B[..., None], C[:, None])


@pytest.mark.parametrize("order", [1, 4, 8, 12])
def test_the_error_of_hippo_cut_to_modes_is_within_its_bound(order):
    system = legs()
    found = pair_truncation(system, order)
    assert found.system.order == order
    for member in range(3):
        error = h_infinity_error(system[member], conjugate_pairs(found.system[member]))
        assert error <= found.error_bound[member]


def test_it_is_the_real_truncation_of_a_diagonal_system():
    system = random_system(n=10)
    wanted = real_balanced_truncation(system, 4)
    found = pair_truncation(real_form(system), 4)
    torch.testing.assert_close(found.sigma[:8], wanted.sigma[:8])
    got, expected = (one.system.impulse_response(50).real for one in (found, wanted))
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)


def test_a_hippo_matrix_is_not_diagonalised_itself():
    """Its eigenvectors are nearly dependent, those of the reduced system are not."""
    from compressm.control import DefectiveSystemError, diagonalise

    system = legs(order=32, width=1)
    with pytest.raises(DefectiveSystemError):
        diagonalise(system)
    found = pair_truncation(system, 12)
    kept = found.left[0] @ found.right[0]
    there = kept.diagonal().abs() > 0
    torch.testing.assert_close(kept, torch.diag(kept.diagonal()), rtol=0, atol=1e-8)
    assert there.any()


def test_modes_and_states_are_mapped_to_each_other():
    """h = left z carries a run of the matrices into a run of the modes where nothing is cut."""
    system = random_system(n=3, inputs=1, outputs=1)
    dense = real_form(system)
    found = pair_truncation(dense, 3)
    u = torch.randn(40, 1, dtype=torch.float64)
    z = dense.states(u)
    h = found.system.states(u)
    torch.testing.assert_close((found.left @ z.to(h.dtype).mT).mT, h, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close((h @ found.right.mT).real, z, rtol=1e-8, atol=1e-9)


def test_a_measured_gramian_replaces_the_exact_one_and_gives_no_bound():
    system = legs()
    exact, measured = pair_truncation(system, 6), pair_truncation(system, 6, P=controllability_gramian(system))
    assert measured.error_bound is None
    torch.testing.assert_close(measured.sigma[..., :8], exact.sigma[..., :8], rtol=1e-6, atol=0)
    torch.testing.assert_close(
        measured.system.impulse_response(60).real, exact.system.impulse_response(60).real, rtol=1e-5, atol=1e-7
    )
    torch.testing.assert_close(hankel_singular_values(system)[..., :8], exact.sigma[..., :8])


def test_a_complex_system_is_refused():
    system = random_system(n=4)
    dense = DenseSystem(torch.diag(system.poles), system.B, system.C)
    with pytest.raises(PrecisionError, match="complex128 system, expected a real one"):
        pair_truncation(dense, 2)
    assert isinstance(system, DiagonalSystem)
