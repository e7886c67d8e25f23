"""Budget against every allocation there is."""

import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm.compression import Budget, CompressionError
from tests.compression.spectra import bound_of, spectra_of_a_model


def allocations(spectra, total):
    """Every way to share out exactly `total` states, or all of them if there are fewer."""
    sizes = [sigma.shape[-1] for sigma in spectra.values()]
    total = min(total, sum(sizes))
    return [orders for orders in itertools.product(*(range(1, n + 1) for n in sizes)) if sum(orders) == total]


def summed_bound(spectra, orders):
    return sum(bound_of(sigma, r) for sigma, r in zip(spectra.values(), orders, strict=True))


@given(spectra_of_a_model(max_layers=4, max_order=5, max_channels=3), st.integers(0, 20))
def test_the_summed_bound_is_the_smallest_of_all_allocations(spectra, spare):
    total = len(spectra) + spare
    every = allocations(spectra, total)
    least = min(summed_bound(spectra, orders) for orders in every)
    # Whole numbers: equal means equal. Of the best allocations, the one that keeps most in the first layers.
    expected = max(orders for orders in every if summed_bound(spectra, orders) == least)
    assert tuple(Budget(total)(spectra).values()) == expected


@given(spectra_of_a_model(max_layers=3, max_order=4), st.integers(0, 12))
def test_using_less_than_the_budget_is_never_better(spectra, spare):
    total = len(spectra) + spare
    found = summed_bound(spectra, tuple(Budget(total)(spectra).values()))
    smaller = [orders for less in range(len(spectra), total + 1) for orders in allocations(spectra, less)]
    assert found == min(summed_bound(spectra, orders) for orders in smaller)


@given(st.integers(0, 2**31), st.integers(3, 40))
def test_single_systems_keep_the_largest_values_of_all(seed, total):
    """Where no layer is a bank, the best is to keep the first of each layer and the largest of all the rest."""
    values = torch.rand(3, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    spectra = {str(k): sigma.sort(descending=True).values for k, sigma in enumerate(values)}
    rest = sorted((float(s) for sigma in spectra.values() for s in sigma[1:]), reverse=True)
    dropped = 2 * sum(rest[total - 3 :])
    assert summed_bound(spectra, Budget(total)(spectra).values()) == pytest.approx(dropped, rel=1e-12)


def test_a_bank_is_judged_by_its_worst_channel():
    """A second state lowers its bound from 24 to 16, and not by the sum over its channels, 18."""
    bank = torch.tensor([[8, 4, 4, 4], [8, 5, 5, 0]], dtype=torch.float64)
    assert [bound_of(bank, r) for r in (1, 2, 3, 4)] == [24, 16, 8, 0]
    spectra = {"bank": bank, "single": torch.tensor([9, 6, 2], dtype=torch.float64)}
    assert Budget(3)(spectra) == {"bank": 1, "single": 2}
    assert Budget(4)(spectra) == {"bank": 2, "single": 2}


def test_equal_layers_are_shared_out_the_same_way_every_time():
    spectra = {name: torch.ones(4, dtype=torch.float64) for name in "abc"}
    assert Budget(7)(spectra) == {"a": 4, "b": 2, "c": 1}
    assert Budget(3)(spectra) == {"a": 1, "b": 1, "c": 1}
    assert Budget(12)(spectra) == Budget(1000)(spectra) == {"a": 4, "b": 4, "c": 4}


def test_a_budget_below_one_state_a_layer_is_refused_with_both_numbers():
    with pytest.raises(CompressionError, match=r"total_states is 2 for 3 layers"):
        Budget(2)({name: torch.ones(4, dtype=torch.float64) for name in "abc"})


def test_a_deep_model_takes_well_under_a_second():
    values = torch.rand(48, 1024, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spectra = {str(k): sigma.sort(descending=True).values for k, sigma in enumerate(values)}
    begun = time.process_time()
    assert sum(Budget(10_000)(spectra).values()) == 10_000
    assert time.process_time() - begun < 1


def test_the_order_of_layers_decides_only_ties():
    values = torch.rand(3, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    spectra = {str(k): sigma.sort(descending=True).values for k, sigma in enumerate(values)}
    for total in range(3, 16):
        assert Budget(total)(spectra) == Budget(total)(dict(reversed(spectra.items())))


def test_layers_of_one_state_are_allowed():
    assert Budget(2)({"a": torch.ones(1).double(), "b": torch.ones(1).double()}) == {"a": 1, "b": 1}
    assert Budget(3)({"a": torch.ones(1).double(), "b": torch.ones(3).double()}) == {"a": 1, "b": 2}
