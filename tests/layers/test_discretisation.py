import numpy as np
import pytest
import scipy.linalg
import scipy.signal
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm.layers import ZOH, Bilinear

RULES = [ZOH(), Bilinear()]
A = np.array([-0.5 + 3j, -2.0 + 0j, -1e-3 + 40j, -0.7 - 1j])
STEP = 0.05


def pair(numbers):
    return torch.stack([torch.tensor(numbers.real), torch.tensor(numbers.imag)])


def discrete(rule, a, step):
    """λ and s as complex arrays."""
    log_poles, scale = rule(pair(a), torch.full(a.shape, step, dtype=torch.float64))
    return np.exp(torch.complex(*log_poles).numpy()), torch.complex(*scale).numpy()


def test_zoh_is_the_matrix_exponential_of_the_held_system():
    """exp(Δ [[A, B], [0, 0]]) holds both discrete matrices."""
    held = np.zeros((5, 5), dtype=complex)
    held[:4, :4], held[:4, 4] = np.diag(A), 1
    exact = scipy.linalg.expm(STEP * held)
    poles, scale = discrete(ZOH(), A, STEP)
    np.testing.assert_allclose(np.diag(poles), exact[:4, :4], atol=1e-14)
    np.testing.assert_allclose(scale, exact[:4, 4], rtol=1e-12)


def test_bilinear_is_that_of_scipy():
    system = (np.diag(A), np.ones((4, 1)), np.ones((1, 4)), np.zeros((1, 1)))
    exact_A, exact_B, *_ = scipy.signal.cont2discrete(system, STEP, method="bilinear")
    poles, scale = discrete(Bilinear(), A, STEP)
    np.testing.assert_allclose(np.diag(poles), exact_A, atol=1e-14)
    np.testing.assert_allclose(scale, exact_B[:, 0], rtol=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("step", [1e-3, 1e-6, 1e-12])
def test_a_small_step_loses_no_digits(rule, step):
    """To second order log λ = Δa, and s is Δ (1 + Δa/2)."""
    log_poles, scale = rule(pair(A), torch.full(A.shape, step, dtype=torch.float64))
    size = (step * abs(A)).max()
    np.testing.assert_allclose(torch.complex(*log_poles).numpy(), step * A, rtol=1e-14 + size**2)
    np.testing.assert_allclose(torch.complex(*scale).numpy(), step * (1 + step * A / 2), rtol=1e-14 + size**2)


@pytest.mark.parametrize("rule", RULES)
@given(decay=st.floats(-20, 20), frequency=st.floats(-1e6, 1e6), log_step=st.floats(-20, 5))
def test_every_mode_in_the_left_half_plane_becomes_stable(rule, decay, frequency, log_step):
    a = torch.tensor([[-np.exp(decay)], [frequency]], dtype=torch.float64)
    log_poles, scale = rule(a, torch.tensor([np.exp(log_step)], dtype=torch.float64))
    assert (log_poles[0] < 0).all()
    assert log_poles.isfinite().all()
    assert scale.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_gradients_agree_with_finite_differences(rule):
    inputs = pair(A).requires_grad_(), torch.full(A.shape, 0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rule, inputs)


def test_bilinear_stays_finite_where_the_pole_is_zero():
    """Δa = −2: λ = 0 has no logarithm."""
    a = torch.tensor([[-2.0], [0.0]], dtype=torch.float64, requires_grad=True)
    log_poles, scale = Bilinear()(a, torch.ones(1, dtype=torch.float64))
    assert torch.exp(log_poles[0]).item() < 2e-8
    assert scale[0].item() == pytest.approx(0.5)
    (log_poles.sum() + scale.sum()).backward()
    assert a.grad.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_values(rule):
    assert rule == type(rule)()
    assert len({rule, type(rule)()}) == 1
    assert repr(rule) == f"{type(rule).__name__}()"
