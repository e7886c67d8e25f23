"""Overrides, the gate, rounding, and policies of one's own."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm.compression import (
    Budget,
    CompressionError,
    EnergyTolerance,
    ErrorBound,
    KeepFraction,
    TargetOrder,
    choose_orders,
)
from tests.compression.spectra import spectra_of_a_model


def layers(*sizes):
    return {f"blocks.{k}.ssm": torch.ones(n, dtype=torch.float64) for k, n in enumerate(sizes)}


def one(n, keep, **options):
    return choose_orders(layers(n), keep, **options)["blocks.0.ssm"]


ANY_POLICY = st.sampled_from([EnergyTolerance(0.2), ErrorBound(0.5), KeepFraction(0.6), TargetOrder(4)])


@given(spectra_of_a_model(), ANY_POLICY, st.integers(1, 8), st.integers(1, 100))
def test_the_gate_and_rounding_only_keep_more(spectra, keep, round_to, gate):
    orders = choose_orders(spectra, keep, round_to=round_to, gate=gate / 100)
    for name, wanted in keep(spectra).items():
        n = spectra[name].shape[-1]
        if not bool(spectra[name].any()):
            wanted = n  # nothing distinguishes its states
        multiple = min(n, math.ceil(Fraction(wanted, round_to)) * round_to)
        assert orders[name] == (multiple if multiple < Fraction(gate, 100) * n else n)
    assert list(orders) == list(spectra)


def test_a_layer_is_cut_only_below_the_gate():
    assert one(100, TargetOrder(94)) == 94
    assert one(100, TargetOrder(95)) == 100
    assert one(100, TargetOrder(99), gate=1.0) == 99
    assert one(100, TargetOrder(49), gate=0.5) == 49
    # 0.55 * 100 is 55.00000000000001 in floating point.
    assert one(100, TargetOrder(55), gate=0.55) == 100


def test_orders_are_rounded_up_before_the_gate_looks():
    assert one(100, TargetOrder(57), round_to=16) == 64
    assert one(100, TargetOrder(64), round_to=16) == 64
    assert one(100, TargetOrder(90), round_to=16) == 100
    assert one(100, TargetOrder(1), round_to=1000) == 100


def test_no_layer_goes_below_what_it_is_to_keep_at_least():
    assert one(100, TargetOrder(5), at_least=28) == 28
    assert one(100, TargetOrder(40), at_least=28) == 40
    assert one(20, TargetOrder(5), at_least=28) == 20
    assert one(100, TargetOrder(5), at_least=13, round_to=8) == 16
    order, path = 256, []
    while order > 28:
        order = one(order, KeepFraction(0.8), at_least=28, gate=1.0)
        path.append(order)
    assert path == [204, 163, 130, 104, 83, 66, 52, 41, 32, 28]


def test_the_first_pattern_that_matches_decides():
    spectra = layers(100, 100, 100)
    overrides = {"blocks.0.*": KeepFraction(1.0), "blocks.[01].*": TargetOrder(10)}
    orders = choose_orders(spectra, KeepFraction(0.5), overrides=overrides)
    assert orders == {"blocks.0.ssm": 100, "blocks.1.ssm": 10, "blocks.2.ssm": 50}
    swapped = dict(reversed(overrides.items()))
    assert choose_orders(spectra, KeepFraction(0.5), overrides=swapped)["blocks.0.ssm"] == 10


def test_a_budget_is_shared_by_the_layers_that_fall_to_it():
    spectra = layers(10, 10, 10)
    orders = choose_orders(spectra, Budget(12), overrides={"blocks.1.*": KeepFraction(1.0)}, gate=1.0)
    assert orders["blocks.1.ssm"] == 10
    assert orders["blocks.0.ssm"] + orders["blocks.2.ssm"] == 12
    assert choose_orders(spectra, TargetOrder(1), overrides={"*": Budget(12)})["blocks.2.ssm"] == 1


def test_patterns_know_upper_from_lower_case():
    with pytest.raises(CompressionError, match=r"'Blocks\.\*' matches no module; there are 'blocks\.0\.ssm'"):
        choose_orders(layers(4), TargetOrder(1), overrides={"Blocks.*": TargetOrder(1)})


def test_the_model_itself_has_the_empty_name():
    assert choose_orders({"": torch.ones(4).double()}, TargetOrder(2)) == {"": 2}
    assert choose_orders({"": torch.ones(4).double()}, TargetOrder(2), overrides={"": TargetOrder(1)}) == {"": 1}


def test_any_function_is_a_policy():
    seen = {}

    def half(spectra):
        seen.update(spectra)
        return {name: np.int64(len(sigma) // 2) for name, sigma in spectra.items()}

    orders = choose_orders({"a": torch.ones(6), "b": torch.ones(8)}, half)
    assert orders == {"a": 3, "b": 4}
    assert all(type(order) is int for order in orders.values())
    assert {sigma.dtype for sigma in seen.values()} == {torch.float64}


def test_a_policy_cannot_change_the_spectra_of_others():
    def greedy(spectra):
        spectra.clear()
        return {"blocks.0.ssm": 1}

    orders = choose_orders(layers(4, 4), TargetOrder(2), overrides={"blocks.0.*": greedy})
    assert orders == {"blocks.0.ssm": 1, "blocks.1.ssm": 2}
