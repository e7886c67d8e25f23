"""Schedules: the paper's, anybody's, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm.compression import CompressionError, as_schedule, during_warmup, every, plan_text


def test_the_paper_cuts_four_times_within_the_first_tenth():
    assert during_warmup(180_000) == [4500, 9000, 13_500, 18_000]
    assert during_warmup(200_000) == [5000, 10_000, 15_000, 20_000]
    assert during_warmup(100, cuts=1, fraction=0.29) == [29]


def test_the_other_schedules_of_the_paper():
    assert list(every(1_000, start=2_000, until=3_000)) == [2000, 3000]
    assert list(every(5_000, until=20_000)) == during_warmup(200_000)
    assert len(every(5_000, until=200_000)) == 40


@given(st.integers(1, 30), st.integers(0, 1000), st.integers(1, 100))
def test_warm_up_cuts_are_equidistant_and_end_with_the_warm_up(cuts, more, percent):
    warmup = cuts + more
    total = -(-warmup * 100 // percent)
    steps = during_warmup(total, cuts, percent / 100)
    assert len(steps) == cuts
    assert steps[-1] == total * percent // 100
    gaps = {later - step for step, later in zip([0, *steps], steps, strict=False)}
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1


@given(st.integers(1, 50), st.integers(1, 200), st.integers(0, 200))
def test_every_is_the_steps_a_modulus_finds(k, start, more):
    until = start + more
    assert list(every(k, start=start, until=until)) == [s for s in range(start, until + 1) if (s - start) % k == 0]
    if k <= until:
        assert list(every(k, until=until)) == [s for s in range(1, until + 1) if s % k == 0]


@given(st.lists(st.integers(1, 10**6), min_size=1, unique=True))
def test_any_collection_becomes_sorted_steps(steps):
    expected, keys = sorted(steps), dict.fromkeys(steps).keys()
    for collection in (steps, tuple(steps), set(steps), frozenset(steps), keys, np.array(steps)):
        found = as_schedule(collection)
        assert found == expected
        assert all(type(step) is int for step in found)
    assert as_schedule(torch.tensor(steps)) == expected


@given(st.lists(st.integers(1, 10**6), min_size=1), st.data())
def test_a_step_that_is_named_twice_is_refused(steps, data):
    again = data.draw(st.sampled_from(steps))
    for collection in ([*steps, again], np.array([again, *steps])):
        with pytest.raises(CompressionError, match=r"when holds step \d+ twice, expected each step once"):
            as_schedule(collection)
    assert as_schedule({*steps, again}) == sorted(set(steps))


def test_a_schedule_is_its_own_schedule():
    assert as_schedule(range(3, 10, 3)) == as_schedule(as_schedule(range(3, 10, 3))) == [3, 6, 9]


def test_a_plan_says_how_many_and_when():
    assert plan_text(during_warmup(180_000)) == "4 cuts, at steps 4500, 9000, 13500, 18000"
    assert plan_text([700]) == "1 cut, at step 700"
    assert plan_text(every(5_000, until=200_000)) == "40 cuts, every 5000 steps from step 5000 to 200000"
    uneven = [1, 2, 3, 5, 8, 13, 21, 34, 55]
    assert plan_text(uneven) == "9 cuts, at steps 1, 2, 3, 5, 8, 13, ..., 55"
