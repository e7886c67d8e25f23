"""Which states stay."""

import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm.compression import Largest, Random, Smallest
from compressm.control import DiagonalSystem, balanced_truncation
from tests import unhooked

SELECTIONS = [Largest(), Smallest(), Random(3)]


def chosen(select, n, order, salt="blocks.0.ssm@5000"):
    return select(torch.ones(n, dtype=torch.float64), order, salt=salt).tolist()


@pytest.mark.parametrize("select", SELECTIONS, ids=repr)
@given(n=st.integers(1, 60), data=st.data())
def test_a_selection_is_order_different_states_in_rising_order(select, n, data):
    order = data.draw(st.integers(1, n))
    kept = select(torch.ones(n, dtype=torch.float64), order, salt="a")
    assert kept.dtype == torch.int64
    assert kept.tolist() == sorted(set(kept.tolist()) & set(range(n)))
    assert len(kept) == order
    assert torch.equal(kept, select(torch.ones(n, dtype=torch.float64), order, salt="a"))
    assert torch.equal(kept, select(torch.ones(5, n), order, salt="a")), "a bank shares them"


def test_largest_and_smallest_are_the_two_ends_of_a_falling_spectrum():
    assert chosen(Largest(), 6, 2) == [0, 1]
    assert chosen(Smallest(), 6, 2) == [4, 5]


def test_random_differs_between_layers_cuts_and_seeds():
    picks = {tuple(chosen(Random(0), 100, 50, salt)) for salt in ("blocks.0.ssm@1", "blocks.1.ssm@1", "blocks.0.ssm@2")}
    picks |= {tuple(chosen(Random(seed), 100, 50, "blocks.0.ssm@1")) for seed in (1, -1, 10)}
    assert len(picks) == 6


def test_random_is_the_same_in_another_process_and_leaves_its_generators_alone():
    """A plain process: the tests' shape checker draws from Python's generator itself."""
    script = """
import random, torch
from compressm.compression import Random

before = random.getstate(), torch.get_rng_state()
print(Random(7)(torch.ones(40), 11, salt="blocks.0.ssm@5").tolist())
assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
"""
    assert unhooked.run(script).strip() == str(chosen(Random(7), 40, 11, "blocks.0.ssm@5"))


def test_random_draws_every_state_equally_often():
    counts = Counter(state for k in range(2000) for state in chosen(Random(0), 8, 2, salt=str(k)))
    # 500 expected, standard deviation √(2000 · ¼ · ¾) = 19.
    assert all(abs(counts[state] - 500) < 5 * 19 for state in range(8))


@pytest.mark.parametrize("select", SELECTIONS, ids=repr)
def test_balanced_truncation_takes_the_states(select):
    poles = torch.linspace(0.1, 0.9, 6).double().expand(3, 6)
    B = torch.randn(3, 6, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bank = DiagonalSystem(poles, B, B.mT)
    states = select(torch.ones(3, 6), 2, salt="a")
    truncation = balanced_truncation(bank, states=states)
    assert truncation.order == 2
    dropped = [i for i in range(6) if i not in states.tolist()]
    torch.testing.assert_close(truncation.error_bound, 2 * truncation.sigma[:, dropped].sum(-1), rtol=1e-10, atol=0)


@pytest.mark.parametrize("select", SELECTIONS, ids=repr)
def test_a_selection_can_be_compared_printed_and_pickled(select):
    assert pickle.loads(pickle.dumps(select)) == select == eval(repr(select))
    assert hash(select) == hash(pickle.loads(pickle.dumps(select)))
