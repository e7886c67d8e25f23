"""The search of LossTolerance, on losses that are functions of the orders: its theorems, its budget of trials."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm.compression import CompressionError, LossTolerance, Trials, choose_orders
from compressm.compression.policies import Limits


def zero(model):
    return 0.0


def trials_of(orders, loss, *, round_to=1, at_least=1, gate=1.0, uniform=False, **more):
    """Trial cuts whose loss is a function of the orders; every call is counted in `asked`."""
    asked, ones = [], {name: torch.ones(n) for name, n in orders.items()}
    limits = Limits.of(orders, gate, round_to, at_least)

    def limited(wanted):
        if uniform:
            return limits.one_for_all(ones, max(wanted.values()))
        return limits.applied_to_each(ones, wanted)

    def measure(wanted):
        asked.append(wanted)
        return loss(orders if wanted is None else wanted)

    trials = Trials(dict(orders), limited, measure, uniform=uniform, **more)
    return trials, asked


def geometric(n, ratio=0.7):
    return ratio ** torch.arange(n, dtype=torch.float64)


def threshold_cuts(spectra):
    """All cuts that one threshold on tails gives, from the most states to the fewest, found without the search."""
    shares = {name: [float(s[r:].sum() / s.sum()) for r in range(len(s) + 1)] for name, s in spectra.items()}
    levels = sorted({share for row in shares.values() for share in row[1:]})
    return [
        {name: max(1, next(r for r, share in enumerate(row) if share <= level + 1e-15)) for name, row in shares.items()}
        for level in levels
    ]


@st.composite
def spectra_and_weights(draw):
    count = draw(st.integers(1, 3))
    spectra, weights = {}, {}
    for k in range(count):
        n = draw(st.integers(2, 9))
        ratio = draw(st.floats(0.3, 0.95))
        spectra[f"layer{k}"] = geometric(n, ratio)
        weights[f"layer{k}"] = [0.0, *sorted(draw(st.lists(st.floats(0, 2), min_size=n, max_size=n)))]
    return spectra, weights


def rising_loss(orders, weights):
    """A loss that rises as states go: 1 + Σ of what each layer has lost."""

    def loss(wanted):
        return 1 + sum(weights[name][n - wanted[name]] for name, n in orders.items())

    return loss


@given(spectra_and_weights(), st.floats(0, 0.5))
def test_the_threshold_is_that_of_a_brute_force_search_and_no_more_states_stay(given_, increase):
    spectra, weights = given_
    orders = {name: len(sigma) for name, sigma in spectra.items()}
    loss = rising_loss(orders, weights)
    trials, asked = trials_of(orders, loss)
    found = LossTolerance(increase, zero).choose(spectra, trials)
    allowed = [cut for cut in [orders, *threshold_cuts(spectra)] if loss(cut) <= 1 + increase]
    assert loss(found) <= 1 + increase
    assert trials.states(found) <= min(sum(cut.values()) for cut in allowed)
    if len(orders) == 1:  # nothing is moved
        assert found == min(allowed, key=lambda cut: sum(cut.values()))
    assert len(asked) - 1 <= LossTolerance(increase, zero).most_trials(len(orders))


@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=4),
    st.integers(0, 2**31),
    st.one_of(st.none(), st.integers(1, 20)),
    st.sampled_from([1, 4]),
)
def test_whatever_the_loss_does_the_chosen_cut_was_tried_within_limit_and_budget(sizes, seed, cap, round_to):
    orders = {f"layer{k}": n for k, n in enumerate(sizes)}
    spectra = {name: geometric(n) for name, n in orders.items()}
    known = {}

    def loss(wanted):  # erratic, but the same for the same orders
        key = tuple(sorted(wanted.items()))
        generator = torch.Generator().manual_seed(hash((seed, key)) % 2**31)
        return known.setdefault(key, float(torch.rand((), generator=generator)))

    trials, asked = trials_of(orders, loss, round_to=round_to)
    policy = LossTolerance(0.3, zero, trials=cap)
    found = policy.choose(spectra, trials)
    assert trials.count <= policy.most_trials(len(orders))
    assert trials.count <= (cap or math.inf)
    assert len(asked) == trials.count + 1
    assert found == orders or any(
        found == made and value <= policy.limit(trials.present, trials.best) for made, value in trials.made
    )
    assert found == trials.limited(found)


def test_a_thousand_states_need_eight_trials_and_come_within_three_percent():
    orders = {"a": 1000}
    for wanted in (3, 10, 57, 400, 990):
        trials, _ = trials_of(orders, lambda cut, wanted=wanted: 1.0 if cut["a"] >= wanted else 2.0)
        found = LossTolerance(0.5, zero).choose({"a": geometric(1000, 0.99)}, trials)
        assert wanted <= found["a"] <= 1.03 * wanted + 1
        assert trials.count <= 8


def test_states_move_to_the_layer_that_misses_them():
    # Both spectra are alike, so one threshold gives both layers the same order; only "a" is needed.
    spectra = {"a": geometric(16), "b": geometric(16)}
    orders = dict.fromkeys(spectra, 16)
    trials, _ = trials_of(orders, lambda cut: 1 + max(0, 12 - cut["a"]) + 0.001 * (16 - cut["b"]))
    found = LossTolerance(0.1, zero).choose(spectra, trials)
    assert found["a"] == 12
    assert found["b"] < 12


def test_a_move_gives_states_where_that_lowers_the_loss_at_no_more_states():
    spectra = {"a": geometric(16), "b": geometric(16)}
    orders = dict.fromkeys(spectra, 16)

    # The limit is met at 8 and 8, not below; there, states of "a" are worth ten times those of "b".
    def loss(cut):
        total = sum(cut.values())
        return 1 + (5 if total < 16 else 0) + 0.01 * (16 - cut["a"]) + 0.001 * (16 - cut["b"])

    trials, _ = trials_of(orders, loss)
    found = LossTolerance(0.2, zero).choose(spectra, trials)
    assert sum(found.values()) == 16
    assert found["a"] > found["b"]
    assert loss(found) < loss({"a": 8, "b": 8})


def test_orders_that_limits_make_alike_are_tried_once():
    trials, asked = trials_of({"a": 64}, lambda cut: 1.0 if cut["a"] >= 24 else 9.0, round_to=16)
    assert LossTolerance(0.1, zero).choose({"a": geometric(64)}, trials) == {"a": 32}
    assert sorted(cut["a"] for cut in asked[1:]) == sorted({cut["a"] for cut in asked[1:]})
    assert len(asked) <= 3  # 16, 32, 48


def test_with_one_order_for_all_layers_nothing_is_moved():
    spectra = {"a": geometric(16), "b": geometric(16, 0.9)}
    trials, asked = trials_of(dict.fromkeys(spectra, 16), lambda cut: 1 + 0.01 * (16 - cut["b"]), uniform=True)
    found = LossTolerance(0.1, zero).choose(spectra, trials)
    assert found == {"a": 6, "b": 6}
    assert all(cut["a"] == cut["b"] for cut in asked[1:])


def test_what_cuts_have_added_since_the_best_loss_is_spent():
    spectra, orders = {"a": geometric(16)}, {"a": 16}

    def chosen(**more):
        trials, _ = trials_of(orders, lambda cut: 2 + 0.01 * (16 - cut["a"]), **more)
        return LossTolerance(0.05, zero).choose(spectra, trials)["a"]

    assert chosen() == 6  # 5 % of 2 is 0.1, ten states
    assert chosen(seen=2.0, added=0.09) == 6  # as good as ever: nothing is spent
    assert chosen(seen=1.0, added=0.0) == 11  # 5 % of 1
    assert chosen(seen=1.0, added=0.03) == 14
    assert chosen(seen=1.0, added=0.5) == 16


def test_ten_cuts_of_one_percent_do_not_become_ten():
    """A model that does not recover at all is raised by one per cent altogether, however often it is cut."""
    order, best, added, start = 256, None, 0.0, 2.0
    policy, loss = LossTolerance(0.01, zero), lambda cut: start + 0.001 * (256 - cut["a"])
    for _ in range(10):
        trials, _ = trials_of({"a": order}, loss, seen=best, added=added)
        found = policy.choose({"a": geometric(order, 0.97)}, trials)
        before, after = trials.present, loss(found)
        best, added = (before, 0.0) if best is None or before <= best else (best, added)
        added, order = added + after - before, found["a"]
    assert start < loss({"a": order}) <= start * 1.01 + 1e-12


def test_a_cautious_try_cuts_nothing_while_the_loss_does_not_depend_on_states():
    spectra, orders = {"a": geometric(16)}, {"a": 16}
    for slope, found in ((0.0, 16), (0.0001, 16), (0.01, 14)):
        trials, asked = trials_of(
            orders, lambda cut, slope=slope: 2 + slope * (16 - cut["a"]), smallest_orders={"a": 1}
        )
        assert LossTolerance(0.01, zero).choose(spectra, trials) == {"a": found}
        assert trials.count <= 9
        assert {"a": 1} in asked
    assert LossTolerance(0.01, zero).choose(spectra, trials_of(orders, lambda cut: 2.0)[0]) == {"a": 1}


def test_a_layer_without_values_keeps_its_states():
    spectra = {"a": torch.zeros(4), "b": geometric(4)}
    trials, _ = trials_of({"a": 4, "b": 4}, lambda cut: 1.0)
    assert LossTolerance(0.1, zero).choose(spectra, trials) == {"a": 4, "b": 1}


def test_a_negative_loss_needs_an_absolute_tolerance():
    spectra, orders = {"a": geometric(4)}, {"a": 4}
    with pytest.raises(CompressionError, match=r"loss is -3.*relative=False"):
        LossTolerance(0.1, zero).choose(spectra, trials_of(orders, lambda cut: -3.0)[0])
    trials, _ = trials_of(orders, lambda cut: -3.0 + 0.1 * (4 - cut["a"]))
    assert LossTolerance(0.2, zero, relative=False).choose(spectra, trials) == {"a": 2}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((-0.1, zero), "increase is -0.1"),
        ((math.nan, zero), "increase is nan"),
        ((0.1, lambda: 0.0), "loss takes"),
        ((0.1, float), "loss is the class float"),
    ],
)
def test_bad_arguments_are_refused(arguments, said):
    with pytest.raises(CompressionError, match=said):
        LossTolerance(*arguments)
    with pytest.raises(CompressionError, match="trials is 0"):
        LossTolerance(0.1, zero, trials=0)


def test_it_prints_what_it_may_cost_and_needs_a_model():
    policy = LossTolerance(0.01, zero, trials=9)
    assert repr(policy) == "LossTolerance(0.01, loss=zero, trials=9)"
    assert policy.plan(6) == "at most 9 trials a cut, for a loss that rises by at most 1 %"
    assert LossTolerance(0.01, zero).most_trials(1) == 8
    assert LossTolerance(0.01, zero).most_trials(6) == 20
    with pytest.raises(CompressionError, match="needs the model"):
        choose_orders({"a": geometric(4)}, policy)


def test_channels_with_orders_of_their_own_share_the_threshold():
    sigma = torch.stack([geometric(8, 0.3), geometric(8, 0.9)])
    asked = []

    def measure(cut):
        asked.append(cut)
        return 1.0 if cut is None or sum(cut["a"]) >= 9 else 2.0

    trials = Trials({"a": (8, 8)}, lambda cut: {"a": tuple(cut["a"])}, measure, frozenset({"a"}))
    found = LossTolerance(0.1, zero).choose({"a": sigma}, trials)["a"]
    levels = sorted({float(row[r:].sum() / row.sum()) for row in sigma for r in range(1, 9)})
    cuts = [
        tuple(max(1, next(r for r in range(9) if float(row[r:].sum() / row.sum()) <= level + 1e-12)) for row in sigma)
        for level in levels
    ]
    assert sum(found) == min(sum(cut) for cut in cuts if sum(cut) >= 9)
    assert found[0] < found[1]


def test_pairs_of_layers_are_tried_in_the_same_order_every_time():
    spectra = {name: geometric(12, ratio) for name, ratio in zip("abc", (0.5, 0.7, 0.9), strict=True)}
    runs = []
    for names in itertools.permutations("abc"):
        orders = dict.fromkeys(names, 12)
        trials, asked = trials_of(orders, lambda cut: 1 + 0.01 * sum((12 - r) ** 2 for r in cut.values()))
        LossTolerance(0.3, zero).choose({name: spectra[name] for name in names}, trials)
        runs.append([tuple(sorted(cut.items())) for cut in asked[1:]])
    assert all(run == runs[0] for run in runs)
