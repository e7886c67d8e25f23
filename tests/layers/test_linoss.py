"""LinOSS against the oscillators it is made of, in their own coordinates."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm.layers import IM, IMEX, DampedIMEX, LinOSS, SequenceError

SCHEMES = [IM(), DampedIMEX()]


def make(width=3, order=5, full=True, **options):
    """A layer, with forces on positions and readouts of velocities as after some training, or as it starts."""
    torch.manual_seed(0)
    layer = LinOSS(width, order, **options).double()
    if full:
        for name in ("B_position", "C_velocity"):
            torch.nn.init.normal_(layer.get_parameter(name))
    return layer


def by_hand(layer, u):
    """The outputs for one sequence, step by step: velocities and positions of the oscillators as real numbers."""
    p = {name: value.detach().double().numpy() for name, value in layer.named_parameters()}
    step, omega = np.exp(p["log_step"]), np.exp(p["log_frequency"])
    v = x = np.zeros(len(step))
    outputs = []
    for now in u.numpy():
        v, x = v + step * (p["B_velocity"] @ now), x + step * (p["B_position"] @ now)
        if isinstance(layer.scheme, IM):
            # v' = v − Δ a x' and x' = x + Δ v': both from the end of the step.
            v = (v - step * omega**2 * x) / (1 + step**2 * omega**2)
            x = x + step * v
        else:
            S = 1 / (1 + step * np.exp(p["log_damping"]))
            phase = 2 * np.arctan(step * omega / 2)
            a = (1 + S - 2 * np.sqrt(S) * np.cos(phase)) / (S * step**2)
            # v' = v − Δ a x − Δ g v', x' = x + Δ v'
            v = S * (v - step * a * x)
            x = x + step * v
        outputs.append(p["C_velocity"] @ v + p["C_position"] @ x + p["D"] * now)
    return torch.tensor(np.array(outputs))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_layer_computes_its_oscillators(scheme, full):
    layer, u = make(scheme=scheme, full=full), torch.randn(200, 3, dtype=torch.float64)
    wanted = by_hand(layer, u)
    torch.testing.assert_close(layer(u[None])[0][0], wanted, rtol=1e-10, atol=1e-10 * wanted.abs().max().item())


@given(st.floats(-12, 12), st.floats(-12, 12), st.floats(-12, 5), st.sampled_from(SCHEMES))
def test_every_oscillator_is_stable_for_any_parameters(frequency, damping, log_step, scheme):
    layer = make(order=1, scheme=scheme)
    with torch.no_grad():
        for name, value in (("log_frequency", frequency), ("log_damping", damping), ("log_step", log_step)):
            if layer.state_dict().get(name) is not None:
                layer.get_parameter(name).fill_(value)
    log_modulus, phase = layer.log_poles()
    assert (log_modulus < 0).all()
    assert ((phase > 0) & (phase <= math.pi)).all()


def test_implicit_oscillators_have_their_poles_on_the_circle():
    log_modulus, phase = make(order=40).log_poles()
    poles = torch.polar(torch.exp(log_modulus), phase)
    torch.testing.assert_close((poles - 0.5).abs(), torch.full((40,), 0.5, dtype=torch.float64), rtol=1e-14, atol=0)


def test_it_starts_as_in_the_papers():
    """Forces on velocities, readouts of positions; a in (0, 1), or a ring of damped poles."""
    implicit, damped = make(order=500, full=False), make(order=500, full=False, scheme=DampedIMEX())
    for layer in (implicit, damped):
        assert not layer.B_position.any()
        assert not layer.C_velocity.any()
        steps = torch.exp(layer.log_step)
        assert 0.5 <= steps.min() < steps.max() <= 0.75 + 1e-6
    stiffness = torch.exp(2 * implicit.log_frequency)
    assert stiffness.max() <= 1
    assert abs(stiffness.mean() - 0.5) < 0.05
    modulus = torch.exp(damped.log_poles()[0])
    assert 0.9 - 1e-6 <= modulus.min() < modulus.max() <= 0.999 + 1e-6


def test_only_damped_oscillators_have_a_damping():
    assert "log_damping" not in make().state_dict()
    assert "log_damping" in make(scheme=DampedIMEX()).state_dict()


def test_oscillators_without_damping_are_refused_by_name():
    said = r"IMEX\(\), whose oscillators have no damping: \|λ\| = 1.*no Gramians.*expected DampedIMEX\(\)"
    with pytest.raises(SequenceError, match=said):
        LinOSS(4, 8, scheme=IMEX())
