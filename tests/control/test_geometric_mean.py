"""Σσ and its gradient without the σ, against eigenvalues, autograd and 300-bit arithmetic."""

import flint
import pytest
import torch
from hypothesis import given

from compressm.control import (
    ControlError,
    DenseSystem,
    DiagonalSystem,
    controllability_gramian,
    hankel_nuclear_norm,
    hankel_singular_values,
    nuclear_norm,
    observability_gramian,
)
from compressm.control.nuclear_norm import geometric_mean, mean_by_products, sign_polynomials
from tests.strategies import diagonal_systems
from tests.systems import lru_at_initialisation, lru_trained_like

ROUTES = {"factors": geometric_mean, "products": mean_by_products}
FLOOR = 1e-6


@pytest.fixture(params=ROUTES)
def route(request, monkeypatch):
    """On a CPU both routes, whichever would be taken."""
    monkeypatch.setattr(nuclear_norm, "geometric_mean", ROUTES[request.param])
    return ROUTES[request.param]


def leaves(system):
    return [tensor.clone().requires_grad_() for tensor in (system.poles, system.B, system.C)]


def by_eigenvalues(poles, B, C):
    """The paper's way: P and Q by division, eigenvalues of their product, by autograd."""
    gaps = 1 - poles[:, None] * poles.conj()[None, :]
    P, Q = (B @ B.mH) / gaps, (C.mH @ C) / gaps.conj()
    return torch.sqrt(torch.linalg.eigvals(P @ Q)).real.sum()


def in_300_bits(poles, B, C):
    """Σσ with all roundings below 1e-80."""
    n = len(poles)
    exact = [[flint.acb(z.real, z.imag) for z in row] for row in (poles.tolist(), *B.tolist(), *C.mT.tolist())]
    poles, B, C = exact[0], exact[1 : n + 1], exact[n + 1 :]

    def gramian(rows, i, j, poles):
        dot = sum((x * y.conjugate() for x, y in zip(rows[i], rows[j], strict=True)), flint.acb(0))
        return dot / (1 - poles[i] * poles[j].conjugate())

    mirrored = [z.conjugate() for z in poles]
    rows = [[z.conjugate() for z in column] for column in C]
    P = flint.acb_mat([[gramian(B, i, j, poles) for j in range(n)] for i in range(n)])
    Q = flint.acb_mat([[gramian(rows, i, j, mirrored) for j in range(n)] for i in range(n)])
    return sum((value.sqrt().real for value in (P * Q).eig(nonstop=True, multiple=True)), flint.arb(0))


def test_the_gradient_is_that_of_the_papers_formulas_by_autograd(route):
    system = lru_at_initialisation(24, 4, seed=1)
    ours, theirs = leaves(system), leaves(system)
    norm, plain = hankel_nuclear_norm(DiagonalSystem(*ours), floor=FLOOR), by_eigenvalues(*theirs)
    norm.backward()
    plain.backward()
    torch.testing.assert_close(norm, plain, rtol=1e-10, atol=0)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-7)


def test_the_gradient_is_the_difference_of_values_in_300_bits(route, monkeypatch):
    monkeypatch.setattr(flint.ctx, "prec", 300)
    system = lru_at_initialisation(6, 2, seed=2)
    parts = leaves(system)
    norm = hankel_nuclear_norm(DiagonalSystem(*parts), floor=FLOOR)
    norm.backward()
    plain = [part.detach() for part in parts]
    assert float(norm.detach()) == pytest.approx(float(in_300_bits(*plain)), rel=1e-13)
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        ways = [torch.randn(part.shape, dtype=part.dtype, generator=generator) * 1e-3 for part in plain]
        step = 2.0**-20
        ahead = in_300_bits(*(part + step * way for part, way in zip(plain, ways, strict=True)))
        behind = in_300_bits(*(part - step * way for part, way in zip(plain, ways, strict=True)))
        slope = sum((part.grad.conj() * way).sum().real for part, way in zip(parts, ways, strict=True))
        # float64 rounds the parts that are moved: 1e-16 / 1e-9 of the change.
        assert float((ahead - behind) / (2 * step)) == pytest.approx(float(slope), rel=1e-5)


@pytest.mark.parametrize("build", [DiagonalSystem, DiagonalSystem.from_log_poles])
def test_the_gradient_agrees_with_finite_differences(route, build):
    system = lru_at_initialisation(5, 2, seed=1)
    first = system.poles if build is DiagonalSystem else system.log_poles
    inputs = [tensor.clone().requires_grad_() for tensor in (first, system.B, system.C)]
    assert torch.autograd.gradcheck(
        lambda *parts: hankel_nuclear_norm(build(*parts), floor=FLOOR), inputs, eps=1e-7, atol=1e-5
    )


def test_real_systems_have_it_too(route):
    poles, eye = torch.tensor([0.9, 0.5, -0.3], dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    mixed = torch.tensor([[1, 0.2, 0.1], [0, 1, 0.4], [0.3, 0, 1]], dtype=torch.float64)
    inputs = [tensor.clone().requires_grad_() for tensor in (poles, eye + mixed, mixed)]
    assert torch.autograd.gradcheck(
        lambda *parts: hankel_nuclear_norm(DiagonalSystem(*parts), floor=FLOOR), inputs, eps=1e-7, atol=1e-5
    )


@given(diagonal_systems(max_order=24, max_channels=4))
def test_value_and_gradient_are_finite_and_within_the_floor_for_ties_clusters_and_zeros(system):
    whole = float(hankel_nuclear_norm(system))
    for route in ROUTES.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nuclear_norm, "geometric_mean", route)
            inputs = leaves(system)
            norm = hankel_nuclear_norm(DiagonalSystem(*inputs), floor=1e-4)
            norm.backward()
        assert float(norm.detach()) == pytest.approx(whole, rel=24 * 1e-4, abs=1e-290)
        assert all(torch.isfinite(tensor.grad).all() for tensor in inputs)


@pytest.mark.parametrize("system", [lru_at_initialisation(48, 1), lru_trained_like(40, 2)], ids=["initial", "trained"])
def test_nearly_singular_gramians_cost_no_more_than_the_floor(route, system):
    sigma = hankel_singular_values(system)
    assert sigma[-1] < 1e-4 * sigma[0]
    exact, ours = leaves(system), leaves(system)
    hankel_nuclear_norm(DiagonalSystem(*exact)).backward()
    norm = hankel_nuclear_norm(DiagonalSystem(*ours), floor=1e-4)
    norm.backward()
    torch.testing.assert_close(norm.detach(), sigma.sum(), rtol=1e-4, atol=0)
    for one, other in zip(ours, exact, strict=True):
        assert (one.grad - other.grad).norm() < 2e-3 * other.grad.norm()


def test_the_mean_solves_its_equation(route):
    system = lru_at_initialisation(12, 4, bank=(2,), seed=4)
    P, Q = controllability_gramian(system), observability_gramian(system)
    found = route(P, Q, FLOOR)
    torch.testing.assert_close(found.mean @ Q @ found.mean, P, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(found.mean @ found.inverse, torch.eye(12, dtype=P.dtype).expand(2, 12, 12))
    torch.testing.assert_close(found.trace, hankel_singular_values(system).sum(-1))


@pytest.mark.parametrize("floor", [1e-2, 1e-4, 1e-6])
def test_the_polynomials_take_all_above_the_floor_to_one_and_none_beyond_two(floor):
    x = torch.logspace(torch.tensor(floor).log10().item(), 0, 1000, dtype=torch.float64)
    small = torch.linspace(0, floor, 100, dtype=torch.float64)
    for linear, cubic, quintic in sign_polynomials(floor):
        x, small = (v * (linear + cubic * v**2 + quintic * v**4) for v in (x, small))
    assert (x - 1).abs().max() < 1e-12
    assert small.min() >= 0
    assert small.max() < 1 + 1e-12
    assert len(sign_polynomials(1e-5)) <= 12


def test_norms_of_a_bank_are_those_of_its_members(route):
    bank = lru_at_initialisation(6, 2, bank=(2, 3))
    norms = hankel_nuclear_norm(bank, floor=FLOOR)
    assert norms.shape == (2, 3)
    torch.testing.assert_close(norms, hankel_nuclear_norm(bank))


@pytest.mark.parametrize("floor", [-1e-3, 1e-7, 1.0, float("nan")])
def test_a_floor_that_cannot_be_is_refused_by_its_value(floor):
    with pytest.raises(ControlError, match=f"floor is {floor}"):
        hankel_nuclear_norm(lru_at_initialisation(3, 2), floor=floor)


def test_a_floor_is_for_diagonal_systems():
    one = torch.ones(1, 1, dtype=torch.float64)
    with pytest.raises(ControlError, match="diagonalise"):
        hankel_nuclear_norm(DenseSystem(one / 2, one, one), floor=1e-4)


def test_a_second_derivative_is_refused_rather_than_wrong():
    leaf = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    system = DiagonalSystem(torch.tensor([0.5], dtype=torch.float64), leaf[:, None], one)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(hankel_nuclear_norm(system, floor=1e-4), leaf, create_graph=True)
