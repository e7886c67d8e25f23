import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm.control import DenseSystem, DiagonalSystem
from compressm.layers import S5, ZOH, Bilinear
from compressm.layers.initialisation import legs_modes, legs_normal_part

RULES = [ZOH(), Bilinear()]


def make(width=3, order=4, **options):
    torch.manual_seed(0)
    return S5(width, order, **options)


def plain_system(layer):
    """The discrete system from the parameters by complex formulas, without the layer's own code."""
    p = {name: value.detach().double() for name, value in layer.named_parameters()}
    a, step = torch.complex(-p["log_A_real"].exp(), p["A_imag"]), p["log_step"].exp()
    B, C = torch.complex(p["B_re"], p["B_im"]), torch.complex(p["C_re"], p["C_im"])
    if isinstance(layer.discretisation, ZOH):
        poles = torch.exp(step * a)
        return DiagonalSystem(poles, ((poles - 1) / a)[:, None] * B, C)
    return DiagonalSystem((1 + step * a / 2) / (1 - step * a / 2), (step / (1 - step * a / 2))[:, None] * B, C)


@pytest.mark.parametrize("rule", RULES)
def test_the_impulse_response_is_that_of_its_system(rule):
    layer = make(discretisation=rule).double()
    impulses = torch.zeros(3, 50, 3, dtype=torch.float64)
    impulses[torch.arange(3), 0, torch.arange(3)] = 1
    y, _ = layer(impulses)
    expected = 2 * plain_system(layer).impulse_response(50).real  # (length, out, in)
    expected[0] += torch.diag(layer.D.detach())
    torch.testing.assert_close(y, expected.permute(2, 0, 1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_what_it_says_of_itself_is_what_it_computes(rule):
    layer = make(discretisation=rule).double()
    x = torch.randn(2, 30, 3, dtype=torch.float64)
    log_poles, B, C = layer.log_poles(), *layer.matrices()
    system = DiagonalSystem.from_log_poles(*(torch.complex(*pair) for pair in (log_poles, B, C)))
    torch.testing.assert_close(layer(x)[0], system.simulate(x).real + layer.D * x, rtol=1e-10, atol=1e-12)


def test_with_one_step_it_is_a_real_system_of_twice_the_order():
    """B = Vᴴ B' and C = C' V with B', C' real: conjugate pairs add up to the normal part of HiPPO-LegS."""
    layer, step = make(order=3), 0.05
    torch.nn.init.constant_(layer.log_step, math.log(step))
    A, vectors = legs_normal_part(6), legs_modes(3)[1]
    B, C = (torch.complex(re, im).detach().cdouble() for re, im in ((layer.B_re, layer.B_im), (layer.C_re, layer.C_im)))
    B, C, A_discrete = 2 * (vectors @ B).real, 2 * (C @ vectors.mH).real, torch.linalg.matrix_exp(step * A)
    B_discrete = torch.linalg.solve(A, (A_discrete - torch.eye(6)) @ B)
    wanted = DenseSystem(A_discrete, B_discrete, C).impulse_response(30)
    torch.testing.assert_close(2 * plain_system(layer).impulse_response(30).real, wanted, rtol=1e-5, atol=1e-7)


@given(st.floats(-15, 15), st.floats(-1e5, 1e5), st.floats(-15, 5), st.sampled_from(RULES))
def test_every_pole_is_inside_the_unit_circle_for_any_parameters(decay, frequency, log_step, rule):
    layer = make(order=1, discretisation=rule)
    with torch.no_grad():
        for name, value in (("log_A_real", decay), ("A_imag", frequency), ("log_step", log_step)):
            layer.get_parameter(name).fill_(value)
    assert (layer.log_poles()[0] < 0).all()


def test_parameters_start_in_their_ranges():
    layer = make(width=16, order=64, step_min=1e-2, step_max=1e-1)
    torch.testing.assert_close(layer.log_A_real.exp(), torch.full((64,), 0.5))
    assert (layer.A_imag > 0).all()
    steps = layer.log_step.exp()
    assert steps.min() >= 0.0099
    assert steps.max() <= 0.1001
    assert 0.025 < steps.log().mean().exp() < 0.04
    # B has variance 1/width and C 1/2n in the real basis; a unitary change of basis keeps it.
    assert (layer.B_re.square() + layer.B_im.square()).mean().item() == pytest.approx(1 / 16, rel=0.2)
    assert (layer.C_re.square() + layer.C_im.square()).mean().item() == pytest.approx(1 / 128, rel=0.2)


@pytest.mark.parametrize(("width", "order"), [(1, 1), (6, 5), (16, 64)])
def test_the_parameter_count_is_its_formula(width, order):
    count = sum(parameter.numel() for parameter in make(width, order).parameters())
    assert count == 3 * order + 4 * order * width + width


@pytest.mark.parametrize("rule", RULES)
def test_single_precision_keeps_four_digits_of_every_mode_over_4096_steps(rule):
    """At order 64 frequencies reach 5215: a phase formed in float32 would be off by 6e-4."""
    layer = make(width=4, order=64, discretisation=rule)
    x = torch.randn(1, 4096, 4)
    (y, state), (exact_y, exact_state) = layer(x), copy.deepcopy(layer).double()(x.double())
    assert ((y - exact_y).norm() / exact_y.norm()).item() < 1e-4
    assert ((state - exact_state).norm(dim=1) / exact_state.norm(dim=1)).max().item() < 1e-4


def test_the_printed_form_names_the_rule():
    assert "discretisation=Bilinear()" in repr(make(discretisation=Bilinear()))
