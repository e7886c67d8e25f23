"""Budget against every allocation there is."""

import itertools
import pickle
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import compressm as cs
from compressm.compression import Budget, CompressionError
from compressm.compression.budget import Prices
from compressm.compression.policies import Limits, choose_orders
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba, SSMLayer
from compressm.models import LanguageModel, SequenceClassifier
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


UNITS = ("state_bytes", "parameters", "milliseconds")


def cheapest_of_all(spectra, allowed, price, limit):
    """The smallest summed bound of all allocations within the limit; None if there is none."""
    found = [
        summed_bound(spectra, orders)
        for orders in itertools.product(*allowed.values())
        if sum(price[name](r) for name, r in zip(spectra, orders, strict=True)) <= limit
    ]
    return min(found, default=None)


def linear(slope):
    return lambda order: float(3 + slope * order)


@given(
    spectra_of_a_model(max_layers=4, max_order=6, max_channels=2),
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
    st.integers(10, 150),
    st.integers(1, 6),
    st.sampled_from([0.5, 0.95, 1.0]),
)
def test_no_allocation_within_a_budget_of_bytes_loses_less(spectra, slopes, limit, step, gate):
    """Costs of a state differ between layers, and orders are rounded and gated."""
    price = {name: linear(slope) for name, slope in zip(spectra, slopes, strict=False)}
    allowed = {name: Limits.of([name], gate, step, 1).orders(name, s.shape[-1]) for name, s in spectra.items()}
    least = cheapest_of_all(spectra, allowed, price, limit)
    budget = Budget(state_bytes=limit).priced(lambda names: Prices(price))
    if least is None:
        with (
            pytest.warns(UserWarning, match="cannot be met")
            if sum(p(1) for p in price.values()) <= limit
            else (pytest.raises(CompressionError, match="one state in every layer that it cuts takes"))
        ):
            budget.allocated(spectra, allowed)
        return
    orders = budget.allocated(spectra, allowed)
    assert sum(price[name](r) for name, r in orders.items()) <= limit
    assert all(r in allowed[name] for name, r in orders.items())
    assert summed_bound(spectra, tuple(orders.values())) == least


@given(
    spectra_of_a_model(max_layers=4, max_order=6, max_channels=2),
    st.dictionaries(st.integers(1, 6), st.integers(1, 20).map(lambda k: k / 4), min_size=1),
    st.integers(1, 20).map(lambda k: k / 4),
)
def test_no_allocation_within_a_budget_of_time_loses_less(spectra, times, limit):
    """Times need not rise with the order."""
    longest = max(sigma.shape[-1] for sigma in spectra.values())
    times = {**times, longest: times.get(longest, 5.0)}

    def price(order):
        return times[min(known for known in times if known >= order)] / len(spectra)

    allowed = {name: range(1, sigma.shape[-1] + 1) for name, sigma in spectra.items()}
    prices = dict.fromkeys(spectra, price)
    least = cheapest_of_all(spectra, allowed, prices, limit * (1 + 1e-12))
    budget = Budget(milliseconds=limit, measure=times)
    if least is None:
        return
    orders = budget(spectra)
    assert summed_bound(spectra, tuple(orders.values())) == least
    assert orders == Budget(milliseconds=limit, measure=lambda order: price(order) * len(spectra))(spectra)


def model_of(layer=LRU, **options):
    torch.manual_seed(0)
    sizes = {"depth": 3, "width": 6, "order": 16, "inputs": 3, "classes": 5}
    return SequenceClassifier(layer, **{**sizes, **options}).eval()


def bytes_of(model):
    return sum(module.initial_state(1).nbytes for module in model.modules() if isinstance(module, SSMLayer))


def count_of(model):
    return sum(parameter.numel() for parameter in model.parameters())


X = torch.randn(4, 20, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layer", [LRU, S5, S4, S4D, LinOSS, Mamba])
@pytest.mark.parametrize(
    "options", [{}, {"gate": 0.7}, {"round_to": 4}, {"round_to": (2, 6, 9)}, {"uniform": True}], ids=str
)
def test_a_model_keeps_within_its_bytes_and_parameters(layer, options):
    calibrate = {"calibrate": lambda model: model(X)} if layer is Mamba else {}
    for unit, measured, share in (("state_bytes", bytes_of, 0.6), ("parameters", count_of, 0.9)):
        model = model_of(layer)
        limit = int(share * measured(model))
        cs.compress_(model, keep=Budget(**{unit: limit}), **options, **calibrate)
        assert 0.5 * limit < measured(model) <= limit
        # One state more in one layer does not fit, unless the options do not allow it.
        if not options and layer is not Mamba:
            smallest = min(
                module.initial_state(1).nbytes // module.order
                for module in model.modules()
                if isinstance(module, SSMLayer)
            )
            assert unit != "state_bytes" or measured(model) + smallest > limit


def test_the_whole_model_counts_though_only_some_layers_share_the_budget():
    model = model_of()
    limit = bytes_of(model) - 20 * 8
    cs.compress_(model, keep=Budget(state_bytes=limit), filter_fn=lambda module, name: "blocks.2" not in name)
    assert bytes_of(model) == limit
    assert model.blocks[2].ssm.order == 16


def test_a_budget_that_options_keep_from_being_met_says_so():
    model = model_of()
    with pytest.warns(UserWarning, match=r"Budget\(total_states=20\) cannot be met: .*blocks\.0\.ssm 8.* take 24"):
        cs.compress_(model, keep=Budget(20), round_to=(8, 12))
    assert [block.ssm.order for block in model.blocks] == [8, 8, 8]


@pytest.mark.parametrize("given", [{"state_bytes": 1}, {"parameters": 5}, {"total_states": 2}])
def test_a_budget_that_no_orders_meet_is_refused_before_training(given):
    with pytest.raises(CompressionError, match="one state in every layer"):
        cs.Compressor(model_of(), when=[1000], keep=Budget(**given))


def test_budgets_print_compare_and_pickle():
    for budget in (Budget(8), Budget(state_bytes=64), Budget(parameters=9), Budget(milliseconds=2.0, measure={8: 1.0})):
        again = pickle.loads(pickle.dumps(budget))
        assert again == budget
        assert hash(again) == hash(budget)
        assert eval(repr(budget), {"Budget": Budget}) == budget
    assert repr(Budget(milliseconds=2.0, measure=bytes_of)) == "Budget(milliseconds=2.0, measure=bytes_of)"
    assert Budget(8) != Budget(state_bytes=8)


def test_a_hundred_layers_of_different_widths_are_done_in_seconds():
    generator = torch.Generator().manual_seed(0)
    spectra = {
        str(k): torch.exp(-8 * torch.rand(256, generator=generator, dtype=torch.float64)).sort(descending=True).values
        for k in range(100)
    }
    price = {name: linear(259 + 4 * k) for k, name in enumerate(spectra)}
    start = time.perf_counter()
    orders = Budget(parameters=6_000_000).priced(lambda names: Prices(price))(spectra)
    assert 5_990_000 < sum(price[name](r) for name, r in orders.items()) <= 6_000_000
    assert time.perf_counter() - start < 20


def test_one_budget_may_be_shared_by_two_groups_of_layers():
    """The first group counts the others as they are, and they count the first as it is then: nothing is cut twice."""
    model = model_of()
    budget = Budget(state_bytes=bytes_of(model) - 80)
    cs.compress_(model, keep=budget, overrides={"blocks.0.*": budget})
    assert [block.ssm.order for block in model.blocks] == [6, 16, 16]
    assert bytes_of(model) == budget.state_bytes


def orders_of(model):
    return [block.ssm.order for block in model.blocks]


@pytest.mark.parametrize(("unit", "measured"), [("state_bytes", bytes_of), ("parameters", count_of)])
def test_overridden_layers_count_at_the_orders_that_they_get(unit, measured):
    model = model_of()
    cs.compress_(model, keep=cs.TargetOrder(4), overrides={"blocks.1.*": cs.TargetOrder(10)})
    limit = measured(model)
    again = model_of()
    cs.compress_(again, keep=Budget(**{unit: limit}), overrides={"blocks.0.*": cs.TargetOrder(4)})
    assert measured(again) == limit
    assert again.blocks[0].ssm.order == 4
    assert sum(orders_of(again)) == 18


def test_a_budget_in_overrides_counts_the_orders_of_keep():
    model = model_of()
    cs.compress_(model, keep=cs.TargetOrder(4), overrides={"blocks.0.*": Budget(state_bytes=8 * 20)})
    assert orders_of(model) == [12, 4, 4]


def test_a_budget_that_overrides_make_feasible_is_met():
    """One state in each layer takes 24 bytes here; with 4 in the first, 48."""
    model = model_of()
    cs.compress_(model, keep=Budget(state_bytes=48), overrides={"blocks.0.*": cs.TargetOrder(4)})
    assert orders_of(model) == [4, 1, 1]
    with pytest.raises(CompressionError, match=r"is 40, but .* that it cuts takes 48, of which 32 are in the rest"):
        cs.compress_(model_of(), keep=Budget(state_bytes=40), overrides={"blocks.0.*": cs.TargetOrder(4)})


def test_a_number_of_states_is_shared_by_its_own_layers_alone():
    model = model_of()
    cs.compress_(model, keep=Budget(10), overrides={"blocks.0.*": cs.TargetOrder(4)})
    assert model.blocks[0].ssm.order == 4
    assert sum(orders_of(model)) == 14


def test_a_layer_in_two_places_has_two_states():
    torch.manual_seed(0)
    model = LanguageModel(LRU, depth=3, width=6, order=16, vocabulary=7).eval()
    model.blocks[2].ssm = model.blocks[1].ssm
    cs.compress_(model, keep=Budget(state_bytes=100))
    used = sum(state.nbytes for state in cs.Stream(model, 1).state)
    assert 100 - 2 * 8 < used <= 100


TIMES = {4: 0.5, 8: 1.0, 16: 2.0}


@pytest.mark.parametrize(
    "options",
    [
        {"filter_fn": lambda module, name: name != "blocks.0.ssm"},
        {"overrides": {"blocks.0.*": cs.TargetOrder(16)}},
        {"overrides": {"blocks.0.*": cs.TargetOrder(4)}},
        {},
    ],
    ids=["left out", "kept", "cut", "all"],
)
def test_layers_that_a_budget_of_time_does_not_cut_take_time_too(options):
    model = model_of()
    cs.compress_(model, keep=Budget(milliseconds=1.0, measure=TIMES), **options)
    taken = sum(TIMES[min(known for known in TIMES if known >= r)] / 3 for r in orders_of(model))
    assert 0.8 < taken <= 1 + 1e-9


def test_time_is_also_counted_without_a_model():
    spectra = {name: torch.arange(16, 0, -1).double() for name in "abc"}
    orders = choose_orders(spectra, Budget(milliseconds=1.0, measure=TIMES), overrides={"a": cs.TargetOrder(16)})
    assert orders == {"a": 16, "b": 4, "c": 4}


def test_a_budget_beside_channels_with_their_own_orders_is_refused():
    """Their bytes are not known before the cut."""
    model = model_of(Mamba)
    with pytest.raises(CompressionError, match=r"blocks\.0\.ssm.* gives every channel its own order"):
        cs.compress_(
            model,
            keep=Budget(state_bytes=1000),
            overrides={"blocks.0.*": cs.TargetOrder(4)},
            calibrate=lambda model: model(X),
            selective=cs.PerChannel(),
        )
    assert orders_of(model) == [16, 16, 16]
