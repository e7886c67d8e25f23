"""One order for all layers, chosen from the summed tails."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import compressm as cs
from compressm.compression import CompressionError, choose_orders
from compressm.layers import LRU, Mamba
from compressm.models import SequenceClassifier
from tests.compression.spectra import bound_of, rows_of, spectra_of_a_model

X = torch.randn(4, 24, 3, generator=torch.Generator().manual_seed(0))
TARGETS = st.integers(1, 8).map(cs.TargetOrder)


def two_orders(first=16, second=6, layer=LRU):
    """A model whose layers have different orders."""
    torch.manual_seed(0)
    small, large = (
        SequenceClassifier(layer, depth=2, width=4, order=order, inputs=3, classes=5) for order in (second, first)
    )
    large.blocks[1] = small.blocks[1]
    return large


def orders_of(model):
    return [module.order for module in model.modules() if isinstance(module, LRU | Mamba)]


def one_order(spectra, keep, **options):
    return choose_orders(spectra, keep, **{"gate": 1.0, **options, "uniform": True})


def alive(spectra):
    return {name: sigma for name, sigma in spectra.items() if bool(sigma.any())}


def as_cut(order, spectra):
    """What `choose_orders` makes of one order: nothing, if it cuts no layer."""
    seen = alive(spectra)
    if not seen or order >= max(sigma.shape[-1] for sigma in seen.values()):
        return {name: sigma.shape[-1] for name, sigma in spectra.items()}
    return {name: order if name in seen else sigma.shape[-1] for name, sigma in spectra.items()}


@given(spectra_of_a_model(), st.integers(0, 63).map(lambda share: share / 64))
def test_an_energy_tolerance_goes_by_the_sum_of_all_tails(spectra, tau):
    rows = [row for sigma in spectra.values() for row in rows_of(sigma)]
    longest = max((sigma.shape[-1] for sigma in alive(spectra).values()), default=1)
    total = sum(map(sum, rows))
    enough = [r for r in range(1, longest + 1) if sum(sum(row[r:]) for row in rows) <= tau * total]
    assert one_order(spectra, cs.EnergyTolerance(tau)) == as_cut(min(enough, default=longest), spectra)


@given(spectra_of_a_model(), st.sampled_from([0.0, 0.5, 2.0]))
def test_an_error_bound_holds_in_every_layer(spectra, eps):
    orders = one_order(spectra, cs.ErrorBound(eps))
    for name, sigma in alive(spectra).items():
        kept = min(orders[name], sigma.shape[-1])
        assert bound_of(sigma, kept) <= eps * float(sigma.max()) or kept == sigma.shape[-1]


@given(spectra_of_a_model(), TARGETS)
def test_a_target_is_the_order_of_all(spectra, keep):
    assert one_order(spectra, keep) == as_cut(keep.n, spectra)


@given(spectra_of_a_model(), st.integers(8, 40))
def test_a_budget_is_the_largest_order_that_fits(spectra, total):
    seen = alive(spectra)
    fitting = total >= sum(sigma.shape[-1] for sigma in seen.values())
    order = max((sigma.shape[-1] for sigma in seen.values()), default=1) if fitting else total // len(seen)
    assert one_order(spectra, cs.Budget(total)) == as_cut(order, spectra)


def test_a_function_gives_the_largest_order_that_it_chooses():
    spectra = {"a": torch.ones(8).double(), "b": torch.ones(6).double()}
    assert one_order(spectra, lambda spectra: {"a": 2, "b": 3}) == {"a": 3, "b": 3}


def test_layers_with_fewer_states_are_filled_up_and_the_output_stays():
    model, reference = two_orders().eval(), two_orders().eval()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="zero states fill up blocks.1.ssm to 10 states, so that all layers have one"):
        cuts = cs.compress_(model, keep=cs.TargetOrder(10), uniform=True, optimizer=optimizer)
    assert [(cut.module, cut.order, cut.rank) for cut in cuts] == [("blocks.0.ssm", 16, 10), ("blocks.1.ssm", 6, 10)]
    assert orders_of(model) == [10, 10]
    assert str(cuts[1]) == "blocks.1.ssm: 6 -> 10 states, error <= 0"
    cs.compress_(reference, keep=cs.TargetOrder(10))
    assert orders_of(reference) == [10, 6]
    torch.testing.assert_close(model(X), reference(X), rtol=1e-5, atol=1e-6)
    model.train()(X).sum().backward()
    optimizer.step()


def test_no_layer_gets_states_that_none_of_them_needs():
    model = two_orders(16, 16)
    for block, rank in zip(model.blocks, (3, 5), strict=True):
        block.ssm.B_re.data[rank:] = block.ssm.B_im.data[rank:] = 0
    cs.compress_(model, keep=cs.TargetOrder(10), uniform=True)
    assert orders_of(model) == [5, 5]
    cs.pad_orders_(model, 16)
    cs.compress_(model, keep=cs.TargetOrder(10), uniform=True, round_to=(2, 7, 12))
    assert orders_of(model) == [7, 7]


@pytest.mark.filterwarnings("ignore:zero states fill up")
@pytest.mark.parametrize(("increase", "below"), [(0.5, 16), (100.0, 6)])
def test_cuts_that_are_tried_give_layers_of_other_orders_one_order_too(increase, below):
    """The trial of an order above that of the smaller layer was refused as one from 1 to 6, so nothing was cut."""
    model, tried = two_orders().eval(), []

    def loss(given):
        tried.append(orders_of(given))
        with torch.no_grad():
            return float(given(X).square().mean()) + 0.01 * (16 - tried[-1][0])

    cuts = cs.compress_(model, keep=cs.LossTolerance(increase, loss=loss), uniform=True)
    assert any(first == second > 6 for first, second in tried)
    first, second = orders_of(model)
    assert first == second < below
    assert loss(model) == pytest.approx(cuts[0].loss_after, rel=1e-5)


def test_without_a_cut_nothing_is_filled_up_and_a_warning_says_so():
    model = two_orders()
    with pytest.warns(UserWarning, match=r"the orders are 16, 6, not one for all layers\. .*pad_orders_"):
        assert cs.compress_(model, keep=cs.TargetOrder(20), uniform=True) == []
    assert orders_of(model) == [16, 6]


def test_one_order_is_also_one_that_round_to_allows():
    model = two_orders()
    with pytest.warns(UserWarning, match="zero states fill up blocks.1.ssm to 8 states"):
        cs.compress_(model, keep=cs.TargetOrder(5), uniform=True, round_to=cs.powers_of_two)
    assert orders_of(model) == [8, 8]


def test_a_compressor_keeps_one_order_through_a_training():
    model = two_orders(16, 12)
    optimizer = torch.optim.AdamW(model.parameters())
    compressor = cs.Compressor(
        model, optimizer, when=[1, 2, 3], keep=cs.EnergyTolerance(0.1), uniform=True, round_to=(10, 8, 6, 4)
    )
    seen = []
    for step in (1, 2, 3):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
        compressor.step(step)
        seen.append(orders_of(model))
    assert seen[-1][0] == seen[-1][1]
    assert seen[-1][0] in (10, 8, 6, 4)


def test_what_makes_no_sense_beside_it_is_refused():
    model = two_orders()
    with pytest.raises(CompressionError, match=r"uniform with overrides for 'blocks\.0\.\*'"):
        cs.compress_(model, keep=cs.TargetOrder(4), uniform=True, overrides={"blocks.0.*": cs.TargetOrder(2)})
    mamba = two_orders(8, 4, Mamba)
    with pytest.raises(CompressionError, match="gives every channel its own order"):
        cs.compress_(
            mamba, keep=cs.TargetOrder(4), uniform=True, selective=cs.PerChannel(), calibrate=lambda model: model(X)
        )
    assert (orders_of(model), orders_of(mamba)) == ([16, 6], [8, 4])


def test_zero_states_of_a_layer_that_is_not_cut_are_in_the_history_and_load_without_a_word():
    model = two_orders()
    compressor = cs.Compressor(model, when=[1, 2], keep=cs.TargetOrder(10), uniform=True)
    with pytest.warns(UserWarning, match="zero states fill up blocks.1.ssm to 10 states"):
        events = compressor.step(1)
    assert [(event.module, event.order, event.rank) for event in events][1] == ("blocks.1.ssm", 6, 10)
    assert compressor.history == events
    compressor.load_state_dict(compressor.state_dict())
    assert compressor.history == events
    with pytest.raises(cs.compression.CompressionError, match="rank is 10, expected an integer from 1 to 6"):
        dataclasses.replace(events[1], error_bound=0.5)
