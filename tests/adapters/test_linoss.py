"""Cuts of oscillators: what they can store, and how much is lost where they cannot store a pole."""

import copy

import numpy as np
import pytest
import torch

import compressm as cs
from compressm.adapters import adapter_for, write
from compressm.control import DiagonalSystem, h_infinity_error
from compressm.control.norms import with_poles
from compressm.families.linear.reduction import drop_modes, reduce_system
from compressm.layers import IM, DampedIMEX, LinOSS
from tests.layers.test_linoss import by_hand, make

STEPS = 1000


def impulse_response(layer):
    """Outputs of the oscillators for an impulse at each input in turn, by steps of velocities and positions."""
    layer = copy.deepcopy(layer).double()
    layer.D.data.zero_()
    found = []
    for channel in range(layer.width):
        u = torch.zeros(STEPS, layer.width, dtype=torch.float64)
        u[0, channel] = 1
        found.append(by_hand(layer, u))
    return torch.stack(found)


def stored(layer, system):
    layer = copy.deepcopy(layer).double()
    write(layer, adapter_for(layer).encode(layer, system))
    return layer


def errors(order, seed):
    """Relative errors of the impulse response: balanced truncation itself, on the circle, refitted, and modal."""
    torch.manual_seed(seed)
    layer = LinOSS(8, 64).double()
    adapter = adapter_for(layer)
    system = adapter.read(layer).detach()
    reduced, whole = reduce_system(system, order).system, impulse_response(layer)
    # Balanced truncation itself, whose poles no oscillator has, is simulated as a system.
    free = reduced.impulse_response(STEPS).real.permute(2, 0, 1)
    fitted = adapter.nearest(layer, reduced)
    snapped = DiagonalSystem(fitted.poles, reduced.B, reduced.C)
    modal = drop_modes(system, order).system
    responses = [free, *(impulse_response(stored(layer, one)) for one in (snapped, fitted, modal))]
    return [float((one - whole).norm() / whole.norm()) for one in responses]


def test_on_the_circle_with_a_refitted_readout_a_cut_is_about_as_good_as_balanced_truncation_itself():
    """64 → 16 oscillators, 8 channels, three seeds: .030 → .044 on the circle → .035 refitted; modal .110."""
    free, snapped, fitted, modal = np.mean([errors(16, seed) for seed in range(3)], axis=0)
    assert free < fitted < 1.2 * free
    assert fitted < 0.85 * snapped
    assert modal > 3 * fitted


def test_where_the_cut_itself_loses_little_the_refitted_readout_mends_most_of_what_the_circle_costs():
    """64 → 32: .001 → .018 on the circle → .005 refitted; modal .061."""
    free, snapped, fitted, modal = np.mean([errors(32, seed) for seed in range(3)], axis=0)
    assert fitted - free < 0.25 * (snapped - free)
    assert modal > 10 * fitted


def test_poles_are_moved_the_shortest_way_in_hyperbolic_distance():
    layer = make()
    system = DiagonalSystem(*_system([0.6 + 0.4j, 0.9 + 0.2j, 0.3 + 0.5j, 0.02 + 0.1j]))
    found = adapter_for(layer).nearest(layer, system).poles
    for pole, moved in zip(system.poles, found, strict=True):
        phase = torch.linspace(1e-3, torch.pi - 1e-3, 20001, dtype=torch.float64)
        circle = 0.5 + torch.polar(torch.full_like(phase, 0.5), phase)
        distances = ((pole - circle) / (1 - pole * circle.conj())).abs()
        here = ((pole - moved) / (1 - pole * moved.conj())).abs()
        assert (moved - 0.5).abs().item() == pytest.approx(0.5, abs=1e-14)
        assert here <= distances.min() * (1 + 1e-6)


def _system(poles, width=3):
    poles = torch.tensor(poles, dtype=torch.complex128)
    g = torch.Generator().manual_seed(0)
    B = torch.randn(len(poles), width, generator=g, dtype=torch.complex128)
    return poles, B, torch.randn(width, len(poles), generator=g, dtype=torch.complex128)


def test_poles_of_oscillators_stay_and_the_system_is_the_same_object():
    for scheme in (IM(), DampedIMEX()):
        layer = make(scheme=scheme)
        system = adapter_for(layer).read(layer).detach()
        assert adapter_for(layer).nearest(layer, system) is system


def test_a_moved_system_is_stored_as_it_is():
    layer = make()
    system = DiagonalSystem(*_system([0.6 + 0.3j, 0.8 - 0.2j, -0.4 + 0.3j, 0.7, -0.5, 0.0]))
    nearest = adapter_for(layer).nearest(layer, system)
    found = adapter_for(layer).read(stored(layer, nearest)).detach()
    u = torch.randn(60, 3, dtype=torch.float64)
    torch.testing.assert_close(found.simulate(u).real, nearest.simulate(u).real, rtol=1e-9, atol=1e-9)
    assert adapter_for(layer).nearest(layer, nearest) is nearest


def test_damped_oscillators_store_every_pair_of_complex_poles():
    """Any pole inside the circle that is not real, or its conjugate: the layer's own steps give Re(C h)."""
    layer, g = make(scheme=DampedIMEX()), torch.Generator().manual_seed(0)
    size, phase = (torch.rand(300, generator=g, dtype=torch.float64) for _ in range(2))
    poles = torch.polar(0.01 + 0.98 * size, torch.pi * (0.005 + 0.99 * phase))
    poles[::2] = poles[::2].conj()
    system = DiagonalSystem(*_system(poles.tolist()))
    assert adapter_for(layer).nearest(layer, system) is system
    u = torch.randn(50, 3, dtype=torch.float64)
    wanted = system.simulate(u).real + layer.D.detach() * u
    torch.testing.assert_close(
        by_hand(stored(layer, system), u), wanted, rtol=1e-9, atol=1e-9 * wanted.abs().max().item()
    )


def test_a_real_pole_of_a_damped_layer_becomes_a_pair_that_answers_as_it_does():
    """A pair 1e-3 (1 − |λ|) away from the axis and a refitted readout are off by less than 1e-3 of the norm."""
    layer = make(scheme=DampedIMEX())
    system = DiagonalSystem(*_system([0.99, 0.6, -0.7, 0.4 + 0.5j]))
    nearest = adapter_for(layer).nearest(layer, system)
    assert (nearest.poles.imag > 0).all()
    u = torch.randn(400, 3, dtype=torch.float64)
    wanted, found = system.simulate(u).real, by_hand(stored(layer, nearest), u) - layer.D.detach() * u
    assert (found - wanted).norm() < 1e-3 * wanted.norm()


@pytest.mark.parametrize("scheme", [IM(), DampedIMEX()], ids=str)
def test_the_bound_of_a_cut_holds_with_the_moved_poles(scheme):
    """H∞ of the difference between the oscillators before and after, both read anew."""
    layer = make(8, 32, full=False, scheme=scheme)
    before = adapter_for(layer).read(layer).detach()
    (event,) = cs.compress_(layer, keep=cs.TargetOrder(10))
    after = adapter_for(layer).read(layer).detach()
    assert layer.order == 10
    assert h_infinity_error(before, after) <= event.error_bound
    plain = reduce_system(before, 10).error_bound
    assert (event.error_bound > plain * (1 + 1e-6)) == isinstance(scheme, IM)


def test_an_average_of_implicit_oscillators_is_moved_onto_the_circle_too():
    layer = make(4, 16, full=False)
    average = torch.optim.swa_utils.AveragedModel(layer)
    with torch.no_grad():
        average.module.log_frequency.add_(0.01)
    compressor = cs.Compressor(layer, when=[1], keep=cs.TargetOrder(6), follow=[average])
    compressor.step(1)
    followed = average.module
    assert followed.order == 6
    system = adapter_for(followed).read(followed).detach()
    torch.testing.assert_close((system.poles - 0.5).abs(), torch.full((6,), 0.5, dtype=torch.float64))
    assert not torch.equal(followed.log_frequency, layer.log_frequency)


def test_real_systems_are_stored_too():
    """Poles, B and C without an imaginary part."""
    for scheme in (IM(), DampedIMEX()):
        layer = make(scheme=scheme)
        poles = torch.tensor([0.5, 0.9, -0.2], dtype=torch.float64)
        system = DiagonalSystem(poles, torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64))
        nearest = adapter_for(layer).nearest(layer, system)
        found = adapter_for(layer).read(stored(layer, nearest)).detach()
        assert found.order == 3
        torch.testing.assert_close(found.poles, nearest.poles)


def test_moved_poles_are_those_that_with_poles_got():
    layer = make()
    system = DiagonalSystem(*_system([0.6 + 0.4j, 0.9 + 0.2j]))
    nearest = adapter_for(layer).nearest(layer, system)
    assert torch.equal(nearest.C, with_poles(system, nearest.poles).C)
