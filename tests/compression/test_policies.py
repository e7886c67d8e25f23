"""Policies against their definitions, tried order by order in exact arithmetic."""

import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from compressm.compression import Budget, CompressionError, EnergyTolerance, ErrorBound, KeepFraction, TargetOrder
from compressm.compression.policies import FewerStates, choose_orders
from compressm.control import DiagonalSystem, balanced_truncation, h_infinity_error, hankel_singular_values
from tests.compression.spectra import bound_of, rows_of, spectra_of_a_layer, spectra_of_a_model

# Multiples of 1/64: products with small whole numbers are exact.
SHARES = st.integers(0, 63).map(lambda share: share / 64)
POLICIES = [EnergyTolerance(0.05), ErrorBound(0.01), ErrorBound(2.0, relative=False), KeepFraction(0.5), TargetOrder(3)]


def order_of(policy, sigma):
    return policy({"ssm": sigma})["ssm"]


def sigma_of(*values):
    return torch.tensor(values, dtype=torch.float64)


@given(spectra_of_a_layer(), SHARES)
def test_energy_tolerance_is_the_smallest_order_that_keeps_the_share(sigma, tau):
    rows, n = rows_of(sigma), sigma.shape[-1]
    total = sum(Fraction(value) for row in rows for value in row)
    enough = [
        r
        for r in range(1, n + 1)
        if total > 0 and sum(Fraction(value) for row in rows for value in row[:r]) >= (1 - Fraction(tau)) * total
    ]
    assert order_of(EnergyTolerance(tau), sigma) == min(enough, default=n)


@given(spectra_of_a_layer(), st.integers(0, 256).map(lambda share: share / 64), st.booleans())
def test_error_bound_is_the_smallest_order_within_the_bound(sigma, eps, relative):
    n = sigma.shape[-1]
    largest = max(max(row) for row in rows_of(sigma))
    allowed = Fraction(eps) * Fraction(largest if relative else 1)
    enough = [r for r in range(1, n + 1) if largest > 0 and Fraction(bound_of(sigma, r)) <= allowed]
    assert order_of(ErrorBound(eps, relative), sigma) == min(enough, default=n)


@given(st.integers(1, 500), st.integers(1, 1000))
@example(100, 290)  # 0.29 * 100 = 28.999999999999996
@example(5, 900)
@example(2, 800)
def test_keep_fraction_keeps_at_most_its_share(n, thousandths):
    exact = Fraction(thousandths, 1000) * n
    assert order_of(KeepFraction(thousandths / 1000), torch.ones(n).double()) == max(1, math.floor(exact))


def test_keep_fraction_understands_shares_that_are_not_decimal():
    assert [order_of(KeepFraction(1 / 3), torch.ones(n).double()) for n in (2, 3, 6, 48)] == [1, 1, 2, 16]


@given(st.integers(1, 300), st.floats(0, 1, exclude_min=True, exclude_max=True), st.integers(1, 20))
@example(5, 0.9, 1)
@example(2, 0.8, 1)
@example(300, 1 - 2**-53, 1)
def test_repeated_cuts_by_a_fraction_reach_the_least_order(n, rho, at_least):
    least, steps = min(n, at_least), 0
    while n > least:
        smaller = choose_orders({"it": torch.ones(n).double()}, KeepFraction(rho), gate=1.0, at_least=at_least)["it"]
        assert least <= smaller < n
        assert smaller <= max(least, math.floor(Fraction(rho) * n + Fraction(1, 10**8)))
        n, steps = smaller, steps + 1
    assert steps <= 300
    assert choose_orders({"it": torch.ones(n).double()}, KeepFraction(rho), gate=1.0, at_least=at_least) == {"it": n}


@given(st.integers(1, 300))
def test_a_fraction_of_one_keeps_all_states(n):
    assert order_of(KeepFraction(1.0), torch.ones(n).double()) == n


@given(st.integers(1, 50), st.integers(1, 80))
def test_target_order_is_the_target_or_what_there_is(n, target):
    assert order_of(TargetOrder(target), torch.ones(n).double()) == min(n, target)


@pytest.mark.parametrize("policy", [*POLICIES, Budget(40)], ids=repr)
@given(spectra=spectra_of_a_model())
def test_orders_lie_between_1_and_n_and_are_whole_numbers(policy, spectra):
    orders = policy(spectra)
    assert list(orders) == list(spectra)
    assert all(type(r) is int and 1 <= r <= spectra[name].shape[-1] for name, r in orders.items())


@pytest.mark.parametrize("policy", [EnergyTolerance(0.5), ErrorBound(10.0), ErrorBound(10.0, relative=False)], ids=repr)
def test_a_layer_without_energy_keeps_every_state(policy):
    assert order_of(policy, torch.zeros(5).double()) == 5
    assert order_of(policy, torch.zeros(2, 5).double()) == 5


def test_a_tie_at_the_threshold_is_within_it():
    assert order_of(EnergyTolerance(0.25), torch.ones(8).double()) == 6
    assert order_of(EnergyTolerance(0.1), sigma_of(4, 3, 2, 1)) == 3
    assert order_of(ErrorBound(0.5), sigma_of(4, 3, 1)) == 2


def test_a_tolerance_of_zero_drops_only_exact_zeros():
    assert order_of(EnergyTolerance(0.0), sigma_of(1, 1e-300, 0, 0)) == 2
    assert order_of(ErrorBound(0.0), sigma_of(1, 1e-300, 0, 0)) == 2


def test_a_bank_goes_by_the_energy_of_all_its_channels():
    bank = torch.stack([sigma_of(100, 0, 0, 0), sigma_of(1, 1, 1, 1)])
    assert order_of(EnergyTolerance(0.02), bank) == 2
    assert order_of(EnergyTolerance(0.02), bank[1]) == 4
    # 8 of 12 stay with the first states; the first channel alone would need both of its own.
    assert order_of(EnergyTolerance(0.34), torch.stack([sigma_of(4, 4, 0), sigma_of(4, 0, 0)])) == 1


def test_a_bank_goes_by_its_worst_channel_where_bounds_count():
    bank = torch.stack([sigma_of(8, 1, 0, 0), sigma_of(4, 2, 1, 1)])
    assert order_of(ErrorBound(0.5), bank) == 2
    assert order_of(ErrorBound(2.0, relative=False), bank) == 3


def test_an_error_bound_holds_for_the_truncated_system():
    generator = torch.Generator().manual_seed(1)
    poles = torch.polar(torch.rand(24, generator=generator).double(), 6 * torch.rand(24, generator=generator).double())
    B = torch.randn(24, 2, generator=generator, dtype=torch.complex128)
    system = DiagonalSystem(poles, B, B.mT)
    sigma = hankel_singular_values(system)
    for eps in (0.1, 1.0):
        r = order_of(ErrorBound(eps), sigma)
        assert 1 <= r < 24
        assert h_infinity_error(system, balanced_truncation(system, r).system) <= eps * float(sigma[0])


def test_the_same_spectra_give_the_same_orders_in_any_precision_and_layout():
    sigma = sigma_of(4, 3, 2, 1)
    for same in (
        sigma.float(),
        sigma.clone().requires_grad_(),
        sigma.repeat(2, 1).mT.contiguous().mT[0],
        sigma[None, None],
    ):
        assert order_of(EnergyTolerance(0.1), same) == 3


@pytest.mark.parametrize("policy", [*POLICIES, Budget(40)], ids=repr)
def test_a_policy_can_be_compared_printed_pickled_and_not_changed(policy):
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert eval(repr(policy)) == policy
    assert len({policy, pickle.loads(pickle.dumps(policy))}) == 1
    with pytest.raises(AttributeError):
        policy.tau = 0.5


def test_numbers_of_numpy_become_plain_ones():
    assert repr(EnergyTolerance(np.float64(0.05))) == "EnergyTolerance(tau=0.05)"
    assert repr(EnergyTolerance(np.float64(0))) == "EnergyTolerance(tau=0.0)"


def test_fewer_states_are_left_one_by_one_but_never_none():
    keep = FewerStates(8)
    assert [keep.order(torch.ones(n)) for n in (256, 16, 9, 8, 3)] == [248, 8, 1, 1, 1]
    with pytest.raises(CompressionError, match="FewerStates: count"):
        FewerStates(0)
