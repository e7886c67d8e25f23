"""Measured Gramians at any scale: B, C and the inputs may be tiny or huge, and only σ is scaled."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm.control import (
    DenseSystem,
    DiagonalSystem,
    StateCovariance,
    balanced_truncation,
    controllability_gramian,
    hankel_singular_values,
    measured_gramian,
)
from compressm.families.linear.reduction import reduce_system
from tests.strategies import diagonal_systems, few
from tests.systems import lru_at_initialisation, lru_trained_like

POWERS = st.integers(-500, 500)


def power(exponent):
    return torch.ldexp(torch.ones((), dtype=torch.float64), torch.tensor(exponent))


def scaled(system, inputs=0, outputs=0):
    """The system with B · 2^inputs and C · 2^outputs."""
    B, C = system.B * power(inputs), system.C * power(outputs)
    if isinstance(system, DenseSystem):
        return DenseSystem(system.A, B, C)
    return DiagonalSystem(system.poles, B, C)


def states_of(system, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4 * system.order, system.inputs, generator=generator, dtype=torch.float64)
    return system.states(inputs)


def covariance_of(states, exponent=0):
    return StateCovariance().add(states * power(exponent))


@given(diagonal_systems(max_order=12, max_channels=3), st.integers(-250, 250), POWERS)
@few
def test_scaling_states_and_readout_scales_sigma_by_exactly_that_power(system, inputs, outputs):
    P = measured_gramian(states_of(system))
    plain = hankel_singular_values(system, P=P)
    other = hankel_singular_values(scaled(system, 0, outputs), P=P * power(inputs) * power(inputs))
    assert torch.equal(other, plain * power(inputs) * power(outputs))


@given(st.integers(0, 99), st.integers(-250, 250), POWERS, st.sampled_from([1, 3, 6]))
@few
def test_scaling_leaves_poles_as_they_are_and_scales_what_reads_them(seed, inputs, outputs, order):
    system = lru_trained_like(12, 2, seed=seed)
    P = measured_gramian(states_of(system, seed))
    plain = reduce_system(system, order, P=P, fold=False)
    other = reduce_system(scaled(system, 0, outputs), order, P=P * power(inputs) * power(inputs), fold=False)
    assert float(other.system.poles.abs().max()) < 1
    torch.testing.assert_close(other.system.poles, plain.system.poles, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(other.system.B, plain.system.B, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(other.system.C / power(outputs), plain.system.C, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(other.change.right, plain.change.right, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(other.change.left, plain.change.left, rtol=1e-7, atol=1e-9)


@given(st.integers(0, 99), POWERS, POWERS, st.booleans())
@few
def test_exact_gramians_scale_too(seed, inputs, outputs, dense):
    system = lru_at_initialisation(8, 2, seed=seed)
    if dense:
        system = DenseSystem(system.A, system.B, system.C)
    plain, other = (hankel_singular_values(one) for one in (system, scaled(system, inputs, outputs)))
    torch.testing.assert_close(other, plain * power(inputs) * power(outputs), rtol=1e-12, atol=0)
    reduced = balanced_truncation(scaled(system, inputs, outputs), 4).diagonalise()
    torch.testing.assert_close(
        reduced.system.poles, balanced_truncation(system, 4).diagonalise().system.poles, rtol=1e-9, atol=1e-12
    )
    assert reduced.error_bound >= 2 * other[4:].sum()


@pytest.mark.parametrize("size", [1e-308, 1e-300, 1e-170, 1e-150, 1e150, 1e170, 1e300])
@pytest.mark.parametrize("which", ["B", "C"])
def test_results_are_stable_at_any_size_of_B_and_C(size, which):
    system = lru_trained_like(24, 3, seed=1)
    P, scale = covariance_of(states_of(system) * (size if which == "B" else 1)).scaled_gramian()
    B, C = (system.B * size, system.C) if which == "B" else (system.B, system.C * size)
    tiny = DiagonalSystem(system.poles, B, C)
    reduction = reduce_system(tiny, 6, P=P, fold=False)
    ordinary = DiagonalSystem(system.poles, system.B, system.C)
    plain = reduce_system(ordinary, 6, P=measured_gramian(states_of(system)), fold=False)
    torch.testing.assert_close(reduction.system.poles, plain.system.poles, rtol=1e-6, atol=1e-9)
    sizes = [(part.abs().max() / size).item() for part in (reduction.system.B, reduction.system.C)]
    wanted = [part.abs().max().item() for part in (plain.system.B, plain.system.C)]
    if size > 1e-307:  # numbers below have fewer digits, and so has the ratio of B to C
        assert sizes["BC".index(which)] == pytest.approx(wanted["BC".index(which)], rel=1e-4)
    sigma = hankel_singular_values(tiny, P=P) * scale
    torch.testing.assert_close(sigma / size, plain.sigma, rtol=1e-6, atol=1e-10 * float(plain.sigma[0]))


@given(st.integers(-1040, 1000))
def test_a_covariance_keeps_states_of_any_size(exponent):
    states = states_of(lru_at_initialisation(5, 2))
    plain, plain_scale = covariance_of(states).scaled_gramian()
    found, scale = covariance_of(states, exponent).scaled_gramian()
    assert float(scale.frexp().mantissa) == 0.5
    # Below 2^-1022 numbers have fewer digits.
    digits = 1e-12 if exponent > -950 else 1e-5
    ratio = power(exponent) / scale * plain_scale
    torch.testing.assert_close(
        found, plain * ratio * ratio, rtol=digits, atol=digits * float((plain * ratio * ratio).abs().max())
    )


def test_the_size_of_a_covariance_is_one_for_ordinary_states():
    states = states_of(lru_at_initialisation(5, 2))
    for size in (1e-30, 1.0, 1e30):
        P, scale = covariance_of(states * size).scaled_gramian()
        assert scale == 1
        assert torch.equal(P, measured_gramian(states * size))


def test_sums_of_states_of_very_different_sizes_follow_the_larger():
    large = states_of(lru_at_initialisation(5, 2))
    for small in (large * 1e-170, large * 0):
        ahead = StateCovariance().add(small).add(large)
        behind = StateCovariance().add(large).merge(StateCovariance().add(small))
        assert torch.equal(ahead.gramian(), behind.gramian())
        torch.testing.assert_close(2 * ahead.gramian(), measured_gramian(large), rtol=1e-14, atol=0)
    tiny = StateCovariance().add(large * 0).add(large * 1e-170)
    P, scale = tiny.scaled_gramian()
    torch.testing.assert_close(2 * P * (scale / 1e-170) ** 2, measured_gramian(large), rtol=1e-9, atol=1e-12)


def over_all(parts):
    """Every covariance over all of them, as in processes: threads that wait for the numbers of the others."""
    shown, barrier = [None] * len(parts), threading.Barrier(len(parts))

    def total_of(process):
        def total(tensor):
            shown[process] = tensor
            barrier.wait()
            found = torch.stack(shown).sum(0)
            barrier.wait()
            return found

        return total

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(lambda process: parts[process].over(total_of(process)), range(len(parts))))


def test_a_covariance_over_processes_agrees_on_the_scale():
    states = torch.stack([states_of(lru_at_initialisation(5, 2), seed) for seed in range(2)])
    sizes = torch.tensor([[1.0, 1e-170], [1e-170, 1e-300], [0.0, 1e-170]], dtype=torch.float64)
    for found in over_all([StateCovariance().add(states * size[:, None, None]) for size in sizes]):
        P, scale = found.scaled_gramian()
        assert scale.tolist() == [1.0, 2.0**-512]
        torch.testing.assert_close(3 * P[0], measured_gramian(states)[0], rtol=1e-13, atol=1e-15)
        expected = 2 * measured_gramian(states * 1e-170 / 2.0**-512)[1]
        torch.testing.assert_close(3 * P[1], expected, rtol=1e-13, atol=0)


@given(diagonal_systems(max_order=8, max_channels=2))
@few
def test_an_exact_gramian_given_as_P_gives_the_exact_values_at_any_scale(system):
    for exponent in (-400, 0, 400):
        other = scaled(system, 0, exponent)
        P = controllability_gramian(system)
        expected = hankel_singular_values(system) * power(exponent)
        torch.testing.assert_close(
            hankel_singular_values(other, P=P), expected, rtol=1e-6, atol=1e-7 * float(expected.max())
        )
