"""The error of a reduced system, as computed, is within its bound; without the rounding floor it often is not."""

import pytest
import torch

from compressm.control import (
    DiagonalSystem,
    balanced_truncation,
    error_bounds,
    h_infinity_norm,
    real_balanced_truncation,
)
from error_bound_floor import cases, error_in_extended_precision
from tests.systems import lru_trained_like


def worst(count, largest_order):
    found = [case for seed in range(count) for case in cases(seed, largest_order)]
    return found, [case for case in found if not case.error <= case.bound]


def test_no_error_of_140_systems_exceeds_its_bound():
    """Five of every kind and form."""
    found, violations = worst(140, largest_order=10)
    assert violations == []
    # The search looks where rounding matters: without the floor most of these cuts violate the bound.
    assert sum(case.error > case.tail for case in found) > len(found) / 2
    # The floor has a margin, and is not larger by orders of magnitude than it must be.
    assert 1 < max(case.floors for case in found) < 8


@pytest.mark.slow
def test_no_error_of_10_000_systems_exceeds_its_bound():
    found, violations = worst(10_000, largest_order=64)
    assert violations == []
    assert max(case.floors for case in found) < 8
    assert min(case.margin for case in found) < 1.01e-8


def test_the_oracle_finds_the_resonance_of_a_slow_mode():
    slow = DiagonalSystem(torch.polar(*torch.tensor([[1 - 1e-8], [1.0]], dtype=torch.float64)), *ones(1))
    nothing = DiagonalSystem(torch.zeros(1).to(torch.complex128), 0 * ones(1)[0], ones(1)[1])
    assert error_in_extended_precision(slow, nothing) == pytest.approx(1 / float(slow.stability_margin), rel=1e-9)


def ones(n):
    return torch.ones(n, 1, dtype=torch.complex128), torch.ones(1, n, dtype=torch.complex128)


def test_the_floor_is_all_that_the_bound_adds_to_the_formula():
    system = lru_trained_like(16, 2)
    for order in (1, 8, 16):
        cut = balanced_truncation(system, order)
        floor = 16 * 16 * 2**-52 * float(cut.sigma[0]) / float(1 - system.poles.abs().max())
        assert float(cut.error_bound - error_bounds(cut.sigma)[order]) == pytest.approx(floor, rel=1e-3)


def test_the_bound_of_real_balancing_has_the_floor_too():
    system = lru_trained_like(6, 1)
    assert real_balanced_truncation(system, 6).error_bound > 0


def test_a_member_of_a_bank_has_the_floor_of_its_own_poles():
    slow = DiagonalSystem(
        torch.tensor([[0.5], [1 - 1e-8]], dtype=torch.float64), *(part.real.expand(2, 1, 1) for part in ones(1))
    )
    bounds = balanced_truncation(slow, 1).error_bound
    torch.testing.assert_close(
        bounds, 16 * 2**-52 * h_infinity_norm(slow) / 2 / slow.stability_margin, rtol=0.5, atol=0
    )
