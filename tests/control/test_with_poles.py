"""Systems with moved poles: the refitted readout is the best one, and the bound bounds."""

import pytest
import torch

from compressm.control import DiagonalSystem, h2_error, h_infinity_error
from compressm.control.norms import distance_bound, with_poles


def random_system(n=6, inputs=2, outputs=3, bank=(), seed=0):
    g = torch.Generator().manual_seed(seed)
    size, phase = (torch.rand(*bank, n, generator=g, dtype=torch.float64) for _ in range(2))
    poles = torch.polar(0.6 + 0.35 * size, 3 * phase)
    B = torch.randn(*bank, n, inputs, generator=g, dtype=torch.complex128)
    return DiagonalSystem(poles, B, torch.randn(*bank, outputs, n, generator=g, dtype=torch.complex128))


def moved(system, by=1e-2):
    return system.poles * torch.polar(torch.full_like(system.decay, 1 - by), torch.full_like(system.decay, by))


def with_conjugates(system):
    """The real system that Re(C h) is."""
    pairs = [(system.poles, -1), (system.B, -2), (system.C / 2, -1)]
    return DiagonalSystem(*(torch.cat([part, part.conj()], dim=axis) for part, axis in pairs))


def distance(one, other):
    return h2_error(with_conjugates(one), with_conjugates(other))


def test_no_other_readout_is_nearer():
    """The distance of the outputs Re(C h) grows in every direction in which C moves from the refitted one."""
    system = random_system()
    fitted = with_poles(system, moved(system))
    best = distance(system, fitted)
    assert best < 0.6 * distance(system, DiagonalSystem(fitted.poles, system.B, system.C))
    for seed in range(5):
        direction = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.complex128)
        for step in (1e-3, -1e-3):
            other = DiagonalSystem(fitted.poles, fitted.B, fitted.C + step * direction)
            assert distance(system, other) > best


def test_poles_that_stay_keep_the_readout():
    system = random_system()
    fitted = with_poles(system, system.poles)
    assert torch.equal(fitted.C, system.C)
    assert torch.equal(fitted.B, system.B)


@pytest.mark.parametrize("factor", [1e-150, 1.0, 1e150])
def test_the_scale_of_a_system_does_not_matter(factor):
    system = random_system()
    small = DiagonalSystem(system.poles, factor * system.B, system.C / factor)
    fitted, other = (with_poles(one, moved(system)) for one in (system, small))
    torch.testing.assert_close(other.C * factor, fitted.C, rtol=1e-10, atol=1e-12)


def test_two_modes_that_become_one_share_their_readout():
    """Two modes that move to one pole are one mode for one input: the Gramian is singular, and C stays finite."""
    system = random_system(n=3, inputs=1, outputs=1)
    poles = system.poles.clone()
    poles[1] = poles[0]
    fitted = with_poles(system, poles)
    assert fitted.C.isfinite().all()
    assert distance(system, fitted) <= distance(system, DiagonalSystem(poles, system.B, system.C))


def test_members_of_a_bank_are_fitted_alone():
    bank = random_system(bank=(4,))
    fitted = with_poles(bank, moved(bank))
    for k in range(4):
        torch.testing.assert_close(fitted[k].C, with_poles(bank[k], moved(bank[k])).C)


def test_the_distance_of_two_systems_is_within_its_bound():
    for seed in range(5):
        system = random_system(seed=seed)
        other = with_poles(system, moved(system))
        peak = h_infinity_error(system, other)
        assert peak <= distance_bound(system, other) <= 24 * peak
