"""A reduction is what its change of basis makes of the old system, and stays within its bound."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressm.adapters import adapter_for
from compressm.control import (
    DiagonalSystem,
    balanced_truncation,
    controllability_gramian,
    error_bounds,
    fold,
    hankel_singular_values,
    input_output_ratio,
)
from compressm.families.linear.reduction import BasisChange, Triple, reduce_system
from compressm.layers import LRU, S4D
from tests import oracles
from tests.strategies import diagonal_systems


def complex_(system):
    return DiagonalSystem(*(part.to(torch.complex128) for part in (system.poles, system.B, system.C)))


def random_system(n=12, p=3, bank=(), seed=0):
    g = torch.Generator().manual_seed(seed)
    logs = torch.complex(-(10 ** (-2 * torch.rand(*bank, n, generator=g))), 6.28 * torch.rand(*bank, n, generator=g))
    B, C = (torch.randn(*bank, *shape, generator=g, dtype=torch.complex128) for shape in ((n, p), (p, n)))
    return DiagonalSystem.from_log_poles(logs.to(torch.complex128), B, C)


def real_arrays(system):
    """(A, B, C) of the real system of order 2n with output Re(C h), written out with NumPy."""
    poles, B, C = (part.detach().numpy() for part in (system.poles, system.B, system.C))
    A = np.block([[np.diag(poles.real), -np.diag(poles.imag)], [np.diag(poles.imag), np.diag(poles.real)]])
    return A, np.concatenate([B.real, B.imag]), np.concatenate([C.real, -C.imag], axis=1)


def check_agreement(change, old, new):
    """To rounding, which the size of the projections multiplies."""
    moved = change.vector(Triple.of(old))
    scale = change.right.abs().amax((-2, -1)) * change.left.abs().amax((-2, -1)) * old.order
    for got, expected in ((moved.poles, new.poles), (moved.B, new.B), (moved.C, new.C)):
        error = (got - expected).abs().flatten(len(old.bank)).amax(-1)
        size = expected.abs().flatten(len(old.bank)).amax(-1) + 1
        assert (error <= 1e-11 * (1 + scale) * size).all()


@settings(max_examples=25)
@given(system=diagonal_systems(max_order=24, max_channels=4), share=st.floats(0.05, 1), folded=st.booleans())
def test_the_new_system_is_what_the_change_of_basis_makes_of_the_old_one(system, share, folded):
    system = complex_(system)
    reduction = reduce_system(system, max(1, int(share * system.order)), fold=folded)
    check_agreement(reduction.change, system, reduction.system)
    product = reduction.change.left.mH @ reduction.change.right
    filled = (reduction.change.right != 0).any(-2)
    torch.testing.assert_close(product, torch.diag_embed(filled.to(product.dtype)), rtol=0, atol=1e-8)


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("kept", [[0, 1, 2, 3], [2, 5, 7], [11, 10]])
def test_states_other_than_the_largest_can_be_kept(folded, kept):
    system = random_system()
    reduction = reduce_system(system, states=kept, fold=folded)
    check_agreement(reduction.change, system, reduction.system)
    dropped = 2 * (reduction.sigma.sum() - reduction.sigma[kept].sum())
    torch.testing.assert_close(reduction.error_bound, dropped)


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_the_error_of_the_real_output_is_within_the_bound(folded, seed):
    system = random_system(seed=seed)
    for order in (1, 4, 9):
        reduction = reduce_system(system, order, fold=folded)
        error = oracles.difference(real_arrays(system), real_arrays(reduction.system))
        assert oracles.gain_on_a_grid(*error, points=400) <= reduction.error_bound.item() * (1 + 1e-9)
        balanced = fold(system) if folded else system
        torch.testing.assert_close(reduction.error_bound, error_bounds(hankel_singular_values(balanced))[order])


def test_without_folding_it_is_the_papers_arithmetic():
    """Balanced truncation of the complex system as it stands, whose eigenvalues are the new poles."""
    system = random_system()
    reduction = reduce_system(system, 5, fold=False)
    A, B, C = oracles.as_arrays(system)
    P, Q = oracles.gramians(A, B, C)
    wanted = np.sqrt(np.linalg.eigvals(P @ Q).real)
    np.testing.assert_allclose(reduction.sigma.numpy(), np.sort(wanted)[::-1], rtol=1e-6)
    expected = torch.linalg.eigvals(balanced_truncation(system, 5).system.A)
    key = lambda poles: sorted(poles.tolist(), key=lambda z: (round(z.real, 9), z.imag))  # noqa: E731
    np.testing.assert_allclose(key(reduction.system.poles), key(expected), atol=1e-12)
    assert not reduction.change.old_conjugated.any()
    assert not reduction.change.new_conjugated.any()


@pytest.mark.parametrize("bank", [(3,), (2, 3)])
@pytest.mark.parametrize("folded", [True, False])
def test_a_bank_is_reduced_as_its_members_are(bank, folded):
    system = random_system(bank=bank)
    together = reduce_system(system, 5, fold=folded)
    for index in np.ndindex(*bank):
        alone = reduce_system(system[index], 5, fold=folded)
        torch.testing.assert_close(together.system[index].B, alone.system.B)
        torch.testing.assert_close(together.error_bound[index], alone.error_bound)
        check_agreement(together.change[index], system[index], alone.system)


def test_poles_of_a_folded_reduction_lie_in_the_upper_half():
    for layer in (LRU(2, 16), S4D(3, 16)):
        reduction = reduce_system(adapter_for(layer).read(layer), 5)
        assert (reduction.system.poles.imag >= 0).all()


def test_with_a_measured_gramian_there_is_no_bound():
    system = random_system()
    reduction = reduce_system(system, 5, P=controllability_gramian(fold(system)))
    assert reduction.error_bound is None
    exact = reduce_system(system, 5)
    torch.testing.assert_close(reduction.sigma, exact.sigma)
    torch.testing.assert_close(reduction.system.B, exact.system.B, rtol=1e-6, atol=1e-8)


def test_modes_keep_the_sizes_that_the_layer_had():
    """‖b‖/(γ‖c‖) of every mode is the mean one of before, and no mode is turned more than it has to be."""
    system = random_system()
    reduction = reduce_system(system, 5)
    new, ratio = reduction.system, input_output_ratio(system)
    b = torch.linalg.vector_norm(new.B, dim=-1) / torch.sqrt(new.decay)
    torch.testing.assert_close(b / torch.linalg.vector_norm(new.C, dim=-2), ratio.expand(5))
    largest = reduction.change.right.gather(-2, reduction.change.right.abs().argmax(-2, keepdim=True))
    assert (largest.imag.abs() < 1e-12).all()
    assert (largest.real > 0).all()


def test_a_mode_that_is_left_alone_is_scaled_and_nothing_else():
    system = random_system()
    right = reduce_system(system, 12, fold=False).change.right
    assert ((right.abs() > 1e-6).sum(-2) == 1).all()
    assert right.real.amax(-2).min() > 0.1


def test_a_stored_system_differs_by_the_scale_of_its_states():
    """An S4D layer keeps products of B and C; a layer that stores half of the disc mirrors modes."""
    system = random_system()
    reduction = reduce_system(system, 5, fold=False)
    new = reduction.system
    factor = torch.randn(5, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    stored = DiagonalSystem(new.poles, factor[:, None] * new.B, new.C / factor)
    check_agreement(reduction.change.onto(new, stored), system, stored)
    check_agreement(reduction.change.onto(new, fold(stored)), system, fold(stored))
    silent = DiagonalSystem(new.poles, 0 * new.B, new.C)
    without_input = DiagonalSystem(system.poles, 0 * system.B, system.C)
    check_agreement(
        reduction.change.onto(silent, DiagonalSystem(new.poles, 0 * new.B, new.C / factor)),
        without_input,
        DiagonalSystem(new.poles, 0 * new.B, new.C / factor),
    )


def test_a_system_without_output_is_reduced_to_one_dead_state():
    system = random_system()
    reduction = reduce_system(DiagonalSystem(system.poles, system.B, 0 * system.C), 5)
    assert reduction.system.order == 1
    assert (reduction.system.C == 0).all()
    assert all(part.isfinite().all() for part in (reduction.change.left, reduction.change.right))


def test_gradients_and_vectors_are_dual():
    """Re⟨g', d'⟩ = Re⟨g, d⟩ where d is d' lifted by Φ and Ψ: a small step of the small system is one of the large."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.complex128, generator=g)

    change = BasisChange(draw(6, 3), draw(6, 3), torch.arange(6) % 2 == 0, torch.arange(3) == 1)
    gradient, step = Triple(draw(6), draw(6, 2), draw(2, 6)), Triple(draw(3), draw(3, 2), draw(2, 3))
    small = step.conjugated(change.new_conjugated)
    lifted = Triple(
        torch.einsum("ik,k,ik->i", change.right, small.poles, change.left.conj()),
        change.right @ small.B,
        small.C @ change.left.mH,
    ).conjugated(change.old_conjugated)

    def pairing(one, other):
        return sum((a.conj() * b).real.sum() for a, b in zip(vars(one).values(), vars(other).values(), strict=True))

    torch.testing.assert_close(pairing(change.gradient(gradient), step), pairing(gradient, lifted))
