import pytest
import torch
from hypothesis import given

from compressm.control import (
    DenseSystem,
    DiagonalSystem,
    hankel_nuclear_norm,
    hankel_nuclear_norm_majoriser,
    hankel_singular_values,
)
from tests.strategies import diagonal_systems
from tests.systems import lru_at_initialisation, lru_trained_like


def leaves(system):
    first = system.poles if system.log_poles is None else system.log_poles
    return [tensor.clone().requires_grad_() for tensor in (first, system.B, system.C)]


@pytest.mark.parametrize("norm", [hankel_nuclear_norm, hankel_nuclear_norm_majoriser])
@pytest.mark.parametrize("build", [DiagonalSystem, DiagonalSystem.from_log_poles])
def test_the_gradient_agrees_with_finite_differences(norm, build):
    system = lru_at_initialisation(5, 2, seed=1)
    first = system.poles if build is DiagonalSystem else system.log_poles
    inputs = [tensor.clone().requires_grad_() for tensor in (first, system.B, system.C)]
    assert torch.autograd.gradcheck(lambda *parts: norm(build(*parts)), inputs, eps=1e-7, atol=1e-5)


def test_every_single_value_has_the_right_gradient():
    system = lru_at_initialisation(4, 2, seed=2)
    build = DiagonalSystem.from_log_poles
    assert torch.autograd.gradcheck(
        lambda *parts: hankel_singular_values(build(*parts)), leaves(system), eps=1e-7, atol=1e-5
    )


def test_the_gradient_flows_through_a_dense_system():
    system = lru_at_initialisation(3, 2, seed=3)
    inputs = [tensor.clone().requires_grad_() for tensor in (system.A, system.B, system.C)]
    assert torch.autograd.gradcheck(
        lambda *parts: hankel_nuclear_norm(DenseSystem(*parts)), inputs, eps=1e-7, atol=1e-4
    )


@given(diagonal_systems(max_order=24, max_channels=4))
def test_the_gradient_is_finite_for_ties_clusters_and_zeros(system):
    inputs = leaves(system)
    hankel_nuclear_norm(DiagonalSystem(*inputs)).backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in inputs)


def test_the_gradient_at_a_tie_is_the_one_sided_derivative():
    """Two equal decoupled modes: Σσ = Σ |bᵢcᵢ|/(1 − λᵢ²), smooth although the σ cross."""
    poles = torch.tensor([0.5, 0.5], dtype=torch.float64, requires_grad=True)
    system = DiagonalSystem(poles, torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    hankel_nuclear_norm(system).backward()
    torch.testing.assert_close(poles.grad, torch.full_like(poles, 2 * 0.5 / (1 - 0.25) ** 2))


@given(diagonal_systems(max_order=32, max_channels=4))
def test_the_majoriser_is_never_below_the_norm(system):
    norm, majoriser = hankel_nuclear_norm(system), hankel_nuclear_norm_majoriser(system)
    assert norm <= majoriser * (1 + 1e-10)


def test_the_majoriser_is_tight_for_decoupled_modes_and_close_on_lru_systems():
    eye = torch.eye(3, dtype=torch.float64)
    decoupled = DiagonalSystem(torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64), eye, eye)
    torch.testing.assert_close(hankel_nuclear_norm(decoupled), hankel_nuclear_norm_majoriser(decoupled))
    for system in (lru_at_initialisation(64, 8), lru_trained_like(64, 8)):
        assert hankel_nuclear_norm_majoriser(system) < 1.3 * hankel_nuclear_norm(system)


def test_norms_of_a_bank_and_their_gradients_are_those_of_its_members():
    bank = lru_at_initialisation(6, 2, bank=(3,))
    whole, parts = leaves(bank), leaves(bank)
    hankel_nuclear_norm(DiagonalSystem.from_log_poles(*whole)).sum().backward()
    for i in range(3):
        hankel_nuclear_norm(DiagonalSystem.from_log_poles(*(part[i] for part in parts))).backward()
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-11)


def test_a_second_derivative_is_refused_rather_than_wrong():
    leaf = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    norm = hankel_nuclear_norm(DiagonalSystem(torch.tensor([0.5], dtype=torch.float64), leaf[:, None], one))
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(norm, leaf, create_graph=True)


def test_a_dense_system_has_the_same_spectrum_with_and_without_gradients():
    A = torch.diag(torch.tensor([0.9, 0.9, 0.5, 0.4], dtype=torch.float64))
    B, C = torch.ones(4, 1, dtype=torch.float64), torch.tensor([[1, -1, 0.3, 0.2]], dtype=torch.float64)
    plain = hankel_singular_values(DenseSystem(A, B, C))
    tracked = hankel_singular_values(DenseSystem(A, B.clone().requires_grad_(), C))
    assert tracked.requires_grad
    assert (plain - tracked).abs().max() < 1e-15
