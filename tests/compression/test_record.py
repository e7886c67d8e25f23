"""Records in print and as JSON."""

import json
import pickle

from hypothesis import given
from hypothesis import strategies as st

from compressm.compression import Cut, Restored

CUT = {
    "step": 4500,
    "module": "blocks.3.ssm",
    "order": 384,
    "rank": 161,
    "error_bound": 0.0212,
    "measured_error": None,
    "energy_lost": 0.049,
    "seconds": 0.2,
}

FINITE = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def cuts(draw):
    order = draw(st.integers(1, 500))
    rank = draw(st.integers(1, order))
    return Cut(draw(st.integers(0, 10**9)), draw(st.text()), order, rank, *(draw(FINITE) for _ in range(4)))


@st.composite
def restorations(draw):
    orders = draw(st.dictionaries(st.text(), st.integers(1, 500)))
    return Restored(draw(st.integers(0, 10**9)), orders, draw(st.text()))


@given(cuts() | restorations())
def test_a_record_survives_json_and_pickle(event):
    stored = json.loads(json.dumps(event.as_dict(), allow_nan=False))
    assert type(event).from_dict(stored) == event
    assert pickle.loads(pickle.dumps(event)) == event
    assert len({event, type(event).from_dict(stored)}) == 1


def test_a_cut_prints_as_one_line():
    assert str(Cut(**CUT)) == "blocks.3.ssm: 384 -> 161 states, error <= 0.021"
    measured = {"error_bound": None, "measured_error": 0.00341}
    assert str(Cut(**{**CUT, **measured})) == "blocks.3.ssm: 384 -> 161 states, measured 0.0034"
    assert str(Cut(**{**CUT, "measured_error": 0.5})).endswith("161 states, error <= 0.021, measured 0.5")
    assert str(Cut(**{**CUT, "module": "", "error_bound": None})) == "the model: 384 -> 161 states"


def test_a_restoration_prints_the_orders_and_the_reason():
    restored = Restored(5200, {"blocks.0.ssm": 384, "blocks.1.ssm": 161}, "0.91 is below 0.99 times 0.93")
    assert str(restored) == ("restored blocks.0.ssm to 384, blocks.1.ssm to 161 states: 0.91 is below 0.99 times 0.93")


def test_a_record_does_not_share_what_it_was_made_from():
    orders = {"a": 3}
    restored = Restored(1, orders, "why")
    orders["a"] = 4
    restored.as_dict()["orders"]["a"] = 5
    assert restored.orders == {"a": 3}
