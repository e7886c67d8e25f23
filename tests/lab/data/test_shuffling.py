import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm_lab.data import DataError, Order


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
def test_an_epoch_is_a_permutation_without_its_rest(examples, batch, seed):
    if batch > examples:
        with pytest.raises(DataError, match=f"{examples} examples are fewer than a batch of {batch}"):
            Order(examples, batch, seed)
        return
    order = Order(examples, batch, seed)
    for epoch in range(2):
        steps = range(1 + epoch * order.steps_per_epoch, 1 + (epoch + 1) * order.steps_per_epoch)
        seen = torch.cat([order.at(step) for step in steps]).tolist()
        assert len(seen) == examples - examples % batch
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(range(examples))


def test_rows_are_the_steps_one_after_the_other():
    order = Order(17, 5, seed=3)
    rows = order.rows(2, 11)
    assert rows.dtype == torch.int64
    assert torch.equal(rows, torch.stack([order.at(step) for step in range(2, 12)]))


def test_the_order_depends_on_seed_and_epoch_alone():
    first, again = Order(100, 10, seed=1), Order(100, 10, seed=1)
    again.rows(1, 50)
    torch.rand(7)
    assert torch.equal(first.at(37), again.at(37))
    assert not torch.equal(first.rows(1, 10), first.rows(11, 20))
    assert not torch.equal(first.rows(1, 10), Order(100, 10, seed=2).rows(1, 10))


def test_torchs_own_numbers_go_on_as_if_nothing_was():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    Order(50, 5, seed=9).rows(1, 30)
    assert torch.equal(torch.rand(3), expected)


def test_what_a_caller_does_to_a_batch_stays_with_it():
    order = Order(10, 5, seed=0)
    order.at(1).zero_()
    assert order.at(1).sum() > 0


@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 2), (-1, -1)])
def test_steps_begin_at_one(first, last):
    with pytest.raises(DataError, match="expected 1 <= first <= last"):
        Order(10, 5, seed=0).rows(first, last)
