import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm.control import DiagonalSystem
from compressm.layers import S4D, ZOH, Bilinear, Inv, Legs, Lin
from compressm.ops import Path

RULES = [ZOH(), Bilinear()]
INITIALISATIONS = [Lin(), Inv(), Legs()]


def make(width=3, order=4, **options):
    torch.manual_seed(0)
    return S4D(width, order, **options)


def plain_bank(layer):
    """The discrete systems from the parameters by complex formulas, without the layer's own code."""
    p = {name: value.detach().double() for name, value in layer.named_parameters()}
    a, step = torch.complex(-p["log_A_real"].exp(), p["A_imag"]), p["log_step"].exp()[:, None]
    C = torch.complex(p["C_re"], p["C_im"])[:, None, :]
    if isinstance(layer.discretisation, ZOH):
        poles = torch.exp(step * a)
        return DiagonalSystem(poles, ((poles - 1) / a)[..., None], C)
    return DiagonalSystem((1 + step * a / 2) / (1 - step * a / 2), (step / (1 - step * a / 2))[..., None], C)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("initialisation", INITIALISATIONS)
def test_the_impulse_response_is_that_of_its_systems(initialisation, rule):
    layer = make(initialisation=initialisation, discretisation=rule).double()
    impulse = torch.zeros(1, 50, 3, dtype=torch.float64)
    impulse[:, 0] = 1
    y, _ = layer(impulse)
    expected = 2 * plain_bank(layer).impulse_response(50).real[..., 0, 0].mT  # (length, channel)
    expected[0] += layer.D.detach()
    torch.testing.assert_close(y[0], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_what_it_says_of_itself_is_what_it_computes(rule):
    layer = make(discretisation=rule).double()
    x = torch.randn(2, 30, 3, dtype=torch.float64)
    log_poles, B, C = (torch.complex(*pair) for pair in (layer.log_poles(), *layer.matrices()))
    bank = DiagonalSystem.from_log_poles(log_poles, B[..., None], C[:, None, :])
    y = bank.simulate(x.mT[..., None]).real[..., 0].mT
    torch.testing.assert_close(layer(x)[0], y + layer.D * x, rtol=1e-10, atol=1e-12)


def test_channels_are_independent():
    layer, x = make(), torch.randn(2, 30, 3)
    other = x.clone()
    other[:, :, 1] += 1
    changed = (layer(x)[0] != layer(other)[0]).any(1).any(0)
    assert changed.tolist() == [False, True, False]


def test_the_step_by_step_path_computes_the_same():
    x = torch.randn(2, 33, 3, dtype=torch.float64)
    for got, wanted in zip(make().double()(x), make(path=Path.LOOP).double()(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@given(st.floats(-15, 15), st.floats(-1e5, 1e5), st.floats(-15, 5), st.sampled_from(RULES))
def test_every_pole_is_inside_the_unit_circle_for_any_parameters(decay, frequency, log_step, rule):
    layer = make(order=1, discretisation=rule)
    with torch.no_grad():
        for name, value in (("log_A_real", decay), ("A_imag", frequency), ("log_step", log_step)):
            layer.get_parameter(name).fill_(value)
    assert (layer.log_poles()[0] < 0).all()


@pytest.mark.parametrize("initialisation", INITIALISATIONS)
def test_parameters_start_in_their_ranges(initialisation):
    layer = make(width=64, order=16, initialisation=initialisation, step_min=1e-2, step_max=1e-1)
    poles = torch.stack([-layer.log_A_real.exp(), layer.A_imag])
    torch.testing.assert_close(poles, initialisation(16)[:, None].expand(-1, 64, -1).float())
    steps = layer.log_step.exp()
    assert steps.min() >= 0.0099
    assert steps.max() <= 0.1001
    assert math.sqrt(1e-3) * 0.8 < steps.log().mean().exp() < math.sqrt(1e-3) * 1.25
    assert (layer.C_re.square() + layer.C_im.square()).mean().item() == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize(("width", "order"), [(1, 1), (6, 5), (16, 64)])
def test_the_parameter_count_is_its_formula(width, order):
    count = sum(parameter.numel() for parameter in make(width, order).parameters())
    assert count == 4 * order * width + 2 * width


def test_the_state_is_one_pair_a_mode_and_channel():
    layer = make()
    assert layer.initial_state(5).shape == (5, 2, 3, 4)
    assert layer(torch.randn(5, 7, 3))[1].shape == (5, 2, 3, 4)


@pytest.mark.parametrize("initialisation", INITIALISATIONS)
@pytest.mark.parametrize("rule", RULES)
def test_single_precision_keeps_four_digits_of_every_mode_over_4096_steps(initialisation, rule):
    """At order 64 frequencies reach 5215: a phase formed in float32 would be off by 6e-4."""
    layer = make(width=4, order=64, initialisation=initialisation, discretisation=rule)
    x = torch.randn(1, 4096, 4)
    (y, state), (exact_y, exact_state) = layer(x), copy.deepcopy(layer).double()(x.double())
    assert ((y - exact_y).norm() / exact_y.norm()).item() < 1e-4
    assert ((state - exact_state).norm(dim=1) / exact_state.norm(dim=1)).max().item() < 1e-4


def test_the_printed_form_names_the_rule():
    assert "discretisation=ZOH()" in repr(make())
